"""Traces and compiles a model's layers, and compares the result with the layers themselves before it is used."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import torch
from torch import fx, nn

from specdec.backends.differences import bound, distance
from specdec.backends.linear import has_kernels
from specdec.backends.registry import compiling_kernels
from specdec.core.config import EngineConfig
from specdec.core.errors import GraphError
from specdec.graphs.building import progress_bar, rehearse
from specdec.graphs.compile.kept import folder, keeping, num_found, renewing
from specdec.graphs.once import equal_parts_once
from specdec.reach.targets.compiling.adapters import join_adapters, take_in_adapters
from specdec.reach.targets.compiling.echo import disturbed, echoing
from specdec.reach.targets.compiling.inputs import take_over_inputs
from specdec.reach.targets.compiling.matching import drop_casts
from specdec.reach.targets.compiling.norms import take_over_norms
from specdec.reach.targets.compiling.products import take_over_gates, take_over_products
from specdec.reach.targets.compiling.quantised import join_quantised, quantise_results
from specdec.reach.targets.compiling.recurrent import share_keys, take_over_delta_gates
from specdec.reach.targets.compiling.rotation import hand_over_norms, hand_over_rotations
from specdec.reach.targets.compiling.routers import hand_over_sums, take_over_choices
from specdec.reach.targets.compiling.tables import take_over_tables

if TYPE_CHECKING:
    from specdec.graphs.compile.trace import Traced

NUM_TOKENS = 32  # of the traced forward
# Tokens of the compared forwards. One token, as in plain decoding, exposes a trace that assumed T > 1.
COMPARED = (NUM_TOKENS, 7, 1)
NUM_ALONE = 3  # forwards of one token
ATTENTION, CONV, SCAN = torch.ops.specdec.attn.default, torch.ops.specdec.conv.default, torch.ops.specdec.scan.default
Batch = tuple[torch.Tensor, ...]  # the arguments of a forward, [T, ...] each
Layers = Callable[..., Sequence[Any]]


@dataclass(frozen=True)
class Subject:
    """A callable to trace: `run` takes a batch and returns `num_outputs` tensors, and possibly None.

    module: holds all modules that it runs. inputs: a batch of NUM_TOKENS. ready: the context in which it runs and is
    traced. num_layers: attention calls; largest: the most tokens it will be called with; alike: groups of equal layers;
    numbers: see `trace`. any_rank: returns whether something is so on any of the ranks that run it together, which must
    not diverge.
    """

    run: Layers
    module: nn.Module
    inputs: Batch
    ready: Callable[[], AbstractContextManager[Any]]
    num_outputs: int
    num_layers: int
    largest: int
    alike: Sequence[Sequence[nn.Module]] = ()
    numbers: Mapping[Any, Sequence[int]] = field(default_factory=dict)
    any_rank: Callable[[bool], bool] = bool


@dataclass(frozen=True)
class Expected:
    """Results of the live layers on some batches: the rows of each output. measure: returns `bounds`."""

    batches: Sequence[Batch]
    outputs: list[torch.Tensor]
    measure: Callable[[], list[float]]

    @cached_property
    def bounds(self) -> list[float]:
        """The allowed difference of each output; measured when first read."""
        return self.measure()


@dataclass(frozen=True)
class Comparison:
    """Compares `traced` with the results of the live layers, see `expect`."""

    traced: "Traced"
    expected: Sequence[Expected]
    subject: Subject

    def rehearse(self) -> None:
        """Run the forwards of `check`, but equal parts of them once."""
        with equal_parts_once(), echoing():
            for each in self.expected:
                self.traced(*each.batches[0])

    def check(self) -> None:
        """Raise GraphError for a forward that fails, or differs by more than rounding; ranks pass or fail together."""
        with self.subject.ready(), _together(self.subject), torch.inference_mode():
            for each in self.expected:
                _compare(self.traced, each, self.subject)


def trace_checked(
    subject: Subject, config: EngineConfig, device: torch.device, later: list[Comparison] | None = None
) -> "Traced":
    """Trace and compile `subject`, and compare the results; Inductor's output is cached for the next process.

    If cached pieces fail, they are compiled again: they may be damaged. GraphError if `subject` does not trace, or its
    trace computes something else. later: if Inductor compiled nothing, the comparison is appended here instead of made,
    since its kernels are still being compiled. Ranks compare at once.
    """
    from specdec.graphs.compile.layers import Layers  # imports private parts of torch, as trace does

    layers = Layers(subject.alike)
    # The live layers run first: transformers installs hooks on first use, which cannot be traced.
    with torch.inference_mode(), subject.ready(), layers.recording():
        whole, *others = (_batches(subject.inputs, size) for size in COMPARED)
        expected = [expect(subject.run, whole)]
        expected += [expect(subject.run, batches, lambda: expected[0].bounds) for batches in others]
        if subject.any_rank is not bool:  # ranks run forwards together
            expected[0].bounds  # noqa: B018 (it is cached)
    if config.compiler == "eager":
        return _trace(subject, layers, config, expected, later)
    where, before = folder(device), num_found()
    try:
        with keeping(where):
            return _trace(subject, layers, config, expected, later)
    except GraphError:
        if not subject.any_rank(num_found() != before):
            raise
    with renewing(where) as fresh, keeping(fresh):
        return _trace(subject, layers, config, expected, later)


def _batches(inputs: Batch, size: int) -> list[Batch]:
    """Return forwards over `size` of the tokens of `inputs`: one forward, or for `size` 1 several of one token each."""
    return [tuple(t[i : i + size] for t in inputs) for i in (range(NUM_ALONE) if size == 1 else [0])]


def expect(layers: Layers, batches: Sequence[Batch], measure: Callable[[], list[float]] | None = None) -> Expected:
    """Run the live `layers` on every batch. measure: the bounds of an `Expected` with more tokens; without it they come
    from a second, disturbed run, which shows how far rounding may change results."""
    outputs = _outputs(layers, batches)

    def measured() -> list[float]:
        moved = _outputs(layers, batches, is_disturbed=True)
        return [bound(b.dtype, distance(a, b)) for a, b in zip(moved, outputs, strict=True)]

    return Expected(batches, outputs, measure or measured)


def compare(layers: Layers, expected: Expected) -> None:
    """Raise GraphError if results of `layers` differ from the expected ones by more than rounding."""
    batches, outputs = expected.batches, expected.outputs
    num_tokens = batches[0][0].shape[0]
    for i, (ours, theirs) in enumerate(zip(_outputs(layers, batches), outputs, strict=True)):
        error = distance(ours, theirs)
        if math.isnan(error):
            a, b = (int((~t.isfinite().all(-1)).sum()) for t in (ours, theirs))
            raise GraphError(f"of {len(ours)} rows {a} are not finite when compiled, {b} in the live model")
        if not error <= bound(theirs.dtype) and not error <= (limit := expected.bounds[i]):
            raise GraphError(
                f"compiled, they differ from the live model's by {error:.1e} of the norm, in forwards of {num_tokens} "
                f"token{'s' * (num_tokens > 1)}; rounding explains {limit:.1e}"
            )


def _outputs(layers: Layers, batches: Sequence[Batch], is_disturbed: bool = False) -> list[torch.Tensor]:
    """Run `layers` on every batch and concatenate the rows of each output."""
    with echoing(), disturbed() if is_disturbed else nullcontext():
        outputs = zip(*(layers(*batch) for batch in batches), strict=True)
        return [torch.cat(parts) for parts in outputs if parts[0] is not None]


def _trace(
    subject: Subject,
    layers: Any,
    config: EngineConfig,
    expected: Sequence[Expected],
    later: list[Comparison] | None,
) -> "Traced":
    """Trace and compile, and compare, or add the comparison to `later`; ranks pass or fail together."""
    from specdec.graphs.compile.trace import trace

    # The pieces of equal layers are compiled once, so most steps of the bar are short.
    bar = progress_bar(subject.num_layers + 1, "compile", "piece")
    with ExitStack() as undo, bar, subject.ready():
        with _together(subject):
            traced = trace(
                subject.run,
                subject.inputs,
                (ATTENTION, CONV, SCAN),
                config.compiler,
                num_outputs=subject.num_outputs,
                module=subject.module,
                smallest=2,  # one token is compared
                largest=subject.largest,
                layers=layers,
                numbers=subject.numbers,
                rewrite=partial(rewrite, is_ours=has_kernels(expected[0].outputs[0]) or config.compiler == "eager"),
                progress=lambda: bar.update() and None,
            )
            undo.callback(traced.release)
        comparison = Comparison(traced, expected, subject)
        with torch.inference_mode():
            rehearse((), compiling_kernels((), expected[0].outputs[0].device), comparison.rehearse)
        is_ours = config.compiler == "eager" or not traced.num_compiled
        if later is None or not is_ours or subject.any_rank is not bool:
            comparison.check()
        else:
            later.append(comparison)
        undo.pop_all()
        return traced


def rewrite(graph: fx.GraphModule, is_ours: bool) -> None:
    """Put our kernels into the flat graph of all layers, before it is split and compiled.

    is_ours: also matmuls, gates, norms and rope tables. Without kernels for them, Inductor's are faster.
    """
    drop_casts(graph)
    hand_over_rotations(graph, ATTENTION)
    take_over_choices(graph)
    share_keys(graph)
    join_quantised(graph)
    join_adapters(graph)
    if is_ours:
        take_over_products(graph)
        take_over_gates(graph)
        take_over_delta_gates(graph)
        take_in_adapters(graph)
        take_over_norms(graph)
        take_over_inputs(graph)
        hand_over_norms(graph, ATTENTION)
        quantise_results(graph)
        hand_over_sums(graph)
        take_over_tables(graph)
    graph.recompile()


def _compare(traced: "Traced", expected: Expected, subject: Subject) -> None:
    """See `compare`; GraphError also for errors in `traced`."""
    try:
        compare(traced, expected)
    except RuntimeError as error:
        if isinstance(error, GraphError) or subject.any_rank is not bool:  # other ranks are in the middle of it
            raise
        raise GraphError(f"compiled, they fail: {error}") from error


@contextmanager
def _together(subject: Subject) -> Iterator[None]:
    """Raise GraphError on all ranks if one raises it within the context."""
    try:
        yield
    except GraphError:
        subject.any_rank(True)
        raise
    if subject.any_rank(False):
        raise GraphError("they fail on another rank")
