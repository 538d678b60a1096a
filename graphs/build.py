"""Making all graphs of an engine: warm everything up, capture the largest first, seal."""

import gc
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from tqdm import tqdm

from specdec.errors import GraphError
from specdec.graphs.captures import Capture
from specdec.graphs.runner import GraphRunner
from specdec.graphs.shapes import ShapeKey

OUT_OF_MEMORY = "out of memory when it was captured"
NOT_CAPTURABLE = "it does what cannot be captured"


def build(runners: Sequence[GraphRunner], capture: Capture, *, lower: str, strict: bool = False) -> None:
    """Warm up and capture every key of `runners`, which share `capture`; then seal them. A progress bar shows it.

    lower: what the user can lower if memory runs out. A key that cannot be captured is warned about and runs eagerly
    from then on, smaller ones may still succeed; under strict GraphError ends the build instead.
    """
    jobs = [(runner, key) for runner in runners for key in runner.keys]
    jobs.sort(key=lambda job: -job[1].num_reqs)  # stable: runners and variants keep their order within a size
    progress = tqdm(total=2 * len(jobs), desc="graphs", unit="graph", leave=False, disable=None if jobs else True)
    with progress as bar, _collection_paused():
        for phase in ("warm_up", "capture"):
            for runner, key in jobs:
                bar.set_postfix_str(f"{phase} {key}", refresh=False)
                if key not in runner.failures:
                    _make(runner, key, phase, lower, strict)
                bar.update()
            capture.release_cache()
    for runner in runners:
        runner.seal()


@contextmanager
def _collection_paused() -> Iterator[None]:
    """A collection within a capture could destroy the graphs of a forgotten engine, which would break the capture."""
    gc.collect()
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _make(runner: GraphRunner, key: ShapeKey, phase: str, lower: str, strict: bool) -> None:
    try:
        (runner.warm_up if phase == "warm_up" else runner.capture)(key)
        return
    except torch.OutOfMemoryError as error:
        failed, reason, cause = [key], OUT_OF_MEMORY, str(error).split(". ")[0]
        advice = f"lower {lower}"
    except RuntimeError as error:
        if phase == "warm_up" or isinstance(error, GraphError):
            raise
        # The callable itself does what no graph can hold, a host read most likely, and would do so at every size.
        failed, reason, cause = runner.keys, NOT_CAPTURABLE, str(error).strip().splitlines()[0]
        advice = "pass cuda_graph=False if that is expected"
    message = f"no graph for {key}: {reason} ({cause}); {advice}"
    if strict:
        raise GraphError(f"strict: {message}")
    warnings.warn(f"{message}. Such batches run eagerly; report() counts them.", stacklevel=6)
    for other in failed:
        if other not in runner.captured:
            runner.fail(other, reason)
