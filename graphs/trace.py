"""Traces a callable once with `torch.compile` and our own backend, and splits the graph at an op that is not compiled.

The trace has a dynamic first dimension. Pieces that differ only in their weights, such as the middle layers of a model,
are compiled once; weights are arguments. The result is called directly, bypassing Dynamo: no guards, no recompilation
at sizes 0 and 1, no limit on how many models one process traces. Compiling runs nothing and captures nothing.
"""

import secrets
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import fx, nn
from torch._guards import detect_fake_mode
from torch.fx.experimental import _config as shape_config

from specdec.errors import GraphError
from specdec.graphs.kept import Record
from specdec.graphs.merge import MergedWeights, merge_linears
from specdec.graphs.once import is_once
from specdec.graphs.pieces import Chain, Compiled, check_guards, compile_pieces, cut
from specdec.graphs.regions import number, regions, write_out
from specdec.graphs.written import Unwritable, read, write


class Traced:
    """A traced callable of tensors [T, ...] with any T, on the weights it was traced with.

    num_pieces: parts between the ops it was split at; num_compiled: distinct parts; num_found: those of them that an
    earlier compilation had left in Inductor's caches. was_kept: whether the trace is an earlier one; text: the
    trace for its record, or empty if it was kept or cannot be.
    """

    was_kept = False
    text = ""

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


class _Arguments(BaseException):
    """Carries the arguments the traced graph would have been called with; raised so that nothing runs."""

    def __init__(self, args: tuple[Any, ...]):
        self.args_given = args


def trace(
    fn: Callable[..., Any],
    inputs: Sequence[torch.Tensor],
    split_at: Sequence[Any],
    compiler: str,
    *,
    num_outputs: int = 1,
    smallest: int = 1,
    largest: int = 1 << 13,
    alike: Sequence[nn.Module] = (),
    numbers: Mapping[Any, Sequence[int]] | None = None,
    rewrite: Callable[[fx.GraphModule], object] | None = None,
    keep: Path | None = None,
    record: Record | None = None,
    progress: Callable[[], None] = lambda: None,
) -> Traced:
    """Trace fn(*inputs), which returns `num_outputs` tensors, possibly in tuples and beside None.

    inputs: examples [T, ...] of one T > 1, whose first dimension becomes dynamic. smallest, largest: the T it will be
    called with. A caller that compares T=1 with `fn` itself passes smallest=2: torch's own ops guard against one row
    where a copy might broadcast, which seldom changes their result. split_at: op overloads to split at.
    compiler: "inductor", or "eager" to leave the pieces as they are.
    alike: modules in `fn` many of which are equal but for their weights: those are walked once, where torch can show
    that they are; nothing else depends on it. numbers: of these ops the argument 3 of their calls, in their order.
    rewrite: changes the flat graph in place, before it is split.
    keep: folder that `keeping` is in force for; renewed if a piece does not compile with what is in it.
    record: what it has kept is taken for the trace of `fn`, if it can be read; nothing is written to it.
    progress: called after every piece.
    Raises GraphError for what cannot be traced as one graph for every T, or not be compiled; it names the op.
    """
    chain, text = _recall(record, inputs), ""
    was_kept = chain is not None
    if chain is None:
        chain = _walk(fn, inputs, split_at, num_outputs, (smallest, largest), alike, numbers, rewrite)
        chain, text = _through_text(chain, inputs, record)
    try:
        compiled = compile_pieces(chain, inputs, split_at, compiler, largest, keep, progress)
    except Exception as error:
        raise GraphError(f"it cannot be traced and compiled as one graph: {_why(error)}") from error
    traced = Traced(chain, compiled, inputs)
    traced.was_kept, traced.text = was_kept, text
    return traced


def _recall(record: Record | None, inputs: Sequence[torch.Tensor]) -> Chain | None:
    """Return what `record` has kept, on these inputs, or None."""
    text = record.text() if record is not None else ""
    try:
        return read(text, inputs, record.tensors) if record is not None and text else None
    except GraphError:
        return None


