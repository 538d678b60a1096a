"""Traces equal layers once: one call of the first and of the last layer of a kind, with their weights as arguments.

While the whole model is traced, an op stands for each of these layers; afterwards the layer's graph is inlined in its
place. So later steps see one flat graph, and products and norms fuse across layers. Layers are of one kind if their
classes, plain attributes, weights' shapes and arguments agree, and both traces, at two numbers of tokens, have one
graph.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import fx, nn
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental import _config as shape_config
from torch.utils._pytree import tree_leaves, tree_map

from specdec.core.errors import GraphError
from specdec.graphs.compile.alike import PLAIN, seen, tensors_of
from specdec.graphs.compile.pieces import Noting, check_guards, fingerprint, is_call
from specdec.graphs.compile.record import Fakes
from specdec.graphs.compile.walk import Walked, walk

FEWEST = 3  # layers of a kind, of which two are traced


class Call(NamedTuple):
    """A layer's arguments, and what it returned."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    out: Any


@dataclass(frozen=True)
class Kind:
    """The graph of a layer, and the meaning of its placeholders, operands: ("input", i), ("own", name), ("other", id),
    ("size", 0). others: the tensors of those ids, which all layers of the kind read; mode: of its nodes' example
    values."""

    graph: fx.GraphModule
    operands: list[tuple[str, Any]]
    others: Mapping[int, torch.Tensor]
    mode: FakeTensorMode


# It stands for a layer while the whole model is traced, and is never run.
_LIBRARY = torch.library.Library("specdec", "FRAGMENT")
_LIBRARY.define("layer(Tensor hidden, Tensor[] others, int number) -> Tensor")


@torch.library.register_fake("specdec::layer", lib=_LIBRARY)
def _like(hidden: torch.Tensor, others: list[torch.Tensor], number: int) -> torch.Tensor:
    return torch.empty_strided(hidden.shape, hidden.stride(), dtype=hidden.dtype, device=hidden.device)


class Layers:
    """Layers of a callable; groups: of equal ones, from `alike`. Run the callable at two numbers of tokens within
    `recording` before it is traced."""

    def __init__(self, groups: Sequence[Sequence[nn.Module]]):
        self._groups = [group for group in groups if len(group) >= FEWEST]
        self._calls: dict[nn.Module, list[Call]] = defaultdict(list)
        self.standing: list[tuple[nn.Module, Kind]] = []  # by their numbers, once they are traced

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record the arguments of every layer, at the first two numbers of tokens."""

        def recorder(layer: nn.Module) -> Callable[..., Any]:
            def forward(*args: Any, **kwargs: Any) -> Any:
                out = forward_of_class(layer, *args, **kwargs)
                call, calls = Call(args, kwargs, out), self._calls[layer]
                if not calls or (len(calls) == 1 and _shapes(calls[0]) != _shapes(call)):
                    calls.append(call)
                return out

            forward_of_class = type(layer).forward
            return forward

        with _replaced({layer: recorder(layer) for group in self._groups for layer in group}):
            yield

    @contextmanager
    def standing_in(self, fakes: Fakes, sizes: tuple[int, int]) -> Iterator[None]:
        """Trace the layers, see `walk`, and replace them by calls of `specdec::layer` within the context."""
        kinds: dict[nn.Module, Kind] = {}
        for layers in self._by_arguments():
            kind = self._kind(layers[0], layers[-1], fakes, sizes)
            kinds |= dict.fromkeys(layers, kind) if kind is not None else {}
        self.standing = list(kinds.items())
        with _replaced({layer: _stand_in(i, self._calls[layer][0]) for i, layer in enumerate(kinds)}):
            yield

    def _by_arguments(self) -> list[list[nn.Module]]:
        """Return the groups, divided by the arguments of their calls; without layers whose calls are not supported."""
        alike: dict[Any, list[nn.Module]] = defaultdict(list)
        for number, group in enumerate(self._groups):
            for layer in group:
                calls = self._calls[layer]
                if len(calls) == 2 and _fits(calls[0]):
                    alike[number, str(tree_map(seen, calls))].append(layer)
        return [layers for layers in alike.values() if len(layers) >= FEWEST]

    def _kind(self, first: nn.Module, last: nn.Module, fakes: Fakes, sizes: tuple[int, int]) -> Kind | None:
        """Return the kind of both layers, None if their graphs differ or cannot be traced."""
        try:
            a, b = (_walk_layer(layer, self._calls[layer], i, fakes, sizes) for i, layer in enumerate((first, last)))
        except GraphError:  # tracing the whole model raises it again, with its place
            return None
        is_one = a.operands == b.operands and fingerprint(a.graph, False) == fingerprint(b.graph, False)
        return a if is_one else None


def _places(values: Sequence[Any]) -> list[tuple[int, int | None]]:
    """Return the places of tensors: the index of the argument, and the index within it if it is a tuple or list."""
    places: list[tuple[int, int | None]] = []
    for i, value in enumerate(values):
        if isinstance(value, torch.Tensor):
            places.append((i, None))
        elif isinstance(value, tuple | list):
            places += [(i, j) for j, v in enumerate(value) if isinstance(v, torch.Tensor)]
    return places


def _leaves(args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
    """Return the tensors among arguments, also in tuples and lists."""
    values = (*args, *kwargs.values())
    return [values[i] if j is None else values[i][j] for i, j in _places(values)]


def _shapes(call: Call) -> list[torch.Size]:
    return [t.shape for t in _leaves(call.args, call.kwargs)]


def _fits(call: Call) -> bool:
    """Return whether the arguments are plain or tensors of `_leaves`, and one tensor is returned, like the first."""
    everything, found = tree_leaves((call.args, call.kwargs)), _leaves(call.args, call.kwargs)
    out = call.out if isinstance(call.out, tuple) else (call.out,)
    return (
        all(isinstance(x, (torch.Tensor, *PLAIN)) for x in everything)
        and len(found) == sum(isinstance(x, torch.Tensor) for x in everything) > 0
        and seen(out[0]) == seen(found[0])
        and all(x is None for x in out[1:])
    )


@contextmanager
def _replaced(forwards: Mapping[nn.Module, Callable[..., Any]]) -> Iterator[None]:
    """Give modules these forwards instead of their classes', within the context."""
    try:
        for module, forward in forwards.items():
            module.__dict__["forward"] = forward
        yield
    finally:
        for module in forwards:
            module.__dict__.pop("forward", None)


