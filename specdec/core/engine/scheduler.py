"""The scheduler: owns running and waiting requests, their rows and KV slots; touches no model."""

import math
import time
from bisect import insort
from collections import deque
from collections.abc import Iterable, Sequence

from specdec.core.cache.tables import SlotTables
from specdec.core.engine.request import Request
from specdec.core.engine.sharing import Sharing

GROWTH = 64  # slots that a request gets beyond those it needs now, at most


class Scheduler:
    """Admits waiting requests by priority, then in order of arrival, while rows and KV slots last.

    A request has slots for its text, for writes of rounds in flight, and up to `GROWTH` more. If none are left for a
    round, the last request in that order is preempted: it waits again, and its text is prefilled again later.

    `running` lists the requests that hold a row; `repair` recomputes from it whatever is lost or doubled elsewhere. The
    first `max_batch` of them decode; others, in that order, are prefilled and take over where one ends.
    sharing: what of their prompts' K/V is there when they are admitted; looks_ahead: see `Sharing`.
    """

    def __init__(self, slot_tables: SlotTables, tail_reserve: int, max_batch: int, looks_ahead: int = 0):
        self.slot_tables = slot_tables
        self.tail_reserve = tail_reserve
        self.sharing = Sharing(slot_tables, looks_ahead)
        self.max_batch = max_batch
        self.refill = max(1, (slot_tables.max_running - max_batch) * 3 // 4)
        self._num_added = 0
        self._has_deadlines = False
        self.preemption = {"preemptions": 0, "recomputed_tokens": 0}
        self._is_full = False  # the first in the queue found no pages, and none has been released since
        self._are_prefilled = True  # all that run
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.admitted: list[Request] = []  # of `running`, whose constants are not on the device yet

    def slots_needed(self, prompt_len: int, max_new_tokens: int) -> int:
        """Return the KV slots for prompt, output, and the tail that a round may write past L."""
        return prompt_len + max_new_tokens + self.tail_reserve

    @property
    def longest_request(self) -> int:
        """Most tokens, prompt and output, of a request that could run alone."""
        return self.slot_tables.most_tokens - self.tail_reserve

    def add(self, requests: Iterable[Request]) -> None:
        """Queue requests that have passed `check_fits`."""
        now = time.perf_counter()
        for request in requests:
            request.arrived = now
            self._has_deadlines |= request.deadline is not None
            self._num_added += 1
            request.place = (-request.priority, self._num_added)
            self._queue(request)

    def _queue(self, request: Request) -> None:
        if self.waiting and request.place < self.waiting[-1].place:
            insort(self.waiting, request, key=lambda r: r.place)
        else:
            self.waiting.append(request)
        self._is_full = False

    @property
    def may_admit(self) -> bool:
        """Return whether requests wait and rows are free for them. Where prompts are prefilled ahead, they come in
        groups of three quarters of the rows for that, unless the first has priority over the last that runs; as many
        requests as may decode do meanwhile."""
        if not self.waiting or (self._is_full and self.running):
            return False
        is_urgent = not self.running or self.waiting[0].priority > self.running[-1].priority
        least = 1 if is_urgent else min(len(self.waiting), self.refill)
        return self.slot_tables.num_free_rows >= least

    def admit(self) -> None:
        """Move waiting requests to running while rows and slots last, if it `may_admit`; those that would rather wait
        for K/V that is being written let others pass."""
        if not self.may_admit:
            return
        num_passed = 0
        needs = [self._most_slots(r) - self.slot_tables.num_slots(r.row) for r in self.running if r.row is not None]
        growing = sum(map(self.slot_tables.pages_for, needs))
        while num_passed < min(len(self.waiting), self.slot_tables.max_running) and self.slot_tables.num_free_rows:
            request = self.waiting[num_passed]
            request.restart()
            pages = self.sharing.cached(request)
            num_cached = len(pages) * self.slot_tables.page_size
            if self.sharing.has_more_soon(request, num_cached):
                num_passed += 1
                continue
            most = self._most_slots(request)
            need = min(self.slots_needed(request.num_to_prefill, GROWTH), most)
            row = self.slot_tables.reserve(need, pages, min(growing, self.slot_tables.num_pages // 100))
            if row is None:
                self._is_full = True
                return
            request.begin(row, num_cached)
            self._note_slots(request)
            growing += self.slot_tables.pages_for(most - need)
            self.preemption["recomputed_tokens"] += (request.num_to_prefill - num_cached) * bool(request.num_preempted)
            self.admitted.append(request)
            self._are_prefilled = False
            # from here on it owns the row, whatever happens; see `repair`
            insort(self.running, request, lo=self.max_batch, key=lambda r: r.place)
            del self.waiting[num_passed]
            self.sharing.begin(request)

    def _most_slots(self, request: Request) -> int:
        return self.slots_needed(len(request.prompt_ids), request.max_new_tokens)

    def grow(self, requests: Sequence[Request], ahead: int) -> bool:
        """Allocate slots for all that a round of running `requests` may write, and spare ones while there are. Returns
        False, with nothing changed, if too few are free. ahead: tokens in flight that they may have emitted."""
        if all([len(r.tokens) + ahead <= r.num_covered for r in requests]):
            return True
        for more in (GROWTH, 0):  # all that will need more soon, so that it is seldom done
            wanted: dict[int, int] = {}
            for r in requests:
                assert r.row is not None
                need = self.slots_needed(len(r.prompt_ids) + len(r.tokens) - 1, ahead) + more
                wanted[r.row] = min(need, self._most_slots(r))
            slots_of = self.slot_tables.num_slots
            if self.slot_tables.grow({row: n for row, n in wanted.items() if n > slots_of(row)}):
                for r in requests:
                    self._note_slots(r)
                return True
        return False

    def _note_slots(self, request: Request) -> None:
        """Note up to how many tokens the slots of a running request last."""
        assert request.row is not None
        slots = self.slot_tables.num_slots(request.row)
        covered = slots - self.slots_needed(len(request.prompt_ids) - 1, 0)
        request.num_covered = math.inf if slots >= self._most_slots(request) else covered

    def preempt(self) -> None:
        """Put the last running request in the order of admission back in the queue, with what it has emitted.

        If it runs alone, clear the prefix cache instead: pages of another copy of its beginning cannot be evicted.
        """
        if len(self.running) == 1 and self.slot_tables.prefixes.num_pages:
            self.slot_tables.prefixes.clear()
            return
        request = max(self.running, key=lambda r: r.place)
        assert len(self.running) > 1 and request.row is not None, "a request does not fit alone"
        self._queue(request)  # first: one that is in both runs, see `repair`
        self._leave(request)
        request.num_preempted += 1
        self.preemption["preemptions"] += 1

    @property
    def is_mixed(self) -> bool:
        """Return whether an earlier request decodes while a later one's prompt is still to be prefilled."""
        arrivals = [r.arrived for r in self.running if not r.is_prefilled and r.finish_reason is None]
        return bool(arrivals) and any(r.arrived < max(arrivals) for r in self.decoding())

    def next_prefill(self, max_tokens: int) -> list[tuple[Request, int]]:
        """Return the prompt pieces of one prefill forward: (request, number of tokens), at most `max_tokens` in all,
        of `max_batch` requests at most.

        First come, first served; where not all fit, prompts that half of it holds come first. Pieces that end their
        prompts are the first in the list. All have images, or none; an image that is seen as a whole is not cut.
        """
        if self._are_prefilled:
            return []
        waiting = [r for r in self.running if r.num_prefilled < r.num_to_prefill and r.finish_reason is None]
        rests = {r: r.num_to_stop for r in waiting}
        self._are_prefilled = not waiting
        waiting = [r for r in waiting if (r.embedded is None) == (waiting[0].embedded is None)]
        left = max_tokens // 2 if sum(rests.values()) > max_tokens else 0
        short: dict[Request, None] = {}
        for request in waiting[1:]:
            if rests[request] <= left:
                short[request] = None
                left -= rests[request]
        pieces: list[tuple[Request, int]] = []
        for request in (*short, *(r for r in waiting if r not in short)):
            has_room = max_tokens > 0 and len(pieces) < self.max_batch
            if has_room and (num := request.piece(max_tokens, is_first=not pieces)):
                pieces.append((request, num))
                max_tokens -= num
        return sorted(pieces, key=lambda piece: piece[0].num_prefilled + piece[1] < piece[0].num_to_prefill)

    def decoding(self) -> list[Request]:
        """Return the requests of the next round: not those whose last token is already on its way."""
        going = [r for r in self.running if r.finish_reason is None and r.num_certain < r.max_new_tokens]
        return (going if self._are_prefilled else [r for r in going if r.is_prefilled])[: self.max_batch]

    def release(self, request: Request) -> None:
        """Free row and slots of a finished or abandoned request, or drop a waiting one."""
        if request in self.running:
            self._leave(request)
        elif request in self.waiting:
            self.waiting.remove(request)
            self._is_full = False
        request.time_s, request.embedded = time.perf_counter() - request.arrived, None

    def _leave(self, request: Request) -> None:
        """Free row and slots of a running request; its K/V may stay for others, or for itself."""
        self.running.remove(request)
        if request in self.admitted:
            self.admitted.remove(request)
        if request.tokens and request.is_prefilled and request.finish_reason != "error":
            self.sharing.keep(request)
        row, request.row = request.row, None
        assert row is not None
        self.slot_tables.release(row)
        self._is_full = False

    def forget_prefixes(self) -> None:
        """Empty the prefix cache, and cache no K/V of running requests."""
        self.slot_tables.prefixes.clear()
        for request in self.running:
            request.is_kept = False

    def end_late(self) -> None:
        """End requests whose deadline has passed, with what they have."""
        now = time.perf_counter()
        for request in [*self.running, *self.waiting] if self._has_deadlines else ():
            if request.deadline is not None and now - request.arrived >= request.deadline:
                request.finish_reason = "deadline"
                self.release(request)
                request.notify()

    def fail(self, requests: Sequence[Request], error: BaseException) -> None:
        """End `requests` with `error`, which their callers will raise; finished ones keep their finish_reason."""
        for request in requests:
            if request.finish_reason is None:
                request.failure, request.finish_reason = error, "error"
            try:
                self.release(request)
            finally:
                request.notify()

    def repair(self) -> None:
        """Make all state agree with `running` again after a turn that an exception ended."""
        self.running = [r for r in dict.fromkeys(self.running) if r.finish_reason is None and r.row is not None]
        self.admitted = [r for r in self.running if r in self.admitted]
        self.waiting = deque(r for r in self.waiting if r not in self.running)
        self._is_full, self._are_prefilled = False, False
        for request in self.waiting:
            request.row = None
        self.slot_tables.repair([r.row for r in self.running if r.row is not None])