def _through_text(chain: Chain, inputs: Sequence[torch.Tensor], record: Record | None) -> tuple[Chain, str]:
    """Return `chain` as the next process will read it, so that both compile the very same, and its text.

    What cannot be written is returned as it is.
    """
    if record is None:
        return chain, ""
    try:
        text = write(chain, inputs, record.tensors)
        return read(text, inputs, record.tensors), text
    except (Unwritable, GraphError):
        return chain, ""


def _walk(
    fn: Callable[..., Any],
    inputs: Sequence[torch.Tensor],
    split_at: Sequence[Any],
    num_outputs: int,
    sizes: tuple[int, int],
    alike: Sequence[nn.Module],
    numbers: Mapping[Any, Sequence[int]] | None,
    rewrite: Callable[[fx.GraphModule], object] | None,
) -> Chain:
    """Have Dynamo walk through `fn`; see `trace`."""
    for tensor in inputs:
        torch._dynamo.mark_dynamic(tensor, 0)
    while True:
        backend = _Backend(split_at, sizes, numbers, rewrite)
        compiled = torch.compile(_fresh(fn), backend=backend, fullgraph=True)
        try:
            # Without it Dynamo assumes T > 1 and leaves no guard that shows it.
            with torch.no_grad(), shape_config.patch(backed_size_oblivious=True), regions(alike):  # type: ignore[attr-defined]
                compiled(*inputs)
            raise AssertionError("the backend was not asked")
        except _Arguments as called:
            args = called.args_given
            break
        except Exception as error:
            if not alike:
                raise GraphError(f"it cannot be traced and compiled as one graph: {_why(error)}") from error
        alike = ()
    if backend.num_outputs != num_outputs:
        raise GraphError(
            f"its trace returns {backend.num_outputs} tensors, {num_outputs} were expected: it keeps tensors "
            "elsewhere, or returns one twice"
        )
    return Chain(backend.split, list(args), backend.groups)


def _fresh(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `fn` in a function with its own code object: Dynamo counts recompilations by code object."""

    def entry(*args: torch.Tensor) -> Any:
        return fn(*args)

    entry.__code__ = entry.__code__.replace(co_name=f"traced_{secrets.token_hex(8)}")
    return entry


class _Backend:
    """Backend to which `torch.compile` passes the graph: joins products and cuts it, and runs nothing."""

    def __init__(
        self,
        split_at: Sequence[Any],
        sizes: tuple[int, int],
        numbers: Mapping[Any, Sequence[int]] | None,
        rewrite: Callable[[fx.GraphModule], object] | None,
    ):
        self.num_outputs = 0
        self.groups: list[list[int]] = []
        self._split_at = split_at
        self._smallest, self._largest = sizes
        self._numbers = numbers
        self._rewrite = rewrite

    def __call__(self, graph: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        mode = detect_fake_mode(example_inputs)
        assert mode is not None, "Dynamo traces with fake tensors"
        check_guards(mode.shape_env, self._smallest, self._largest)
        write_out(graph)
        for op, values in (self._numbers or {}).items():
            number(graph, op, 3, values)
        if self._rewrite is not None:
            self._rewrite(graph)
        self.num_outputs = len(next(n for n in graph.graph.nodes if n.op == "output").args[0])
        self.groups = merge_linears(graph, example_inputs)
        self.split = cut(graph, self._split_at)

        def called(*args: Any) -> Any:
            raise _Arguments(args)

        return called


def _why(error: BaseException) -> str:
    """Return, in one line, the compiler's complaint and the line of the model it is about."""
    error = getattr(error, "inner_exception", None) or error
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    told = [line for line in lines if line.startswith(("Explanation:", "Could not", "Attempted"))]
    frames = [i for i, line in enumerate(lines) if line.startswith('File "')]
    at = [f"at {lines[i]}: {lines[i + 1]}" for i in frames[-1:] if i + 1 < len(lines)]
    return "; ".join(dict.fromkeys([*lines[:1], *told[:1], *at])) or type(error).__name__
