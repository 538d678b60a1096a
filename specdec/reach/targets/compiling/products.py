"""Replaces linear products in a traced graph by `specdec::linear`, and those of a gated MLP by `gated_linear`."""

import operator
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx

import specdec.backends.linear  # noqa: F401 (registers the ops)
from specdec.reach.targets.compiling.matching import (
    erase_unused,
    is_function,
    is_method,
    is_product,
    is_tensor,
    only_user,
    operands,
    value,
)

ACTIVATIONS = {F.silu: "silu", F.gelu: "gelu"}


def take_over_products(graph: fx.GraphModule) -> int:
    """Rewrite the linear products of `graph` in place; return their number."""
    found = [n for n in graph.graph.nodes if is_function(n, F.linear) and not n.kwargs and _is_matrix(n.args[1])]
    for node in found:
        gated = _gated(node)
        with graph.graph.inserting_before(node):
            arguments = (*node.args, None)[:3]
            if gated is None:
                new = graph.graph.call_function(torch.ops.specdec.linear.default, arguments)
            else:
                new = graph.graph.call_function(torch.ops.specdec.gated_linear.default, (*arguments, gated[1]))
        last, parts = (node, {node}) if gated is None else (gated[0], gated[2])
        new.meta = dict(last.meta)
        last.replace_all_uses_with(new)
        erase_unused(graph.graph, parts)
    graph.graph.lint()
    graph.recompile()
    return len(found)


def _is_matrix(weight: Any) -> bool:
    return is_tensor(weight) and value(weight).dim() == 2


def _gated(product: fx.Node) -> tuple[fx.Node, str, set[fx.Node]] | None:
    """Return the result, the activation and the nodes where all that uses `product` is act(first half)·second half."""
    halves = only_user(product)
    if halves is None or not _is_halved(halves):
        return None
    places = {user.args[1]: user for user in halves.users if is_function(user, operator.getitem)}
    if len(halves.users) != 2 or set(places) != {0, 1}:
        return None
    active, up = only_user(places[0]), places[1]
    result = only_user(up)
    if active is None or result is None or not is_product(result):
        return None
    name = _activation(active)
    pair = operands(result, lambda n: n is active)
    if not name or pair is None or pair[1] is not up or only_user(active) is not result:
        return None
    return result, name, {product, halves, *places.values(), active, result}


def _is_halved(node: Any) -> bool:
    """Return whether `node` splits its input into halves along the last dimension."""
    if is_function(node, torch.split):
        sizes = node.args[1]
        return isinstance(sizes, (list, tuple)) and len(sizes) == 2 and sizes[0] == sizes[1] and node.args[2:] == (-1,)
    is_chunk = is_function(node, torch.chunk) or is_method(node, "chunk")
    return is_chunk and node.args[1:] == (2,) and node.kwargs == {"dim": -1}


def _activation(node: Any) -> str:
    """Return the name of the activation that `node` applies; empty for one that `gated_linear` does not have."""
    for function, name in ACTIVATIONS.items():
        if is_function(node, function):
            options: dict[str, Any] = {k: v for k, v in node.kwargs.items() if v not in (False, "none")}
            if name == "gelu" and options == {"approximate": "tanh"}:
                return "gelu_tanh"
            return name if not options and len(node.args) == 1 else ""
    return ""
