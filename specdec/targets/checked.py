"""Traces of a model's layers that are held against the layers themselves before they are used."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import fx, nn

from specdec.config import EngineConfig
from specdec.errors import GraphError
from specdec.graphs.build import progress_bar
from specdec.graphs.kept import folder, has_pieces, keeping, num_found, renewing
from specdec.targets import rotation, routers
from specdec.targets.echo import Expected, compare, expect

if TYPE_CHECKING:
    from specdec.graphs.layers import Layers
    from specdec.graphs.trace import Traced

# Tokens of the forwards that are compared; the first is traced. At one token, the plain decode, a trace that took
# T > 1 for granted would be wrong.
EXAMPLES = ((32,), (7,), (1,) * 7)
ATTENTION, CONV, SCAN = torch.ops.specdec.attn.default, torch.ops.specdec.conv.default, torch.ops.specdec.scan.default
Batch = tuple[torch.Tensor, ...]  # what a forward takes, [T, ...] each


@dataclass(frozen=True)
class Subject:
    """What is traced: `run`, which takes a batch and returns `num_outputs` tensors, possibly beside None.

    examples: batches of the sizes of EXAMPLES, a group each. ready: the context that it runs in, and is traced in.
    num_layers: attention calls; largest: tokens it will be called with; alike: groups of equal layers; numbers: see
    `trace`.
    any_rank: whether something is so on any of the ranks that run it together, which must not part.
    """

    run: Callable[..., Sequence[Any]]
    examples: Sequence[Sequence[Batch]]
    ready: Callable[[], AbstractContextManager[Any]]
    num_outputs: int
    num_layers: int
    largest: int
    alike: Sequence[Sequence[nn.Module]] = ()
    numbers: Mapping[Any, Sequence[int]] | None = None
    any_rank: Callable[[bool], bool] = bool

    @property
    def is_shared(self) -> bool:
        """Whether other ranks run it, too."""
        return self.any_rank is not bool


def trace_checked(subject: Subject, config: EngineConfig, device: torch.device) -> "Traced":
    """Trace and compile `subject`; what Inductor compiles is kept for the next process.

    What fails with pieces that were kept is compiled anew: they may be damaged. GraphError for what does not trace, or
    computes something else.
    """
    from specdec.graphs.layers import Layers  # imports private parts of torch, as trace and pieces do
    from specdec.graphs.pieces import start_workers

    layers = Layers(subject.alike)
    # What is live runs first: transformers installs hooks on first use, which cannot be traced.
    with torch.inference_mode(), subject.ready(), layers.recording():
        expected = [expect(subject.run, batches) for batches in subject.examples]
    if config.compiler == "eager":
        return _trace(subject, layers, config, expected)
    where, before = folder(device), num_found()
    if not has_pieces(device):
        start_workers(device)
    try:
        with keeping(where):
            return _trace(subject, layers, config, expected)
    except GraphError:
        if not subject.any_rank(num_found() != before):
            raise
    with renewing(where) as fresh, keeping(fresh):
        return _trace(subject, layers, config, expected)


def _trace(
    subject: Subject, layers: "Layers", config: EngineConfig, expected: Sequence[Expected]
) -> "Traced":
    """Trace and compile, and compare with what the live layers gave; ranks pass or fail together."""
    # The pieces of equal layers are compiled once, so most steps of the bar are short.
    from specdec.graphs.trace import trace

    bar = progress_bar(subject.num_layers + 1, "compile", "piece")
    traced: Traced | None = None
    with bar, subject.ready():
        try:
            with _together(subject):
                traced = trace(
                    subject.run,
                    subject.examples[0][0],
                    (ATTENTION, CONV, SCAN),
                    config.compiler,
                    num_outputs=subject.num_outputs,
                    smallest=2,  # one token is compared
                    largest=subject.largest,
                    layers=layers,
                    numbers=subject.numbers,
                    rewrite=_rewrite,
                    progress=lambda: bar.update() and None,
                )
            with _together(subject):
                _compare(traced, subject, expected)
            return traced
        except BaseException:
            if traced is not None:
                traced.release()
            raise


def _rewrite(graph: fx.GraphModule) -> None:
    """Let what is traced call kernels of ours where it can."""
    rotation.hand_over_rotations(graph, ATTENTION)
    routers.take_over_choices(graph)


def _compare(traced: "Traced", subject: Subject, expected: Sequence[Expected]) -> None:
    """Raise GraphError unless `traced` gives what the live layers gave, and for errors in it."""
    try:
        with torch.inference_mode():
            for batches, outputs in zip(subject.examples, expected, strict=True):
                compare(traced, batches, outputs)
    except GraphError:
        raise
    except RuntimeError as error:
        if subject.is_shared:  # the other ranks are in the middle of it
            raise
        raise GraphError(f"compiled, they fail: {error}") from error


@contextmanager
def _together(subject: Subject) -> Iterator[None]:
    """Within it, GraphError on one rank is one on all."""
    try:
        yield
    except GraphError:
        subject.any_rank(True)
        raise
    if subject.any_rank(False):
        raise GraphError("they fail on another rank")
