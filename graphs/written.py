"""A chain of pieces as text, so that the next process need not trace: nodes by name, functions by where they are found,
arguments by the names of the model's tensors. It holds no tensor."""

import importlib
import json
import operator
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx

from specdec.errors import GraphError
from specdec.graphs.pieces import Chain

HOMES = ("torch", "torch._C._nn", "torch.nn.functional", "torch._C", "torch.functional", "operator", "builtins", "math")
PLAIN = (bool, int, float, str, type(None))


class Unwritable(Exception):
    """What text cannot hold; the message names it."""


def write(chain: Chain, inputs: Sequence[torch.Tensor], tensors: Mapping[str, torch.Tensor]) -> str:
    """Return `chain` as text, its arguments being `inputs`, T, or `tensors`. Unwritable for what cannot be kept."""
    names: dict[int, list[Any]] = {id(t): ["tensor", name] for name, t in tensors.items()}
    names |= {id(t): ["input", i] for i, t in enumerate(inputs)}
    args = [["size", 0] if isinstance(arg, int) else names.get(id(arg)) for arg in chain.args]
    if None in args:
        raise Unwritable("an argument of the graph that is no named tensor")
    called = [str(node.target) for node in chain.graph.graph.nodes if node.op == "call_module"]
    pieces: dict[Any, int] = {}
    children = {name: pieces.setdefault(getattr(chain.graph, name), len(pieces)) for name in called}
    told = {
        "args": args,
        "groups": chain.groups,
        "pieces": [_nodes(module.graph) for module in pieces],
        "children": children,
        "graph": _nodes(chain.graph.graph),
    }
    return json.dumps(told)


def read(text: str, inputs: Sequence[torch.Tensor], tensors: Mapping[str, torch.Tensor]) -> Chain:
    """Return the chain that `write` made `text` of, on these inputs and tensors. GraphError if that cannot be."""
    try:
        told = json.loads(text)
        known: dict[str, Any] = {"tensor": tensors, "input": inputs, "size": [inputs[0].shape[0]]}
        pieces = [fx.GraphModule({}, _graph(nodes)) for nodes in told["pieces"]]
        root = {name: pieces[number] for name, number in told["children"].items()}
        graph = fx.GraphModule(root, _graph(told["graph"]))
        return Chain(graph, [known[kind][name] for kind, name in told["args"]], told["groups"])
    except Exception as error:  # it may hold anything
        raise GraphError(f"a kept trace cannot be read: {type(error).__name__}: {error}") from error


def _nodes(graph: fx.Graph) -> list[Any]:
    """Return a line for each node: name, op, target, args, kwargs."""
    lines = []
    for node in graph.nodes:
        if node.op == "get_attr":
            raise Unwritable(f"the constant {node.target}")
        target = node.target if isinstance(node.target, str) else where(node.target)
        lines.append([node.name, node.op, target, _told(node.args), _told(node.kwargs)])
    return lines


def _graph(lines: Sequence[Any]) -> fx.Graph:
    """Return the graph of `_nodes`' lines."""
    graph = fx.Graph()
    nodes: dict[str, fx.Node] = {}
    for name, op, target, args, kwargs in lines:
        what = find(target) if op == "call_function" else target
        nodes[name] = graph.create_node(op, what, _value(args, nodes), _value(kwargs, nodes), name)
    graph.lint()
    return graph


def _told(value: Any) -> Any:
    """Return a node's argument as what JSON holds: a plain value, or a list of its kind and content."""
    if type(value) in PLAIN:
        return value
    if isinstance(value, fx.Node):
        return ["node", value.name]
    if isinstance(value, torch.Size):
        return ["shape", [_told(v) for v in value]]
    if type(value) is tuple:
        return ["tuple", [_told(v) for v in value]]
    if isinstance(value, list):
        return ["list", [_told(v) for v in value]]
    if isinstance(value, dict):
        return ["dict", [[_told(k), _told(v)] for k, v in value.items()]]
    if isinstance(value, slice):
        return ["slice", [_told(v) for v in (value.start, value.stop, value.step)]]
    if isinstance(value, torch.device):
        return ["device", str(value)]
    if isinstance(value, torch.dtype | torch.layout | torch.memory_format):
        return ["found", f"torch:{str(value).removeprefix('torch.')}"]
    if value is ...:
        return ["found", "builtins:Ellipsis"]
    return ["found", where(value)]


def _value(told: Any, nodes: Mapping[str, fx.Node]) -> Any:
    """Return the argument that `_told` described."""
    if type(told) in PLAIN:
        return told
    kind, content = told
    makers: dict[str, Any] = {
        "node": nodes.__getitem__,
        "shape": lambda c: torch.Size(_value(v, nodes) for v in c),
        "tuple": lambda c: tuple(_value(v, nodes) for v in c),
        "list": lambda c: [_value(v, nodes) for v in c],
        "dict": lambda c: {_value(k, nodes): _value(v, nodes) for k, v in c},
        "slice": lambda c: slice(*(_value(v, nodes) for v in c)),
        "device": torch.device,
        "found": find,
    }
    return makers[kind](content)


def where(thing: Any) -> str:
    """Return "module:name" by which `find` finds the function or class `thing`; Unwritable if there is none."""
    if isinstance(thing, torch._ops.OpOverload):
        return f"torch:ops.{thing.namespace}.{thing._schema.name.split('::')[1]}.{thing._overloadname}"
    name = getattr(thing, "__qualname__", None) or getattr(thing, "__name__", None) or ""
    for home in (getattr(thing, "__module__", None), *HOMES):
        try:
            if home and name and find(f"{home}:{name}") is thing:
                return f"{home}:{name}"
        except (ImportError, AttributeError):
            continue
    if isinstance(thing, torch._ops.OpOverloadPacket):
        return f"torch:ops.{thing._qualified_op_name.replace('::', '.')}"
    raise Unwritable(f"{type(thing).__name__} {name or thing}")


def find(name: str) -> Any:
    """Return what `where` named."""
    home, attribute = name.split(":")
    return operator.attrgetter(attribute)(importlib.import_module(home))
