"""Traces of a model's layers that are held against the layers themselves before they are used."""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import fx, nn
from tqdm import tqdm

from specdec.config import EngineConfig
from specdec.errors import GraphError
from specdec.graphs.kept import TRACES, Record, folder, keeping, num_found, renewing
from specdec.graphs.pieces import start_workers
from specdec.graphs.structure import structure
from specdec.graphs.trace import Traced, trace
from specdec.targets import experts, mixers, primitives, rotation, routers
from specdec.targets.echo import Expected, compare, expect

# Tokens of the forwards that are compared; the first is traced. At one token, the plain decode, a trace that took
# T > 1 for granted would be wrong.
EXAMPLES = ((32,), (7,), (1,) * 7)
ATTENTION, CONV, SCAN = torch.ops.specdec.attn.default, torch.ops.specdec.conv.default, torch.ops.specdec.scan.default
Batch = tuple[torch.Tensor, ...]  # what a forward takes, [T, ...] each


@dataclass(frozen=True)
class Subject:
    """What is traced: `run`, which takes a batch and returns `num_outputs` tensors, possibly beside None.

    examples: batches of the sizes of EXAMPLES, a group each. ready: the context that it runs in, and is traced in.
    num_layers: attention calls; largest: tokens it will be called with; alike, numbers: see `trace`. modules,
    tensors: what it reads, modules by a name and tensors beside theirs; facts: what else a trace of it depends on.
    any_rank: whether something is so on any of the ranks that run it together, which must not part.
    """

    run: Callable[..., Sequence[Any]]
    examples: Sequence[Sequence[Batch]]
    ready: Callable[[bool], AbstractContextManager[Any]]
    num_outputs: int
    num_layers: int
    largest: int
    modules: Mapping[str, nn.Module]
    tensors: Mapping[str, torch.Tensor]
    facts: Sequence[Any] = ()
    alike: Sequence[nn.Module] = ()
    numbers: Mapping[Any, Sequence[int]] | None = None
    any_rank: Callable[[bool], bool] = bool

    @property
    def is_shared(self) -> bool:
        """Whether other ranks run it, too."""
        return self.any_rank is not bool


def trace_checked(subject: Subject, config: EngineConfig, device: torch.device) -> Traced:
    """Trace and compile `subject`; the trace, and what Inductor compiles, are kept for the next process.

    What fails with a trace that was kept is traced anew, and with pieces that were kept compiled anew: they may be
    damaged, or a model's code has changed where nobody looks. GraphError for what does not trace, or computes something
    else.
    """
    # What is live runs first: transformers installs hooks on first use, which cannot be traced.
    with torch.inference_mode(), subject.ready(False):
        expected = [expect(subject.run, batches) for batches in subject.examples]
    if config.compiler == "eager":
        return _trace(subject, config, None, None, expected)
    where, before = folder(device), num_found()
    record = _record(subject, where)
    if not record.text():
        start_workers(device)
    try:
        with keeping(where):
            return _trace_or_recall(subject, config, where, record, expected)
    except GraphError:
        if not subject.any_rank(num_found() != before):
            raise
    with renewing(where) as fresh, keeping(fresh):
        return _trace_or_recall(
            subject, config, None, replace(record, file=fresh / TRACES / record.file.name), expected
        )


def _trace_or_recall(
    subject: Subject, config: EngineConfig, keep: Path | None, record: Record, expected: Sequence[Expected]
) -> Traced:
    """Trace `subject`, or take what `record` has kept; keep what is new."""
    try:
        traced = _trace(subject, config, keep, record, expected)
    except Exception:  # whatever a trace that does not fit may raise
        if not subject.any_rank(bool(record.text())):
            raise
        record.forget()
        traced = _trace(subject, config, keep, None if record.text() else record, expected)
    if traced.text:
        record.keep(traced.text)
    return traced


def _record(subject: Subject, where: Path) -> Record:
    """Return where the trace of `subject` is kept."""
    tensors = {f"{name}.{n}": t for name, m in subject.modules.items() for n, t in _tensors(m)} | dict(subject.tensors)
    facts = [
        subject.num_outputs,
        subject.num_layers,
        subject.largest,
        sorted(map(str, (subject.numbers or {}).items())),
        *subject.facts,
    ]
    facts += [inspect.getsource(module) for module in (experts, mixers, primitives, rotation, routers)]
    with subject.ready(True):
        told = structure(
            subject.run,
            subject.modules,
            tensors,
            subject.examples[0][0],
            repr((facts, [str(op._schema) for op in (ATTENTION, CONV, SCAN)])),
        )
    return Record(where / TRACES / f"{told}.json", tensors)


def _tensors(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from module.named_parameters()
    yield from module.named_buffers()


def _trace(
    subject: Subject,
    config: EngineConfig,
    keep: Path | None,
    record: Record | None,
    expected: Sequence[Expected],
) -> Traced:
    """Trace and compile, and compare with what the live layers gave; ranks pass or fail together."""
    # The pieces of equal layers are compiled once, so most steps of the bar are short.
    bar = tqdm(total=subject.num_layers + 1, desc="compile", unit="piece", leave=False, disable=None)
    traced: Traced | None = None
    with bar, subject.ready(True):
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
                    alike=subject.alike,
                    numbers=subject.numbers,
                    rewrite=_rewrite,
                    keep=keep,
                    record=record,
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


def _compare(traced: Traced, subject: Subject, expected: Sequence[Expected]) -> None:
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
