"""Device state of running requests, by row, and the host's mailbox for what rounds emit."""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any

import numpy as np
import torch

from specdec.processors import ProcessorState
from specdec.sampling import SamplingBatch, SamplingParams
from specdec.scheduler import Request

MAX_STOP_IDS = 16

# What admission writes to a request's row: a tensor of `EngineState.tensors` and its value, a number or as many as the
# row has.
CONSTANTS: tuple[tuple[str, Callable[[Request], Any]], ...] = (
    ("seq_lens", lambda r: len(r.prompt_ids)),
    ("remaining", lambda r: r.max_new_tokens),
    ("stop_ids", lambda r: (*r.stop_ids, *[-1] * (MAX_STOP_IDS - len(r.stop_ids)))),
    ("temperature", lambda r: r.sampling.temperature),
    ("top_k", lambda r: r.sampling.top_k),
    ("top_p", lambda r: r.sampling.top_p),
    ("min_p", lambda r: r.sampling.min_p),
    ("seeds", lambda r: r.sampling.seed or 0),
)


@dataclass(frozen=True)
class EngineState:
    """Per-row device state, all [num_rows] unless said; the round reads and writes it, admission fills it.

    The last row is the dummy row: it is over for ever, owns slot 0 only, and padding of captured batches points to it.
    seq_lens: L; roots: the token at L; remaining: tokens the request may still emit, 0 once it is over;
    stop_ids [num_rows, MAX_STOP_IDS], -1 padded; sampling: parameters by row; processors: penalties and bans by row.
    """

    seq_lens: torch.Tensor
    roots: torch.Tensor
    remaining: torch.Tensor
    stop_ids: torch.Tensor
    sampling: SamplingBatch
    processors: ProcessorState

    @classmethod
    def empty(cls, num_rows: int, width: int, vocab_size: int, device: torch.device) -> "EngineState":
        """All rows idle. width: positions that a request can reach."""

        def zeros() -> torch.Tensor:
            return torch.zeros(num_rows, dtype=torch.int64, device=device)

        stop_ids = torch.full((num_rows, MAX_STOP_IDS), -1, dtype=torch.int64, device=device)
        sampling = SamplingBatch.stack([SamplingParams()] * num_rows, device)
        processors = ProcessorState.empty(num_rows, width, vocab_size, device)
        return cls(zeros(), zeros(), zeros(), stop_ids, sampling, processors)

    def pack(self, requests: Sequence[Request]) -> np.ndarray:
        """The constants of `requests` as [n, F] int64, floats by their float64 bits: one copy takes them over."""
        columns = []
        for (name, value_of), tensor in zip(CONSTANTS, self.columns, strict=True):
            dtype = np.float64 if tensor.is_floating_point() else np.int64
            column = np.array([value_of(r) for r in requests], dtype=dtype)
            assert column.shape[1:] == tensor.shape[1:], f"{name} is {column.shape[1:]} a row"
            columns.append(column.reshape(len(requests), -1).view(np.int64))
        return np.concatenate(columns, 1)

    def fill_rules(self, requests: Sequence[Request]) -> None:
        """Write penalties, bans and biases of `requests` into their rows; nothing is launched where there are none."""
        for r in requests:
            if r.row is not None and (r.sampling.has_processors or r.row in self.processors.used):
                self.processors.fill(r.row, r.prompt_ids, r.sampling, sorted(r.eos_ids))

    @cached_property
    def columns(self) -> list[torch.Tensor]:
        """What CONSTANTS are written to, in their order."""
        tensors = self.tensors
        return [tensors[name] for name, _ in CONSTANTS]

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """All of it by name."""
        own = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in ("sampling", "processors")}
        return {**own, **self.sampling.tensors, **self.processors.tensors}


@dataclass
class Results:
    """What one launch emitted, still on its way to the host: [n, W+3] int64: tokens, accept_lens, invalid, finished.

    num_read: requests that have their tokens already, counted by whoever hands them out.
    """

    requests: tuple[Request, ...]
    host: torch.Tensor
    ready: torch.cuda.Event | None
    is_round: bool
    num_read: int = 0


class Mailbox:
    """Copies results to the host behind the launches that made them; they are read in order of arrival.

    most: entries of the largest results. Pinned buffers are used again once they are read.
    """

    def __init__(self, device: torch.device, most: int):
        self._device = device
        self._most = most
        self._free: list[tuple[torch.Tensor, torch.cuda.Event]] = []
        self._pending: deque[tuple[Results, torch.Tensor]] = deque()

    def post(self, requests: Sequence[Request], packed: torch.Tensor, is_round: bool) -> None:
        """Start the copy of `packed` [n, W+3], which may be written again right after."""
        if self._device.type != "cuda":
            host = packed.clone()
            self._pending.append((Results(tuple(requests), host, None, is_round), host))
            return
        buffer, ready = self._free.pop() if self._free else self._new_buffer()
        host = buffer[: packed.numel()].view(packed.shape)
        host.copy_(packed, non_blocking=True)
        ready.record()
        self._pending.append((Results(tuple(requests), host, ready, is_round), buffer))

    def take(self, num_left: int) -> Iterator[tuple[Results, list[list[int]]]]:
        """Results and their rows on the host, oldest first, until `num_left` are left; waits for their copies.

        Results count as taken when the next ones are asked for: whoever breaks off gets them again.
        """
        while len(self._pending) > num_left:
            results, buffer = self._pending[0]
            if results.ready is not None:
                results.ready.synchronize()  # the copy of an earlier launch; a later one is already running
            yield results, results.host.tolist()
            self._pending.popleft()
            if results.ready is not None:
                self._free.append((buffer, results.ready))

    @property
    def num_pending(self) -> int:
        """Launches whose results nobody has taken yet."""
        return len(self._pending)

    def clear(self) -> None:
        """Forget everything that has not been taken."""
        self._pending.clear()  # not their buffers: copies may still be on their way there

    def _new_buffer(self) -> tuple[torch.Tensor, torch.cuda.Event]:
        return torch.empty(self._most, dtype=torch.int64, pin_memory=True), torch.cuda.Event()
