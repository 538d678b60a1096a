"""Device state of running requests, by row, and the host's mailbox for what rounds emit."""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields

import torch

from specdec.batch import ints_to_device
from specdec.processors import ProcessorState
from specdec.sampling import SamplingBatch, SamplingParams
from specdec.scheduler import Request

MAX_STOP_IDS = 16


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

    def fill(self, row: int, request: Request) -> None:
        """Write a new request's constants into its row."""
        stops = [*request.stop_ids, *[-1] * (MAX_STOP_IDS - len(request.stop_ids))]
        self.stop_ids[row] = ints_to_device(stops, self.stop_ids.device)
        self.seq_lens[row] = len(request.prompt_ids)
        self.remaining[row] = request.max_new_tokens
        self.sampling.fill(row, request.sampling)
        self.processors.fill(row, request.prompt_ids, request.sampling, sorted(request.eos_ids))

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """All of it by name."""
        own = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in ("sampling", "processors")}
        return {**own, **self.sampling.tensors, **self.processors.tensors}


@dataclass(frozen=True)
class Results:
    """What one launch emitted, still on its way to the host: [n, W+3] int64: tokens, accept_lens, invalid, finished."""

    requests: tuple[Request, ...]
    host: torch.Tensor
    ready: torch.cuda.Event | None
    is_round: bool


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
        """Results and their rows on the host, oldest first, until `num_left` are left; waits for their copies."""
        while len(self._pending) > num_left:
            results, buffer = self._pending.popleft()
            if results.ready is not None:
                results.ready.synchronize()  # the copy of an earlier launch; a later one is already running
                self._free.append((buffer, results.ready))
            yield results, results.host.tolist()

    def clear(self) -> None:
        """Forget everything that has not been taken."""
        self._pending.clear()  # not their buffers: copies may still be on their way there

    def _new_buffer(self) -> tuple[torch.Tensor, torch.cuda.Event]:
        return torch.empty(self._most, dtype=torch.int64, pin_memory=True), torch.cuda.Event()
