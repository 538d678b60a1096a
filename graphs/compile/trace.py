"""Traces a callable once, and splits the graph at an op that is not compiled.

The trace has a dynamic first dimension. Pieces that differ only in their weights, such as the middle layers of a model,
are compiled once; weights are arguments. The result is called directly: no guards, no recompilation at sizes 0 and 1,
no limit on how many models one process traces. Compiling runs nothing and captures nothing.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from types import MappingProxyType
from typing import Any

import torch
from torch import fx, nn

from specdec.core.errors import GraphError
from specdec.graphs.compile.layers import Layers, number, write_out
from specdec.graphs.compile.merge import MergedWeights, merge_linears
from specdec.graphs.compile.pieces import Counts, compile_pieces, cut
from specdec.graphs.compile.record import Fakes
from specdec.graphs.compile.tail import hoist_outputs, let_last_run_on_rows, on_rows
from specdec.graphs.compile.walk import walk, why
from specdec.graphs.once import is_once


class Traced:
    """A traced callable of tensors [T, ...] for any T, with the weights it was traced with. See `Counts`."""

    def __init__(
        self,
        chain: fx.GraphModule,
        args: Sequence[Any],
        groups: Sequence[Sequence[int]],
        counts: Counts,
        inputs: Sequence[torch.Tensor],
    ):
        """chain, args: see `compile_pieces`; groups: see `merge_linears`."""
        self._split = chain
        self._once = _equal_parts_once(chain)
        self._args = list(args)
        self._sizes = [i for i, a in enumerate(self._args) if isinstance(a, int)]
        self._places = [next((i for i, a in enumerate(self._args) if a is t), None) for t in inputs]
        self.num_pieces, self.num_compiled, self.num_found = counts
        self._merged = MergedWeights(groups, self._args)
        self._merged.join()

    def __call__(self, *inputs: torch.Tensor, rows: torch.Tensor | None = None) -> tuple[Any, ...]:
        """Run the callable. rows [n] int64: the only rows that are read of outputs that depend on the last op of
        `split_at`; others may be zero."""
        args, num_tokens = self._args.copy(), inputs[0].shape[0]
        for size in self._sizes:
            args[size] = num_tokens
        for place, value in zip(self._places, inputs, strict=True):
            if place is not None:  # an input that the callable does not use is not an argument of its graph
                args[place] = value
        with on_rows(rows, num_tokens):
            return self._once(*args) if is_once() else self._split(*args)

    def release(self) -> None:
        """Give joined weights their own storage again; the callable cannot be called afterwards."""
        self._merged.part()
        self._args = []


def _equal_parts_once(graph: fx.GraphModule) -> fx.GraphModule:
    """Return `graph` with only the first call of each of its submodules, whose results replace those of the others."""
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
    module: nn.Module | None = None,
    layers: Layers | None = None,
    numbers: Mapping[Any, Sequence[int]] = MappingProxyType({}),
    rewrite: Callable[[fx.GraphModule], object] = lambda graph: None,
    progress: Callable[[], None] = lambda: None,
) -> Traced:
    """Trace fn(*inputs), which returns `num_outputs` tensors, possibly in tuples and beside None.

    inputs: examples [T, ...] of one T > 1, whose first dimension becomes dynamic. smallest, largest: the T it will be
    called with. A caller that compares T=1 with `fn` itself passes smallest=2: torch's own ops guard against one row
    where a copy might broadcast, which seldom changes their result. split_at: op overloads to split at.
    compiler: "inductor", or "eager" to leave the pieces uncompiled.
    module: see `walk`; by default `fn` itself, if it is one.
    layers: equal layers within `fn`, which are traced once; if that fails, they are traced one by one.
    numbers: for each of these ops, argument 3 of its calls, in order.
    rewrite: changes the whole graph, with layers inlined and products joined, in place, before it is split.
    progress: called after every piece.
    Raises GraphError, which names the op, if it cannot be traced as one graph for every T, or cannot be compiled.
    """
    module, sizes = fn if isinstance(fn, nn.Module) else module, (smallest, largest)

    def flat(layers: Layers | None) -> tuple[fx.GraphModule, list[Any]]:
        """Trace `fn`; return one graph, whose nodes have example values, and its arguments: the inputs, other tensors,
        and T where it takes an int."""
        fakes = Fakes(tuple(numbers))
        with nullcontext() if layers is None else layers.standing_in(fakes, sizes):
            walked = walk(fn, inputs, [(tensor, (0,)) for tensor in inputs], sizes, module=module, fakes=fakes)
        graph, args, _ = walked if layers is None else write_out(walked, layers, sizes)
        for op, values in numbers.items():
            number(graph, op, values)
        returned = len(next(n for n in graph.graph.nodes if n.op == "output").args[0])
        if returned != num_outputs:
            raise GraphError(
                f"its trace returns {returned} tensors, {num_outputs} were expected: it stores tensors besides its "
                "outputs, or returns one twice"
            )
        return graph, args

    try:
        graph, args = flat(layers)
    except GraphError:
        if layers is None:
            raise
        graph, args = flat(None)
    groups = merge_linears(graph, args)
    try:
        rewrite(graph)
        hoist_outputs(graph, split_at)
        graph.graph.lint()
        chain = cut(graph, split_at)
        counts = compile_pieces(chain, args, groups, inputs, split_at, compiler, largest, progress)
        let_last_run_on_rows(chain, split_at)
    except Exception as error:
        raise GraphError(f"it cannot be traced and compiled as one graph: {why(error)}") from error
    return Traced(chain, args, groups, counts, inputs)
