"""The memory pool and the stream that all CUDA graphs of one engine are captured with."""

import contextlib
import warnings
from collections.abc import Iterator
from typing import Any

import torch


class GraphPool:
    """One pool and one stream; graphs in it must not run at once.

    A graph's temporary memory is given to the graphs captured after it, so the largest comes first.
    """

    def __init__(self, device: torch.device):
        self.device = device
        self._stream = torch.cuda.Stream(device)
        self._handle: Any = None
        self._anchors: list[torch.cuda.CUDAGraph] = []

    def begin(self) -> torch.cuda.CUDAGraph:
        """Begin to capture a graph on the current stream, which must be that of `on_stream`."""
        if self._handle is None:
            self._take()
        graph = torch.cuda.CUDAGraph()
        # Other threads may allocate and copy meanwhile: only this thread's doings are held to the capture's rules.
        graph.capture_begin(pool=self._handle, capture_error_mode="thread_local")
        return graph

    def give_up(self, graph: torch.cuda.CUDAGraph) -> None:
        """End a capture that has failed; what it complains about says less than the error at hand."""
        with contextlib.suppress(RuntimeError), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            graph.capture_end()
            return
        # Where CUDA has broken the capture off, torch has not let go of the pool: the allocator must be told, and the
        # pool cannot be captured into again.
        with contextlib.suppress(RuntimeError):
            for _ in range(4):
                torch._C._cuda_endAllocateToPool(self.device.index or 0, self._handle)
        self._handle = None

    @contextlib.contextmanager
    def on_stream(self) -> Iterator[None]:
        """Within, work goes to the pool's stream, after what is on the current one and before what follows there."""
        current = torch.cuda.current_stream(self.device)
        self._stream.wait_stream(current)
        try:
            with torch.cuda.stream(self._stream):
                yield
        finally:
            current.wait_stream(self._stream)

    def release_cache(self) -> None:
        """Give memory back that only warm-ups needed."""
        torch.cuda.synchronize(self.device)
        # Addresses of cuBLAS workspaces end up in graphs. Dropped after the warm-ups, they are taken anew within the
        # captures, from the graphs' own pool, where nobody else can free them; dropped again, the next engine makes its
        # own. torch's CUDA graph trees do the same.
        torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.empty_cache()

    def used_bytes(self) -> int:
        """Device memory in use, by whomever."""
        free, total = torch.cuda.mem_get_info(self.device)
        return total - free

    def _take(self) -> None:
        """A handle; without graphs its memory would be gone for good, so one that cannot fail keeps it."""
        self._handle = torch.cuda.graph_pool_handle()
        with self.on_stream():
            graph = self.begin()
            torch.zeros(1, device=self.device)
            graph.capture_end()
        self._anchors.append(graph)
