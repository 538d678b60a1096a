"""Requests and the scheduler, which owns running and waiting requests and their slots; it touches no model.

The device decides when a request is finished (EOS, stop ids, length); the host learns it from the copied results, adds
stop strings, which only text can show, and frees rows and slots.
"""

import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from specdec.functional.sampling import SamplingParams
from specdec.kv_cache import SlotTables
from specdec.metrics import AcceptanceStats
from specdec.outputs import TokenLogprob
from specdec.text.detokenizer import Detokenizer


@dataclass(eq=False)
class Request:
    """One prompt being served; `prompt` [T+1] int64 is a copy of its ids with a 0 behind them, for prefills.

    row: set while it runs; num_prefilled: prompt tokens already in the cache.
    num_certain: least number of tokens it will have emitted once everything launched for it has come back.
    string_ids: stop ids that stand for stop strings: special tokens.
    failure: the error that ended it, with finish_reason "error"; the caller that waits for the request raises it.
    round_lens: tokens that each verify round emitted, after trimming; the engine updates it along with `acceptance`.
    logprobs: of each of `tokens`; None if the engine does not compute them.
    arrived: when it was queued (`Scheduler.add`), seconds; first_token_s and time_s count from there.
    """

    prompt_ids: list[int]
    prompt: np.ndarray
    max_new_tokens: int
    sampling: SamplingParams
    stop_ids: tuple[int, ...]
    eos_ids: frozenset[int]
    detokenizer: Detokenizer
    string_ids: tuple[int, ...] = ()
    row: int | None = None
    num_prefilled: int = 0
    num_certain: int = 0
    tokens: list[int] = field(default_factory=list)
    pieces: list[str] = field(default_factory=list)
    finish_reason: str | None = None
    failure: BaseException | None = None
    acceptance: AcceptanceStats = field(default_factory=AcceptanceStats)
    round_lens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] | None = None
    arrived: float = 0.0
    first_token_s: float | None = None
    time_s: float | None = None
    _num_read: int = 0
    _text: str | None = None

    @property
    def is_running(self) -> bool:
        """True while it holds a row and is not finished."""
        return self.row is not None and self.finish_reason is None

    @property
    def is_prefilled(self) -> bool:
        """True once its whole prompt is in the cache."""
        return self.num_prefilled == len(self.prompt_ids)

    def take(self, tokens: list[int], logprobs: Sequence[TokenLogprob] = ()) -> None:
        """Append emitted `tokens` and their `logprobs`; set `finish_reason` if they end the request.

        The device has cut them at stop ids and at the length. Text is decoded here only if there are stop strings.
        """
        if self.first_token_s is None:
            self.first_token_s = time.perf_counter() - self.arrived
        self.tokens += tokens
        if self.logprobs is not None:
            self.logprobs += logprobs
        reason = None
        if tokens[-1] in self.stop_ids:
            reason = self._why_stopped(tokens[-1])
        elif len(self.tokens) >= self.max_new_tokens:
            reason = "length"
        if self.detokenizer.stop_strings:
            self.pieces.append(self.detokenizer.feed(tokens))
            if reason is not None:
                self.pieces.append(self.detokenizer.finish())
            if self.detokenizer.stopped:
                for kept in (self.tokens, self.logprobs or []):
                    del kept[self.detokenizer.num_fed :]  # what came after the stop string in one round
                reason = "stop_string"
        self.finish_reason = reason  # last: a thread that reads text takes it for complete then

    def read(self) -> str:
        """Return the text that has become certain since the last call; all the rest once the request is finished."""
        is_over = self.finish_reason is not None
        self._catch_up(is_over)
        text = "".join(self.pieces[self._num_read :])
        self._num_read = len(self.pieces)
        return text

    def decode(self) -> str:
        """Return the text of a finished request; it is decoded in one go, unless parts were needed before, and kept."""
        if self._text is None and self.pieces:
            self._catch_up(is_over=True)
            self._text = "".join(self.pieces)
        elif self._text is None:
            self._text = self.detokenizer.decode(self.tokens)
        return self._text

    def _catch_up(self, is_over: bool) -> None:
        """Decode tokens that have not been decoded. With stop strings `take` does that, unless an error ended the
        request."""
        if self.detokenizer.stop_strings and not is_over:
            return
        tokens = self.tokens[self.detokenizer.num_fed :]
        if tokens:
            self.pieces.append(self.detokenizer.feed(tokens))
        if is_over:
            self.pieces.append(self.detokenizer.finish())

    def _why_stopped(self, token: int) -> str:
        if token in self.eos_ids:
            return "eos"
        return "stop_string" if token in self.string_ids else "stop_id"


