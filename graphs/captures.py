"""How a callable becomes a graph: not at all (eager), as one CUDA graph (full), or recorded and re-run (on a CPU)."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from specdec.graphs.pool import GraphPool

Body = Callable[[], Any]


class Graph(ABC):
    """A captured callable. `outputs`: what it returned, at addresses that every replay writes again."""

    outputs: Any

    @abstractmethod
    def replay(self) -> None:
        """Run it on what its inputs hold now."""


class Capture(ABC):
    """Makes graphs of callables that take no arguments and read tensors which stay where they are.

    refusal: why nothing is captured; empty if something is.
    """

    name: str
    refusal: str = ""

    @abstractmethod
    def warm_up(self, body: Body) -> None:
        """Run `body` as `capture` will, so that nothing is compiled, loaded or tuned during the capture."""

    @abstractmethod
    def capture(self, body: Body) -> Graph:
        """Capture `body`; whatever it raises comes out, and the capture can be used again."""

    def release_cache(self) -> None:
        """Give memory back that only warm-ups needed."""
        return None

    def used_bytes(self) -> int:
        """Device memory in use, to be compared before and after a capture."""
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


class _Recorded(Graph):
    def __init__(self, body: Body):
        self._body = body
        self.outputs = static_copy(body())

    def replay(self) -> None:
        write_outputs(self.outputs, self._body())


def static_copy(outputs: Any) -> Any:
    """Copies of the tensors in `outputs`, for replays to write."""
    return tree_map_only(torch.Tensor, torch.clone, outputs)


def write_outputs(kept: Any, outputs: Any) -> None:
    """Write `outputs` to the tensors of `kept`, which is built alike."""
    fresh: list[torch.Tensor] = []
    tree_map_only(torch.Tensor, fresh.append, outputs)
    tree_map_only(torch.Tensor, lambda tensor: tensor.copy_(fresh.pop(0)), kept)


class RecordedCapture(Capture):
    """For machines without CUDA: re-runs the callable on its static inputs and writes its static outputs again.

    Padding, buckets, guards, counters and the life of outputs are those of a graph; the speed is not.
    """

    name = "recorded"

    def warm_up(self, body: Body) -> None:
        body()

    def capture(self, body: Body) -> Graph:
        return _Recorded(body)


class _Full(Graph):
    def __init__(self, graph: torch.cuda.CUDAGraph, outputs: Any):
        self._graph = graph
        self.outputs = outputs

    def replay(self) -> None:
        self._graph.replay()


class FullCapture(Capture):
    """One CUDA graph a callable, in a pool that other captures of the engine may share.

    A graph's temporary memory is given to the graphs captured after it, so the largest comes first. Its outputs live as
    long as the Graph does.
    """

    name = "full"

    def __init__(self, device: torch.device, pool: GraphPool | None = None):
        self.pool = pool or GraphPool(device)

    def warm_up(self, body: Body) -> None:
        with self.pool.on_stream():
            body()

    def capture(self, body: Body) -> Graph:
        torch.cuda.synchronize(self.pool.device)
        with self.pool.on_stream():
            graph = self.pool.begin()
            try:
                outputs = body()
                graph.capture_end()
            except BaseException:
                self.pool.give_up(graph)
                raise
        return _Full(graph, outputs)

    def release_cache(self) -> None:
        self.pool.release_cache()

    def used_bytes(self) -> int:
        return self.pool.used_bytes()


def pick_capture(wanted: bool | None, device: torch.device, pool: GraphPool | None = None) -> Capture:
    """The capture for `device`: full on CUDA; elsewhere eager, or recorded if graphs are `wanted` all the same."""
    if wanted is False or (wanted is None and device.type != "cuda"):
        return EagerCapture()
    return FullCapture(device, pool) if device.type == "cuda" else RecordedCapture()
