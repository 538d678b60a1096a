"""The memory pool and the stream that all CUDA graphs of one engine are captured with."""

import contextlib
import warnings
from collections.abc import Iterator
from typing import Any

import torch


class GraphPool:
    """Memory pool and capture stream that CUDA graphs share; its graphs must not run concurrently.

    Graphs captured later reuse a graph's temporary memory, so capture the largest first. ValueError off CUDA.
    """

    def __init__(self, device: torch.device):
        if device.type != "cuda":
            raise ValueError(f"device={str(device)!r}: CUDA graphs need a CUDA device; use RecordedCapture elsewhere")
        self.device = device
        self._stream = torch.cuda.Stream(device)
        self._handle: Any = None
        self._anchors: list[torch.cuda.CUDAGraph] = []

    def begin(self) -> torch.cuda.CUDAGraph:
        """Begin the capture of a graph; call it within `on_stream`."""
        if self._handle is None:
            self._take()
        graph = torch.cuda.CUDAGraph()
        # Other threads may allocate and copy meanwhile: the rules of a capture apply to this thread only.
        graph.capture_begin(pool=self._handle, capture_error_mode="thread_local")
        return graph

    def give_up(self, graph: torch.cuda.CUDAGraph) -> None:
        """End a failed capture; errors of ending it are dropped, as they say less than the error being raised."""
        with contextlib.suppress(RuntimeError), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            graph.capture_end()
            return
        # If CUDA aborted the capture, torch has not released the pool: the allocator must know, and no graph can be
        # captured into this pool again.
        with contextlib.suppress(RuntimeError):
            for _ in range(4):
                torch._C._cuda_endAllocateToPool(self.device.index or 0, self._handle)
        self._handle = None

    @contextlib.contextmanager
    def on_stream(self) -> Iterator[None]:
        """Run the work of this context on the pool's stream, ordered after and before that of the current stream."""
        current = torch.cuda.current_stream(self.device)
        self._stream.wait_stream(current)
        try:
            with torch.cuda.stream(self._stream):
                yield
        finally:
            current.wait_stream(self._stream)

    def release_cache(self) -> None:
        """Free memory that only warm-ups needed."""
        torch.cuda.synchronize(self.device)
        # Addresses of cuBLAS workspaces end up in graphs. Dropped after the warm-ups, workspaces are allocated again
        # during the captures, from the graphs' own pool, where no other code can free them; dropped after the captures
        # too, so that the next engine allocates its own. torch's CUDA graph trees do the same.
        torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.empty_cache()

    def used_bytes(self) -> int:
        """Return the bytes of device memory in use, by any process."""
        free, total = torch.cuda.mem_get_info(self.device)
        return total - free

    def _take(self) -> None:
        """Take a pool handle. Without a graph the pool's memory would be lost, so capture one that cannot fail."""
        self._handle = torch.cuda.graph_pool_handle()
        with self.on_stream():
            graph = self.begin()
            torch.zeros(1, device=self.device)
            graph.capture_end()
        self._anchors.append(graph)