def _stand_in(number: int, call: Call) -> Callable[..., Any]:
    """Return a forward that stands for layer `number`, with arguments and results like those of `call`."""
    num_none = len(call.out) - 1 if isinstance(call.out, tuple) else -1
    places = _places((*call.args, *call.kwargs.values()))

    def forward(*args: Any, **kwargs: Any) -> Any:
        values = (*args, *kwargs.values())  # it is traced, too, so places are found beforehand
        hidden, *others = [values[i] if j is None else values[i][j] for i, j in places]
        result = torch.ops.specdec.layer.default(hidden, others, number)
        return result if num_none < 0 else (result, *[None] * num_none)

    return forward


def _walk_layer(layer: nn.Module, calls: Sequence[Call], which: int, fakes: Fakes, sizes: tuple[int, int]) -> Kind:
    """Trace one call of `layer`; dimensions that differ between `calls` are T. which: 1 follows the recording of 0."""
    args, kwargs = tree_map(lambda x: x.clone() if isinstance(x, torch.Tensor) else x, calls[which][:2])
    leaves = _leaves(args, kwargs)
    pairs = zip(*map(_shapes, calls), strict=True)
    dynamic = [[i for i, (a, b) in enumerate(zip(*pair, strict=True)) if a != b] for pair in pairs]

    def run(*args: Any, **kwargs: Any) -> tuple[torch.Tensor]:
        out = type(layer).forward(layer, *args, **kwargs)
        return (out[0] if isinstance(out, tuple) else out,)

    dims = list(zip(leaves, dynamic, strict=True))
    graph, tensors, mode = walk(run, args, dims, sizes, kwargs, layer, fakes, follows=which > 0)
    if len(next(n for n in graph.graph.nodes if n.op == "output").args[0]) != 1:
        raise GraphError("a layer stores tensors besides its outputs")
    for op in fakes.ops:
        number(graph, op, [0] * len(_calls(graph, op)))
    known: dict[int, tuple[str, Any]] = {}
    for name, tensor in tensors_of(layer).items():
        known.setdefault(id(tensor), ("own", name))
    known |= {id(leaf): ("input", i) for i, leaf in enumerate(leaves)}
    operands = [("size", 0) if isinstance(t, int) else known.get(id(t), ("other", id(t))) for t in tensors]
    return Kind(graph, operands, {id(t): t for t in tensors}, mode)


