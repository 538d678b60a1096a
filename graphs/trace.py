"""Traces a callable once with `torch.compile` and our own backend, and splits the graph at an op that is not compiled.

The trace has a dynamic first dimension. Pieces that differ only in their weights, such as the middle layers of a model,
are compiled once; weights are arguments. The result is called directly, bypassing Dynamo: no guards, no recompilation
at sizes 0 and 1, no limit on how many models one process traces. Compiling runs nothing and captures nothing.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import fx

from specdec.errors import GraphError
from specdec.graphs.layers import Layers, number, write_out
from specdec.graphs.merge import MergedWeights, merge_linears
from specdec.graphs.once import is_once
from specdec.graphs.pieces import Chain, Compiled, compile_pieces, cut
from specdec.graphs.walk import walk, why


class Traced:
    """A traced callable of tensors [T, ...] with any T, on the weights it was traced with.

    num_pieces: parts between the ops it was split at; num_compiled: distinct parts; num_found: those of them that an
    earlier compilation had left in Inductor's caches.
    """

    def __init__(self, chain: Chain, compiled: Compiled, inputs: Sequence[torch.Tensor]):
        self._split = chain.graph
        self._once = _equal_parts_once(chain.graph)
        self._args = list(chain.args)
        self._sizes = [i for i, a in enumerate(self._args) if isinstance(a, int)]
        self._places = [next((i for i, a in enumerate(self._args) if a is t), None) for t in inputs]
        self.num_pieces, self.num_compiled = compiled.num_pieces, len(compiled.done)
        self.num_found = compiled.num_found
        self._merged = MergedWeights(chain.groups, self._args)
        self._merged.join()

    def __call__(self, *inputs: torch.Tensor) -> tuple[Any, ...]:
        args = self._args.copy()
        for size in self._sizes:
            args[size] = inputs[0].shape[0]
        for place, value in zip(self._places, inputs, strict=True):
            if place is not None:  # an input that the callable does not use is not an argument of its graph
                args[place] = value
        return self._once(*args) if is_once() else self._split(*args)

    def release(self) -> None:
        """Give joined weights their own storage again; the callable cannot be called afterwards."""
        self._merged.part()
        self._args = []


def _equal_parts_once(graph: fx.GraphModule) -> fx.GraphModule:
    """Return `graph` with one call of each of its submodules, the first, whose results stand for those of all."""
    nodes = fx.Graph()
    kept: dict[fx.Node, Any] = {}
    first: dict[int, Any] = {}
    for node in graph.graph.nodes:
        called = id(getattr(graph, node.target)) if node.op == "call_module" else id(node)
        if called not in first:
            first[called] = nodes.node_copy(node, lambda n: kept[n])
        kept[node] = first[called]
    return fx.GraphModule(graph, nodes)


def trace(
    fn: Callable[..., Any],
    inputs: Sequence[torch.Tensor],
    split_at: Sequence[Any],
    compiler: str,
    *,
    num_outputs: int = 1,
    smallest: int = 1,
    largest: int = 1 << 13,
    layers: Layers | None = None,
    numbers: Mapping[Any, Sequence[int]] | None = None,
    rewrite: Callable[[fx.GraphModule], object] | None = None,
    progress: Callable[[], None] = lambda: None,
) -> Traced:
    """Trace fn(*inputs), which returns `num_outputs` tensors, possibly in tuples and beside None.

    inputs: examples [T, ...] of one T > 1, whose first dimension becomes dynamic. smallest, largest: the T it will be
    called with. A caller that compares T=1 with `fn` itself passes smallest=2: torch's own ops guard against one row
    where a copy might broadcast, which seldom changes their result. split_at: op overloads to split at.
    compiler: "inductor", or "eager" to leave the pieces as they are.
    layers: equal layers within `fn`, which are walked once; where they cannot be, they are walked one by one.
    numbers: of these ops the argument 3 of their calls, in their order.
    rewrite: changes the flat graph in place, before it is split.
    progress: called after every piece.
    Raises GraphError for what cannot be traced as one graph for every T, or not be compiled; it names the op.
    """
    sizes = (smallest, largest)
    try:
        chain = _chain(fn, inputs, split_at, num_outputs, sizes, layers, numbers or {}, rewrite)
    except GraphError:
        if layers is None:
            raise
        chain = _chain(fn, inputs, split_at, num_outputs, sizes, None, numbers or {}, rewrite)
    try:
        compiled = compile_pieces(chain, inputs, split_at, compiler, largest, progress)
    except Exception as error:
        raise GraphError(f"it cannot be traced and compiled as one graph: {why(error)}") from error
    return Traced(chain, compiled, inputs)


def _chain(
    fn: Callable[..., Any],
    inputs: Sequence[torch.Tensor],
    split_at: Sequence[Any],
    num_outputs: int,
    sizes: tuple[int, int],
    layers: Layers | None,
    numbers: Mapping[Any, Sequence[int]],
    rewrite: Callable[[fx.GraphModule], object] | None,
) -> Chain:
    """Walk through `fn`, join products and cut it; see `trace`."""
    dynamic = [(tensor, (0,)) for tensor in inputs]
    with nullcontext() if layers is None else layers.standing_in(numbers, sizes):
        walked = walk(fn, inputs, dynamic, sizes)
    graph, args, _ = walked if layers is None else write_out(walked, layers, sizes)
    for op, values in numbers.items():
        number(graph, op, values)
    if rewrite is not None:
        rewrite(graph)
    returned = len(next(n for n in graph.graph.nodes if n.op == "output").args[0])
    if returned != num_outputs:
        raise GraphError(
            f"its trace returns {returned} tensors, {num_outputs} were expected: it keeps tensors elsewhere, or "
            "returns one twice"
        )
    groups = merge_linears(graph, args)
    return Chain(cut(graph, split_at), args, groups)