class Scheduler:
    """Admits waiting requests in order of arrival while rows and slots last.

    `running` lists the requests that hold a row; `repair` recomputes from it whatever is lost or doubled elsewhere.
    """

    def __init__(self, slot_tables: SlotTables, tail_reserve: int):
        self.slot_tables = slot_tables
        self.tail_reserve = tail_reserve
        self.refill = max(1, slot_tables.max_batch // 16)
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.admitted: list[Request] = []  # of `running`, whose constants are not on the device yet

    def slots_needed(self, prompt_len: int, max_new_tokens: int) -> int:
        """Return the KV slots a request reserves: prompt, output, and what a round may write past L."""
        return prompt_len + max_new_tokens + self.tail_reserve

    @property
    def longest_request(self) -> int:
        """The most tokens, prompt and output, of a request that could run alone."""
        return self.slot_tables.most_tokens - self.tail_reserve

    def add(self, requests: Iterable[Request]) -> None:
        """Queue requests that have passed `check_fits`."""
        now = time.perf_counter()
        for request in requests:
            request.arrived = now
            self.waiting.append(request)

    def admit(self) -> None:
        """Move waiting requests to running, first come first served, while rows and slots last.

        A large batch waits until a sixteenth of its rows is free, so that prefills come in batches too.
        """
        if self.running and self.slot_tables.num_free_rows < min(len(self.waiting), self.refill):
            return
        while self.waiting:
            request = self.waiting[0]
            row = self.slot_tables.reserve(self.slots_needed(len(request.prompt_ids), request.max_new_tokens))
            if row is None:
                return
            request.row = row
            self.admitted.append(request)
            self.running.append(request)  # from here on it owns the row, whatever happens; see `repair`
            self.waiting.popleft()

    @property
    def is_mixed(self) -> bool:
        """Whether requests decode that came before one whose prompt is still to be prefilled."""
        arrivals = [r.arrived for r in self.running if not r.is_prefilled and r.finish_reason is None]
        return bool(arrivals) and any(r.arrived < max(arrivals) for r in self.decoding())

    def next_prefill(self, max_tokens: int) -> list[tuple[Request, int]]:
        """Return the prompt pieces of one prefill forward: (request, number of tokens), at most `max_tokens` in all."""
        pieces: list[tuple[Request, int]] = []
        for request in self.running:
            rest = len(request.prompt_ids) - request.num_prefilled
            if rest and max_tokens and request.finish_reason is None:
                pieces.append((request, min(rest, max_tokens)))
                max_tokens -= pieces[-1][1]
        return pieces

    def decoding(self) -> list[Request]:
        """Return the requests of the next round: not those whose last token is already on its way."""
        return [
            r
            for r in self.running
            if r.finish_reason is None and r.num_certain < r.max_new_tokens and r.num_prefilled == len(r.prompt_ids)
        ]

    def release(self, request: Request) -> None:
        """Free row and slots of a finished or abandoned request, or drop a waiting one."""
        if request in self.running:
            self.running.remove(request)
            if request in self.admitted:
                self.admitted.remove(request)
            row, request.row = request.row, None
            assert row is not None
            self.slot_tables.release(row)
        elif request in self.waiting:
            self.waiting.remove(request)
        request.time_s = time.perf_counter() - request.arrived

    def fail(self, requests: Sequence[Request], error: BaseException) -> None:
        """End `requests` with `error`, which their callers will raise; finished ones keep their finish_reason."""
        for request in requests:
            if request.finish_reason is None:
                request.failure, request.finish_reason = error, "error"
            self.release(request)

    def repair(self) -> None:
        """Make all state agree with `running` again after a turn that an exception ended."""
        self.running = [r for r in dict.fromkeys(self.running) if r.finish_reason is None and r.row is not None]
        self.admitted = [r for r in self.running if r in self.admitted]
        self.waiting = deque(r for r in self.waiting if r not in self.running)
        for request in self.waiting:
            request.row = None
        self.slot_tables.repair([r.row for r in self.running if r.row is not None])