def write_out(walked: Walked, layers: Layers, sizes: tuple[int, int]) -> Walked:
    """Inline the graphs of layers in place of the ops that stand for them; their tensors become arguments."""
    graph, args, mode = walked
    writing = _Writing(graph, args, mode)
    with (
        torch.inference_mode(False),
        torch.no_grad(),
        shape_config.patch(backed_size_oblivious=True),  # type: ignore[attr-defined]
        mode,
        enable_python_dispatcher(),
    ):
        for call in _calls(graph, torch.ops.specdec.layer.default):
            writing.write(call, *layers.standing[call.args[2]])  # type: ignore[index]
    graph.recompile()
    check_guards(mode.shape_env, *sizes)
    return walked


class _Writing:
    """A graph, with its arguments, into which layers are inlined."""

    def __init__(self, graph: fx.GraphModule, args: list[Any], mode: Any):
        self._graph, self._args, self._mode = graph, args, mode
        nodes = [n for n in graph.graph.nodes if n.op == "placeholder"]
        self._last = nodes[-1]
        self._places = {id(arg): node for arg, node in zip(args, nodes, strict=True) if not isinstance(arg, int)}
        self._size = next((n for arg, n in zip(args, nodes, strict=True) if isinstance(arg, int)), None)
        self._noted: set[int] = set()  # kinds with example values of the mode

    def write(self, call: fx.Node, layer: nn.Module, kind: Kind) -> None:
        """Replace `call` by the graph of `kind`."""
        hidden, others, _ = call.args
        inputs: list[Any] = [hidden, *others]  # type: ignore[misc]
        tensors: dict[str, Mapping[Any, torch.Tensor]] = {"own": tensors_of(layer), "other": kind.others}
        is_noted = kind.mode is self._mode or id(kind) in self._noted
        given = [n for n in kind.graph.graph.nodes if n.op == "placeholder"]
        examples = [n.meta["example_value"] if is_noted else None for n in given]
        operands = []
        for (what, which), example in zip(kind.operands, examples, strict=True):
            if what == "input":
                operands.append(inputs[which])
            else:
                operands.append(self._size if what == "size" else self._argument(tensors[what][which], example))
        if not is_noted:
            self._noted.add(id(kind))
            Noting(kind.graph).run(*(o.meta["example_value"] for o in operands))
        with self._graph.graph.inserting_before(call):
            result = self._copy(kind, operands)
        call.replace_all_uses_with(result)
        self._graph.graph.erase_node(call)

    def _argument(self, tensor: torch.Tensor, example: Any) -> fx.Node:
        """Return the placeholder of `tensor`, a new one if it has none."""
        if id(tensor) not in self._places:
            with self._graph.graph.inserting_after(self._last):
                self._last = self._graph.graph.placeholder(f"weight_{len(self._args)}")
            if example is None:
                example = self._mode.from_tensor(tensor, static_shapes=True)
            self._last.meta["example_value"] = example
            self._args.append(tensor)
            self._places[id(tensor)] = self._last
        return self._places[id(tensor)]

    def _copy(self, kind: Kind, operands: Sequence[Any]) -> Any:
        """Copy the nodes of `kind` to the insertion point; return its result."""
        given, copies = iter(operands), {}
        for node in kind.graph.graph.nodes:
            if node.op == "placeholder":
                copies[node] = next(given)
            elif node.op == "output":
                (result,) = fx.map_arg(node.args[0], lambda n: copies[n])
                return result
            else:
                copies[node] = self._graph.graph.node_copy(node, lambda n: copies[n])
                if node.op == "get_attr":
                    copies[node].target = f"of_{id(kind)}_{node.target}".replace(".", "_")
                    setattr(self._graph, copies[node].target, getattr(kind.graph, str(node.target)))
        raise AssertionError("a graph without an output")


def _calls(graph: fx.GraphModule, op: Any) -> list[fx.Node]:
    return [n for n in graph.graph.nodes if is_call(n, (op,))]


def number(graph: fx.GraphModule, op: Any, numbers: Sequence[int]) -> None:
    """Set argument 3 of the calls of `op` in `graph` to `numbers`, in order.

    GraphError if there are more or fewer calls.
    """
    calls = _calls(graph, op)
    if len(calls) != len(numbers):
        raise GraphError(f"its trace calls {op} {len(calls)} times, a forward {len(numbers)} times")
    for call, value in zip(calls, numbers, strict=True):
        call.update_arg(3, value)
    graph.recompile()
