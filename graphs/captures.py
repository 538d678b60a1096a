"""How a callable becomes a graph: not at all (eager), as one CUDA graph (full), or recorded and re-run (on a CPU)."""

import contextlib
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

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
    refusal = "graphs are off"

    def warm_up(self, body: Body) -> None:
        return None

    def capture(self, body: Body) -> Graph:
        raise AssertionError(self.refusal)


class _Recorded(Graph):
    def __init__(self, body: Body):
        self._body = body
        self.outputs = tree_map_only(torch.Tensor, torch.clone, body())

    def replay(self) -> None:
        fresh: list[torch.Tensor] = []
        tree_map_only(torch.Tensor, fresh.append, self._body())
        tree_map_only(torch.Tensor, lambda kept: kept.copy_(fresh.pop(0)), self.outputs)


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
    """One CUDA graph a callable; all graphs of one FullCapture share a memory pool and must not run at once.

    A graph's temporary memory is given to the graphs captured after it, so the largest comes first. Its outputs live as
    long as the Graph does.
    """

    name = "full"

    def __init__(self, device: torch.device):
        self.device = device
        self._stream = torch.cuda.Stream(device)
        self._pool: Any = None
        self._anchors: list[Graph] = []

    def warm_up(self, body: Body) -> None:
        with self._on_own_stream():
            body()

    def capture(self, body: Body) -> Graph:
        if self._pool is None:
            self._take_pool()
        return self._capture(body)

    def _capture(self, body: Body) -> Graph:
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize(self.device)
        with self._on_own_stream():
            # Other threads may allocate and copy meanwhile: only this thread's doings are held to the capture's rules.
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                outputs = body()
                graph.capture_end()
            except BaseException:
                self._give_up(graph)
                raise
        return _Full(graph, outputs)

    def release_cache(self) -> None:
        torch.cuda.synchronize(self.device)
        # Addresses of cuBLAS workspaces end up in graphs. Dropped after the warm-ups, they are taken anew within the
        # captures, from the graphs' own pool, where nobody else can free them; dropped again, the next engine makes its
        # own. torch's CUDA graph trees do the same.
        torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.empty_cache()

    def used_bytes(self) -> int:
        free, total = torch.cuda.mem_get_info(self.device)
        return total - free

    @contextlib.contextmanager
    def _on_own_stream(self) -> Any:
        current = torch.cuda.current_stream(self.device)
        self._stream.wait_stream(current)
        try:
            with torch.cuda.stream(self._stream):
                yield
        finally:
            current.wait_stream(self._stream)

    def _take_pool(self) -> None:
        """A memory pool; without graphs it would be gone for good, so one that cannot fail keeps it."""
        self._pool = torch.cuda.graph_pool_handle()
        self._anchors.append(self._capture(lambda: torch.zeros(1, device=self.device)))

    def _give_up(self, graph: torch.cuda.CUDAGraph) -> None:
        """End a capture that has failed; what it complains about says less than the error at hand."""
        with contextlib.suppress(RuntimeError), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            graph.capture_end()
            return
        # Where CUDA has broken the capture off, torch has not let go of the pool: the allocator must be told, and the
        # pool cannot be captured into again.
        with contextlib.suppress(RuntimeError):
            for _ in range(4):
                torch._C._cuda_endAllocateToPool(self.device.index or 0, self._pool)
        self._pool = None


def pick_capture(wanted: bool | None, device: torch.device) -> Capture:
    """The capture for `device`: full on CUDA; elsewhere eager, or recorded if graphs are `wanted` all the same."""
    if wanted is False or (wanted is None and device.type != "cuda"):
        return EagerCapture()
    return FullCapture(device) if device.type == "cuda" else RecordedCapture()
