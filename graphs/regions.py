"""Equal layers are walked by Dynamo once: their forward is a region of its own, which Dynamo traces the first time and
repeats where everything it looked at is equal; then the regions are written out into one flat graph again."""

import operator
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

import torch
from torch import fx, nn

from specdec.errors import GraphError


@contextmanager
def regions(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Within it, the forward of each of `modules` is a region; other modules of their classes are left alone."""
    classes = [type(module) for module in modules]
    variants = {cls: _variant(cls) for cls in set(classes)}
    try:
        for module in modules:
            module.__class__ = variants[type(module)]
        yield
    finally:
        for module, cls in zip(modules, classes, strict=True):
            module.__class__ = cls


def _variant(cls: type) -> type:
    """Return a subclass whose forward is a region."""
    forward = torch.compiler.nested_compile_region(cls.forward)  # type: ignore[attr-defined]
    return type(cls.__name__, (cls,), {"forward": forward, "__module__": cls.__module__})


def can_repeat() -> bool:
    """Whether this torch repeats a region instead of walking it again (2.13 does)."""
    return find_spec("torch._dynamo.variables.invoke_subgraph") is not None


def write_out(graph: fx.GraphModule) -> None:
    """Replace, in place, every call of a region in `graph` by the nodes of the region. GraphError if it cannot be."""
    nodes = graph.graph
    calls = [n for n in nodes.nodes if n.op == "call_function" and n.target is torch.ops.higher_order.invoke_subgraph]
    for call in calls:
        region, _name, *operands = call.args
        assert isinstance(region, fx.Node)
        with nodes.inserting_before(call):
            results = _copy(graph, str(region.target), operands)
        for user in list(call.users):
            if user.target is not operator.getitem:
                raise GraphError(f"its trace takes the results of a layer as a whole: {user}")
            user.replace_all_uses_with(results[user.args[1]])
            nodes.erase_node(user)
        nodes.erase_node(call)
    for node in reversed(nodes.nodes):
        is_log = node.op == "call_function" and node.target is torch._C._log_api_usage_once
        if not node.users and (is_log or (node.op == "get_attr" and calls)):
            nodes.erase_node(node)
    graph.delete_all_unused_submodules()
    nodes.lint()
    graph.recompile()


def _copy(graph: fx.GraphModule, name: str, operands: Sequence[Any]) -> Sequence[Any]:
    """Copy the nodes of the region `name` of `graph` to where nodes are being inserted; return its results."""
    region = graph.get_submodule(name)
    assert isinstance(region, fx.GraphModule)
    given = iter(operands)
    copies: dict[fx.Node, Any] = {}
    for node in region.graph.nodes:
        if node.op == "placeholder":
            copies[node] = next(given)
        elif node.op == "output":
            return fx.map_arg(node.args[0], lambda n: copies[n])
        else:
            copies[node] = graph.graph.node_copy(node, lambda n: copies[n])
            if node.op == "get_attr":
                copies[node].target = f"{name}_{node.target}".replace(".", "_")
                setattr(graph, copies[node].target, operator.attrgetter(str(node.target))(region))
    raise AssertionError("a graph without an output")


def number(graph: fx.GraphModule, op: Any, position: int, numbers: Sequence[int]) -> None:
    """Give the calls of `op` in `graph`, in their order, `numbers` as the argument at `position`.

    GraphError if there are more or fewer calls.
    """
    calls = [n for n in graph.graph.nodes if n.op == "call_function" and n.target in (op, op.overloadpacket)]
    if len(calls) != len(numbers):
        raise GraphError(f"its trace calls {op} {len(calls)} times, a forward {len(numbers)} times")
    for call, value in zip(calls, numbers, strict=True):
        call.update_arg(position, value)
    graph.recompile()
