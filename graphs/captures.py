"""Captures turn a callable into a graph: a CUDA graph (full), a record that is re-run (CPU), or none (eager)."""

import gc
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from specdec.graphs.pool import GraphPool

Body = Callable[[], Any]


class Graph(ABC):
    """A captured callable. outputs: its return value, in tensors at fixed addresses that every replay overwrites."""

    outputs: Any

    @abstractmethod
    def replay(self) -> None:
        """Run the callable on the current contents of its input tensors."""


@contextmanager
def collection_paused() -> Iterator[None]:
    """Pause Python's garbage collection: a pass over the objects of torch and transformers takes 0.1 to 0.3 s."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


class Capture(ABC):
    """Base of captures: makes graphs of callables that take no arguments and read tensors at fixed addresses.

    refusal: why nothing is captured; "" if graphs are.
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
        """Return a context for captures, without anything that would break one."""
        return nullcontext()

    def divide(self) -> None:
        """Called by a body: may end the graph and begin another, so that the device works while the host launches."""
        return None

    def pause(self, between: Callable[[], None]) -> None:
        """Called by a body: run `between` on the host, at every replay too, once the work before it is launched. A CUDA
        capture itself does not run it."""
        between()

    def shared(self, key: Hashable, begin: Callable[[], Any]) -> Any:
        """Called by a body before anything else: return what `begin` returns. Bodies captured one after another with
        the same `key` have it in graphs that they share."""
        return begin()

    def release_cache(self) -> None:
        """Free memory that only warm-ups needed."""
        return None

    def used_bytes(self) -> int:
        """Return the bytes of device memory in use, to measure a capture; 0 off CUDA."""
        return 0


class EagerCapture(Capture):
    """Captures nothing: every batch runs the callable itself, without padding. refusal: the reason, for counters."""

    name = "eager"

    def __init__(self, refusal: str = "graphs are off"):
        self.refusal = refusal

    def warm_up(self, body: Body) -> None:
        return None

    def capture(self, body: Body) -> Graph:
        raise AssertionError(self.refusal)


class Recorded(Graph):
    """A graph whose replays call the callable again and copy its results to `outputs`."""

    def __init__(self, body: Body, outputs: Any):
        self._body = body
        self.outputs = outputs

    def replay(self) -> None:
        fresh: list[torch.Tensor] = []
        tree_map_only(torch.Tensor, fresh.append, self._body())
        tree_map_only(torch.Tensor, lambda tensor: tensor.copy_(fresh.pop(0)), self.outputs)


def static_copy(outputs: Any) -> Any:
    """Return `outputs` with its tensors cloned, as buffers that replays write to."""
    return tree_map_only(torch.Tensor, torch.clone, outputs)


class RecordedCapture(Capture):
    """Capture for machines without CUDA: a replay re-runs the callable on its static inputs into static outputs.

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
    """Captures a callable as one CUDA graph, or as a few launched back to back, in a pool that captures may share.

    The device starts a graph only when the host has launched all of it, 1 µs or more per kernel; hence `divide`. Graphs
    captured later reuse a graph's temporary memory, so capture the largest first. Outputs live as long as the Graph.
    """

    name = "full"

    def __init__(self, device: torch.device, pool: GraphPool | None = None):
        self.pool = pool or GraphPool(device)
        self._parts: list[torch.cuda.CUDAGraph | Callable[[], None]] = []  # of the capture in progress, a graph last
        self._shared: tuple[Hashable, list[Any], Any] | None = None  # key, parts and results of the last `shared`

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
                self._shared = None
                self.pool.give_up(self._last)
                raise
            finally:
                self._parts = []

    def _graph_of(self, parts: list[Any], outputs: Any) -> Graph:
        return _Full(parts, outputs)

    def undisturbed(self) -> AbstractContextManager[None]:
        """Pause garbage collection, which could destroy graphs of a dropped engine and so break a running capture."""
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

    def shared(self, key: Hashable, begin: Callable[[], Any]) -> Any:
        if not self._parts:  # a warm-up
            return begin()
        if self._shared is not None and self._shared[0] == key:
            self._parts[:0] = self._shared[1]
            return self._shared[2]
        self._shared = None  # whose results may need the memory no longer
        results = begin()
        self.divide()
        self._shared = key, self._parts[:-1], results
        return results

    @property
    def _last(self) -> torch.cuda.CUDAGraph:
        last = self._parts[-1]
        assert isinstance(last, torch.cuda.CUDAGraph)
        return last

    def release_cache(self) -> None:
        self._shared = None
        self.pool.release_cache()

    def used_bytes(self) -> int:
        return self.pool.used_bytes()


def pick_capture(wanted: bool | None, device: torch.device, pool: GraphPool | None = None) -> Capture:
    """Return the capture for `device`: on CUDA full, eager if `wanted` is False; elsewhere eager, recorded if True."""
    if wanted is False or (wanted is None and device.type != "cuda"):
        return EagerCapture()
    return FullCapture(device, pool) if device.type == "cuda" else RecordedCapture()
