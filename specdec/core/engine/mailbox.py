"""Mailbox for the results of rounds: copies to pinned host memory, queued behind the launches that made them."""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch

from specdec.core.engine.request import Request
from specdec.core.engine.tiers import Played


@dataclass
class Results:
    """Results of one launch, being copied to the host: [n, W+3] int64: tokens, accept_lens, invalid, finished.

    played: the round, None for first tokens. is_masked: whether grammars, if any, masked the logits. num_read: requests
    whose tokens are handed out; lens: tokens that each of them took in a round. The caller that hands out sets both.
    """

    requests: tuple[Request, ...]
    host: torch.Tensor
    ready: torch.cuda.Event | None
    played: Played | None
    is_masked: bool
    num_read: int = 0
    lens: list[int] = field(default_factory=list)


class Mailbox:
    """Copies results to pinned host memory behind the launches that made them; they are read in order of arrival.

    most: elements of the largest results. Buffers are reused once read. mail: see `RoundOps`. wait: waits for a CUDA
    event.
    """

    wait: Callable[[torch.cuda.Event], None] = staticmethod(lambda event: event.synchronize())

    def __init__(self, device: torch.device, most: int, mail: Callable[[torch.Tensor, torch.Tensor], None]):
        self._device = device
        self._most = most
        self._mail = mail
        self._free: list[tuple[torch.Tensor, torch.cuda.Event]] = []
        self._pending: deque[tuple[Results, torch.Tensor]] = deque()

    def post(
        self, requests: Sequence[Request], packed: torch.Tensor, played: Played | None, is_masked: bool = True
    ) -> None:
        """Start the copy of `packed` [n, W+3], which may be overwritten right after the call."""
        if self._device.type != "cuda":
            host = packed.clone()
            self._pending.append((Results(tuple(requests), host, None, played, is_masked), host))
            return
        buffer, ready = self._free.pop() if self._free else self._new_buffer()
        host = buffer[: packed.numel()].view(packed.shape)
        self._mail(packed, host)
        ready.record()
        self._pending.append((Results(tuple(requests), host, ready, played, is_masked), buffer))

    def warm_up(self) -> None:
        """Compile what copies results, or load it."""
        if self._device.type == "cuda":
            buffer, _ = self._new_buffer()
            self._mail(torch.zeros(1, dtype=torch.int64, device=self._device), buffer[:1])

    def take(self, num_left: int) -> Iterator[tuple[Results, list[list[int]]]]:
        """Yield results and their rows on the host, oldest first, until `num_left` are left; waits for their copies.

        Results count as taken when the next ones are requested: a caller that stops early gets them again.
        """
        while len(self._pending) > num_left:
            results, buffer = self._pending[0]
            if results.ready is not None:
                self.wait(results.ready)  # the copy of an earlier launch; a later one is already running
            yield results, results.host.tolist()
            self._pending.popleft()
            if results.ready is not None:
                self._free.append((buffer, results.ready))

    @property
    def num_pending(self) -> int:
        """Number of launches whose results have not been taken yet."""
        return len(self._pending)

    def clear(self) -> None:
        """Drop all results that have not been taken."""
        self._pending.clear()  # buffers are not reused: copies may still be writing to them

    def _new_buffer(self) -> tuple[torch.Tensor, torch.cuda.Event]:
        return torch.empty(self._most, dtype=torch.int64, device="cpu", pin_memory=True), torch.cuda.Event()
