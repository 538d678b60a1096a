"""Recognises nodes of a traced graph; graph rewriting is built from these functions."""

import operator
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx

CASTS = ("to", "float", "type", "type_as")


def is_function(node: Any, *functions: Any) -> bool:
    """Return whether `node` calls one of `functions`."""
    return isinstance(node, fx.Node) and node.op == "call_function" and node.target in functions


def is_method(node: Any, *names: str) -> bool:
    """Return whether `node` calls a method of one of `names`."""
    return isinstance(node, fx.Node) and node.op == "call_method" and node.target in names


def is_op(node: Any, name: str) -> bool:
    """Return whether `node` calls `name`, as a method of a tensor or as a function of torch or torch.nn.functional."""
    return is_method(node, name) or is_function(node, *(vars(home)[name] for home in (torch, F) if name in vars(home)))


def value(node: fx.Node) -> torch.Tensor:
    """Return the example value of `node`."""
    return node.meta["example_value"]


def is_tensor(node: Any) -> bool:
    """Return whether `node` is known to be a tensor."""
    return isinstance(node, fx.Node) and isinstance(node.meta.get("example_value"), torch.Tensor)


def operands(node: Any, is_first: Callable[[Any], bool]) -> tuple[Any, Any] | None:
    """Return the two operands of a commutative node, the one that `is_first` first; None if neither is."""
    a, b = node.args[:2]
    if is_first(a):
        return a, b
    return (b, a) if is_first(b) else None


def is_sum(node: Any) -> bool:
    """Return whether `node` is a + b."""
    return is_function(node, operator.add, torch.add) and not node.kwargs


def is_product(node: Any) -> bool:
    """Return whether `node` is a * b."""
    return is_function(node, operator.mul, torch.mul) and not node.kwargs


def uncast(node: Any) -> Any:
    """Return the node that `node` is a copy of in fp32 or in the same dtype, without rounding."""
    while is_method(node, *CASTS) and is_tensor(node) and is_tensor(node.args[0]):
        if value(node).dtype not in (torch.float32, value(node.args[0]).dtype):
            break
        node = node.args[0]
    return node


def drop_casts(graph: fx.GraphModule) -> None:
    """Erase casts of tensors to the dtype they have, in place: they launch nothing."""
    for node in list(graph.graph.nodes):
        is_cast = is_method(node, "to") and len(node.args) == 2 and isinstance(node.args[1], torch.dtype)
        if is_cast and not node.kwargs and is_tensor(node.args[0]) and value(node.args[0]).dtype == node.args[1]:
            node.replace_all_uses_with(node.args[0])
            graph.graph.erase_node(node)


def is_like(node: Any, pattern: Any, given: fx.Node, parts: set[fx.Node]) -> bool:
    """Return whether `node` computes of `given` what `pattern`, a node of another graph, computes of its placeholder.

    parts: the nodes found between the two are added to it.
    """
    if not isinstance(pattern, fx.Node) or not isinstance(node, fx.Node):
        return type(node) is type(pattern) and node == pattern
    if pattern.op == "placeholder":
        return node is given
    if (node.op, node.target, node.kwargs) != (pattern.op, pattern.target, pattern.kwargs):
        return False
    parts.add(node)
    same = len(node.args) == len(pattern.args)
    return same and all(is_like(a, b, given, parts) for a, b in zip(node.args, pattern.args, strict=True))


def only_user(node: Any) -> Any:
    """Return the only user of `node`, None if there are more or none."""
    return next(iter(node.users)) if len(node.users) == 1 else None


def erase_unused(graph: fx.Graph, nodes: Iterable[fx.Node]) -> None:
    """Erase those of `nodes` that no other node uses, the last ones first."""
    for node in sorted(nodes, reverse=True):
        if not node.users:
            graph.erase_node(node)


def replace(graph: fx.Graph, op: Any, arguments: tuple[Any, ...], last: fx.Node, parts: Iterable[fx.Node]) -> None:
    """Put a call of `op` in the place of `last`, and erase `parts`."""
    with graph.inserting_before(last):
        new = graph.call_function(op, arguments)
    last.replace_all_uses_with(new, propagate_meta=True)
    erase_unused(graph, parts)


def replace_pair(
    graph: fx.Graph, op: Any, arguments: tuple[Any, ...], pair: tuple[fx.Node, fx.Node], before: fx.Node
) -> None:
    """Put a call of `op`, which returns two tensors, before a node, and erase the `pair` and the nodes that only it
    used."""
    with graph.inserting_before(before):
        both = graph.call_function(op, arguments)
        for i, old in enumerate(pair):
            new = graph.call_function(operator.getitem, (both, i))
            old.replace_all_uses_with(new, propagate_meta=True)
    for old in pair:
        erase_upwards(graph, old)


def erase_upwards(graph: fx.Graph, node: fx.Node) -> None:
    """Erase `node` and the nodes that only it used, except placeholders of the graph."""
    if node.users or node.op == "placeholder":
        return
    inputs = node.all_input_nodes
    graph.erase_node(node)
    for before in inputs:
        erase_upwards(graph, before)
