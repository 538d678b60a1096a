"""Captures turn a callable into a graph: not at all (eager), as one CUDA graph (full), or recorded and re-run (CPU)."""

import gc
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from specdec.graphs.pool import GraphPool

Body = Callable[[], Any]


class Graph(ABC):
    """A captured callable. `outputs`: its return value, at fixed addresses that every replay overwrites."""

    outputs: Any

    @abstractmethod
    def replay(self) -> None:
        """Run it on the current contents of its inputs."""


@contextmanager
def collection_paused() -> Iterator[None]:
    """Collect no garbage within the context: a pass over all that torch and transformers keep takes 0.1 to 0.3 s."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


class Capture(ABC):
    """Makes graphs of callables that take no arguments and read tensors at fixed addresses.

    refusal: the reason why nothing is captured; empty if graphs are captured.
    """

    name: str
    refusal: str = ""

    @abstractmethod
    def warm_up(self, body: Body) -> None:
        """Run `body` as `capture` will, so that nothing is compiled, loaded or tuned during the capture."""

    @abstractmethod
    def capture(self, body: Body) -> Graph:
        """Capture `body`; its exceptions propagate, and this object can capture again afterwards."""

    def undisturbed(self) -> AbstractContextManager[None]:
        """Within it are captures, and nothing that would break one."""
        return nullcontext()

    def divide(self) -> None:
        """Called by a body: what follows may be launched apart, so that the device has work while the host launches."""
        return None

    def pause(self, between: Callable[[], None]) -> None:
        """Called by a body: run `between` on the host here, at every replay, too, after what came before is launched;
        a capture itself does not run it."""
        between()

    def release_cache(self) -> None:
        """Free memory that only warm-ups needed."""
        return None

    def used_bytes(self) -> int:
        """Return the bytes of device memory in use, to compare before and after a capture."""
        return 0


class EagerCapture(Capture):
    """Captures nothing: every batch runs the callable itself, without padding."""

    name = "eager"

    def __init__(self, refusal: str = "graphs are off"):
        self.refusal = refusal

    def warm_up(self, body: Body) -> None:
        return None

    def capture(self, body: Body) -> Graph:
        raise AssertionError(self.refusal)


class Recorded(Graph):
    """A callable that replays run again, writing its results to `outputs`."""

    def __init__(self, body: Body, outputs: Any):
        self._body = body
        self.outputs = outputs

    def replay(self) -> None:
        fresh: list[torch.Tensor] = []
        tree_map_only(torch.Tensor, fresh.append, self._body())
        tree_map_only(torch.Tensor, lambda tensor: tensor.copy_(fresh.pop(0)), self.outputs)


def static_copy(outputs: Any) -> Any:
    """Return `outputs` with its tensors cloned, for replays to write to."""
    return tree_map_only(torch.Tensor, torch.clone, outputs)


class RecordedCapture(Capture):
    """For machines without CUDA: re-runs the callable on its static inputs and overwrites its static outputs.

    Padding, buckets, guards, counters and the lifetime of outputs are those of a CUDA graph; the speed is not.
    """

    name = "recorded"

    def warm_up(self, body: Body) -> None:
        body()

    def capture(self, body: Body) -> Graph:
        return Recorded(body, static_copy(body()))


class _Full(Graph):
    def __init__(self, parts: Sequence[torch.cuda.CUDAGraph | Callable[[], None]], outputs: Any):
        self._parts = [part.replay if isinstance(part, torch.cuda.CUDAGraph) else part for part in parts]
        self.outputs = outputs

    def replay(self) -> None:
        for part in self._parts:
            part()


class FullCapture(Capture):
    """One CUDA graph per callable, or a few that are launched back to back, in a pool that captures may share.

    The device begins a graph when the host has launched all of it, 1 µs or more a kernel; hence `divide`. A graph's
    temporary memory is reused by the graphs captured after it, so the largest is captured first. Its outputs
    live as long as the Graph does.
    """

    name = "full"

    def __init__(self, device: torch.device, pool: GraphPool | None = None):
        self.pool = pool or GraphPool(device)
        self._parts: list[torch.cuda.CUDAGraph | Callable[[], None]] = []  # of the capture in progress, a graph last

    def warm_up(self, body: Body) -> None:
        with self.pool.on_stream():
            body()

    def capture(self, body: Body) -> Graph:
        torch.cuda.synchronize(self.pool.device)
        with self.pool.on_stream():
            self._parts = [self.pool.begin()]
            try:
                outputs = body()
                self._last.capture_end()
                return self._graph_of(self._parts, outputs)
            except BaseException:
                self.pool.give_up(self._last)
                raise
            finally:
                self._parts = []

    def _graph_of(self, parts: list[Any], outputs: Any) -> Graph:
        return _Full(parts, outputs)

    def undisturbed(self) -> AbstractContextManager[None]:
        """Pause garbage collection: it could destroy graphs of a dropped engine, which breaks a running capture."""
        return collection_paused()

    def divide(self) -> None:
        if self._parts:
            self._last.capture_end()
            self._parts.append(self.pool.begin())

    def pause(self, between: Callable[[], None]) -> None:
        if not self._parts:
            return between()
        self._last.capture_end()
        self._parts += [between, self.pool.begin()]

    @property
    def _last(self) -> torch.cuda.CUDAGraph:
        last = self._parts[-1]
        assert isinstance(last, torch.cuda.CUDAGraph)
        return last

    def release_cache(self) -> None:
        self.pool.release_cache()

    def used_bytes(self) -> int:
        return self.pool.used_bytes()


def pick_capture(wanted: bool | None, device: torch.device, pool: GraphPool | None = None) -> Capture:
    """Return the capture for `device`: full on CUDA unless `wanted` is False; else recorded if True, or eager."""
    if wanted is False or (wanted is None and device.type != "cuda"):
        return EagerCapture()
    return FullCapture(device, pool) if device.type == "cuda" else RecordedCapture()
