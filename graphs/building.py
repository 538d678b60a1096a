"""Builds all graphs of an engine: warms up every size, captures the largest first, seals the runners."""

import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress
from typing import Any

import torch
from tqdm import tqdm

from specdec.core.errors import GraphError
from specdec.graphs.captures import Capture
from specdec.graphs.runner import GraphRunner
from specdec.graphs.shapes import ShapeKey

OUT_OF_MEMORY = "out of memory when it was captured"
NOT_CAPTURABLE = "it does something that cannot be captured"  # most likely it reads a tensor on the host
ALIKE_FROM = 256  # requests or tokens; larger sizes use much the same kernels


def build(
    runners: Sequence[GraphRunner],
    capture: Capture,
    *,
    lower: str,
    avoid: str = "cuda_graph=False",
    strict: bool = False,
    settle: Callable[[], None] | None = None,
) -> None:
    """Warm up and capture every key of `runners`, which share `capture`, then seal them; rank 0 shows a progress bar.

    lower, avoid: for messages: the settings to lower if memory runs out, and the argument that turns these graphs off.
    A key that cannot be captured gives a warning and runs eagerly from then on; smaller ones may still succeed. Under
    strict, GraphError ends the build instead. settle: with tensor parallelism, waits for the device after each warm-up,
    in which ranks wait for each other; a warm-up that fails then ends the build.
    """
    jobs = [(runner, key) for runner in runners for key in runner.keys]
    jobs.sort(key=lambda job: -job[1].size)  # stable: runners and variants keep their order within a size
    if jobs:
        with progress_bar(2 * len(jobs), "graphs", "graph") as bar, capture.undisturbed():
            for phase in (GraphRunner.warm_up, GraphRunner.capture):
                for runner, key in jobs:
                    bar.set_postfix_str(f"{phase.__name__} {key}", refresh=False)
                    if key not in runner.failures:
                        _make(phase, runner, key, lower, avoid, strict, settle is not None)
                        if settle is not None and phase is GraphRunner.warm_up:
                            settle()
                    bar.update()
                capture.release_cache()
    for runner in runners:
        runner.seal()


def progress_bar(total: int, desc: str, unit: str) -> Any:
    """Return a progress bar, shown only on a terminal and by rank 0, and removed when done."""
    is_other_rank = torch.distributed.is_initialized() and torch.distributed.get_rank() > 0
    return tqdm(total=total, desc=desc, unit=unit, leave=False, disable=is_other_rank or None)


def rehearse(
    runners: Sequence[GraphRunner],
    within: AbstractContextManager[Callable[[], int]] | None,
    prepare: Callable[[], object] = lambda: None,
) -> None:
    """Run the warm-ups of `runners` within a context that compiles kernels without launching them.

    First `prepare` and every variant at the largest size; then, if kernels had to be compiled, the variants of
    `Setup.rehearsed` at a size for each power of two up to ALIKE_FROM, where kernels change. within: the context, see
    `backends.compiling_kernels`; it gives a function that returns how many kernels had to be compiled or loaded. None:
    nothing is run. Errors are ignored: `build` meets and reports them.
    """
    if within is None:
        return
    jobs: list[tuple[GraphRunner, ShapeKey]] = []
    for runner in runners:
        sizes = {min(size - 1, ALIKE_FROM).bit_length(): size for size in runner.buckets}  # the last one stays
        keys = [key for key in runner.keys if key.size in sizes.values()]
        jobs += [(runner, key) for key in keys if key.variant in runner.rehearsed or key.size == runner.buckets[-1]]
    jobs.sort(key=lambda job: job[1].size < job[0].buckets[-1])  # the largest sizes first
    with within as num_compiled, suppress(Exception):
        prepare()
        for runner, key in jobs:
            if key.size < runner.buckets[-1] and not num_compiled():
                break
            with suppress(Exception):
                runner.rehearse(key)


def _make(
    phase: Callable[..., None],
    runner: GraphRunner,
    key: ShapeKey,
    lower: str,
    avoid: str,
    strict: bool,
    is_shared: bool,
) -> None:
    """Run `phase` for one key, or record why it has no graph."""
    try:
        phase(runner, key)
    except RuntimeError as error:
        is_memory = is_out_of_memory(error)
        if isinstance(error, GraphError) or (phase is GraphRunner.warm_up and (is_shared or not is_memory)):
            raise
        reason = OUT_OF_MEMORY if is_memory else NOT_CAPTURABLE
        advice = f"lower {lower}" if is_memory else f"pass {avoid} if that is expected"
        message = f"no graph for {key}: {reason} ({_first_line(error)}); {advice}"
        if strict:
            raise GraphError(f"strict: {message}") from error
        warnings.warn(f"{message}. Such batches run eagerly; report() counts them.", stacklevel=8)
        # What cannot be captured, most likely a host read, happens at every size; memory may suffice for a smaller one.
        for other in [key] if is_memory else runner.keys:
            if other not in runner.captured:
                runner.fail(other, reason)


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether `error` means out of device memory: a type of torch's, a message of CUDA, cuBLAS or Triton."""
    words = ("out of memory", "ALLOC_FAILED", "MEMORY_ALLOCATION")
    return isinstance(error, torch.OutOfMemoryError) or any(word in str(error) for word in words)


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__).split(". ")[0]
