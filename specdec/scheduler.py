"""Requests, who runs and who waits. The scheduler owns requests and slot ownership; it touches no model.

The device decides when a request is over (EOS, stop ids, length); the host learns it from the copied results, adds
stop strings, which only text can show, and gives rows and slots back.
"""

import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from specdec.kv_cache import SlotTables
from specdec.metrics import AcceptanceStats
from specdec.sampling import SamplingParams
from specdec.text import Detokenizer


@dataclass(eq=False)
class Request:
    """One prompt on its way. `row` is set while it runs; `num_prefilled` counts prompt tokens already in the cache.

    max_len_bound: host upper bound of L, raised by every launched round, lowered by every read result.
    string_ids: stop ids that stand for stop strings: special tokens.
    failure: the error that ended it, with finish_reason "error"; whoever waits for the request raises it.
    round_lens: tokens that each verify round emitted, after trimming; the engine adds to it as to `acceptance`.
    """

    prompt_ids: list[int]
    max_new_tokens: int
    sampling: SamplingParams
    stop_ids: tuple[int, ...]
    eos_ids: frozenset[int]
    detokenizer: Detokenizer
    string_ids: tuple[int, ...] = ()
    row: int | None = None
    num_prefilled: int = 0
    tokens: list[int] = field(default_factory=list)
    text: str = ""
    finish_reason: str | None = None
    failure: BaseException | None = None
    acceptance: AcceptanceStats = field(default_factory=AcceptanceStats)
    round_lens: list[int] = field(default_factory=list)
    max_len_bound: int = 0
    arrived: float = field(default_factory=time.perf_counter)
    first_token_s: float | None = None
    time_s: float | None = None

    @property
    def is_running(self) -> bool:
        """Whether it holds a row and still wants tokens."""
        return self.row is not None and self.finish_reason is None

    @property
    def is_prefilled(self) -> bool:
        """Whether its whole prompt is in the cache."""
        return self.num_prefilled == len(self.prompt_ids)

    def take(self, tokens: list[int]) -> None:
        """Append emitted `tokens` and their text; set `finish_reason` if they end the request."""
        if self.first_token_s is None:
            self.first_token_s = time.perf_counter() - self.arrived
        for token in tokens:
            self.tokens.append(token)
            self.text += self.detokenizer.feed(token)
            if self.detokenizer.stopped:
                self.finish_reason = "stop_string"
            elif token in self.stop_ids:
                self.finish_reason = self._why_stopped(token)
            elif len(self.tokens) >= self.max_new_tokens:
                self.finish_reason = "length"
            if self.finish_reason:
                self.text += self.detokenizer.finish()
                return

    def _why_stopped(self, token: int) -> str:
        if token in self.eos_ids:
            return "eos"
        return "stop_string" if token in self.string_ids else "stop_id"


class Scheduler:
    """Admits waiting requests in order of arrival while rows and slots last."""

    def __init__(self, slot_tables: SlotTables, tail_reserve: int):
        self.slot_tables = slot_tables
        self.tail_reserve = tail_reserve
        self.refill = max(1, slot_tables.max_batch // 16)
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []

    def slots_needed(self, prompt_len: int, max_new_tokens: int) -> int:
        """KV slots a request reserves: prompt, output, and what a round may write past L."""
        return prompt_len + max_new_tokens + self.tail_reserve

    def add(self, requests: Iterable[Request]) -> None:
        """Queue requests that `check_fits` has let through."""
        self.waiting.extend(requests)

    def admit(self) -> None:
        """Move waiting requests to running, first come first served, while rows and slots last.

        A large batch waits until a sixteenth of its rows is free, so that prefills come in batches too.
        """
        if self.running and self.slot_tables.num_free_rows < min(len(self.waiting), self.refill):
            return
        while self.waiting:
            request = self.waiting[0]
            row = self.slot_tables.try_take(self.slots_needed(len(request.prompt_ids), request.max_new_tokens))
            if row is None:
                return
            request.row = row
            self.running.append(self.waiting.popleft())

    def next_prefill(self, max_tokens: int) -> list[tuple[Request, int]]:
        """Prompt pieces of one prefill forward: (request, number of tokens), `max_tokens` together."""
        pieces: list[tuple[Request, int]] = []
        for request in self.running:
            rest = min(len(request.prompt_ids) - request.num_prefilled, max_tokens)
            if rest > 0 and request.is_running:
                pieces.append((request, rest))
                max_tokens -= rest
        return pieces

    def decoding(self) -> list[Request]:
        """Requests that take part in the next round."""
        return [r for r in self.running if r.is_running and r.is_prefilled]

    def release(self, request: Request) -> None:
        """Give back row and slots of a finished or abandoned request, or forget a waiting one."""
        if request.row is not None:
            self.running.remove(request)
            self.slot_tables.release(request.row)
            request.row = None
        elif request in self.waiting:
            self.waiting.remove(request)
        request.time_s = time.perf_counter() - request.arrived
