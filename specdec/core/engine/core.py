"""The engine's host side: who prefills, who plays a round, and what came back.

    step():  admit → prefill or round (draft → verify → accept → commit → extend) → hand out what has arrived

While earlier requests decode, prompts are prefilled in small pieces, a round after each.

The scheduler owns requests, `Round` the device program, `RoundGraphs` its graphs; the engine knows token ids only. On
CUDA the host runs one launch ahead: it launches round r+1 before it reads what round r emitted. Threads take turns.
"""

import warnings
import weakref
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from specdec.core.batch import ForwardMode, on_device, refuse_autocast
from specdec.core.engine.calls import Call, Calls, Waits
from specdec.core.engine.mailbox import Mailbox, Results
from specdec.core.engine.packing import (
    copy_to,
    pack_chunk,
    pack_piece,
    pack_requests,
    rewrite_row,
    write_history,
    write_requests,
    write_texts,
)
from specdec.core.engine.request import Request
from specdec.core.engine.scheduler import Scheduler
from specdec.core.engine.turns import Turns
from specdec.core.errors import DetachedError, GraphError
from specdec.core.functional.results import first_tokens, line_width, unpack
from specdec.core.functional.sampling import SamplingKind
from specdec.core.metrics import AcceptanceStats
from specdec.core.prefill.graphs import PrefillGraphs
from specdec.core.round.graphs import RoundGraphs
from specdec.core.round.parts import Parts
from specdec.core.round.program import Round
from specdec.graphs.pool import GraphPool

DETACHED = "this engine was detached from its model; call specdec.attach() for a new one"
PREFIX_STEP = 32  # host bounds of L are rounded up to this, so that shapes of eager rounds seldom change


class Core:
    """The stepping machine behind `Engine`."""

    def __init__(self, parts: Parts):
        target, config, device = parts.target, parts.config, parts.target.device
        self.target = target
        self.config = config
        self.counters = parts.counters
        self.slot_tables = parts.tables
        self.scheduler = Scheduler(parts.tables, config.tail_reserve, parts.worker.looks_ahead)
        self.state = parts.state
        self.device = device
        self.context = parts.context
        self.round = Round(parts)
        rewrite_row(parts.state, parts.tables, parts.ops, config.dummy_row)
        graph_pool = GraphPool(device) if device.type == "cuda" else None
        self.models = parts.models
        self.models.compile()
        self.prefill = PrefillGraphs(parts, self.round, graph_pool, self.models.prefill_mode)
        self.graphs = RoundGraphs(self.round, parts, graph_pool)
        width = line_width(config.num_steps + 1, config.logprobs, config.digests)
        self._mailbox = Mailbox(device, most=config.max_batch * width)
        self._batch = StepBatch([], torch.empty(0, device=device), SamplingKind.GREEDY)
        self.acceptance = AcceptanceStats()  # of all requests, also those that others step or abandon
        self._lag = 1 if device.type == "cuda" else 0  # launches the host may run ahead of its reading
        self._owes_round = False  # whether the last step was a prefill
        self._is_launching = False  # whether the state of running requests may be half written
        self.is_closed = False
        core = weakref.ref(self)  # no cycle: pools are freed with the last reference, not by some later collection
        self.calls = Calls()
        self.turns = Turns(lambda error: core()._repair(error))  # type: ignore[union-attr]
        runners = (*self.prefill.runners, *self.graphs.runners.values())
        self.models.share(self.turns, is_baked=any(runner.captured for runner in runners))

    def submit(self, requests: Sequence[Request]) -> None:
        """Queue checked requests; DetachedError once the core is closed, GraphError for a change of the
        models that it cannot follow, ValueError within autocast."""
        refuse_autocast(self.device)
        with self.turns:
            self._require_open()
            self._follow_weights()
            self.scheduler.add(requests)

    @torch.inference_mode()
    def step(self, caller: Waits | None = None) -> None:
        """Launch a prefill or a round, hand out the results of the launches that have come back, and wake who waits for
        them.

        Does nothing if `caller` has news: another thread may have stepped meanwhile. What goes wrong before or after a
        launch ends the request at fault, if any; a launch that breaks off has left the state of all running requests
        half written, and ends them. The engine can serve the next ones.
        """
        try:
            with self.turns:
                self._require_open()
                if caller is None or not caller.has_news:
                    with on_device(self.device):
                        self._admit()  # looks for changes of the models, so before a step replaces forwards
                        with self.models.stepping():
                            self._step()
                        # nobody would ever end requests that are in no queue, and their caller would wait for ever
                        is_idle = not self.scheduler.running and not self.scheduler.waiting
                        assert not is_idle or caller is None or caller.has_news, "a request was lost"
        finally:
            self.calls.wake()

    def call(self, requests: Sequence[Request], wants_tokens: bool = True) -> Call:
        """Return what waits for `requests`, which are not queued yet; with `wants_tokens` for their tokens, too."""
        return Call(self.calls, requests, wants_tokens)

    def collect(self, caller: Waits) -> None:
        """Return as soon as `caller` has news: step for all, or sleep while another thread does."""
        self.calls.collect(caller, lambda: self.step(caller), may_sleep=not self.turns.is_mine)

    @property
    def has_work(self) -> bool:
        """Return whether requests wait or run, or results are on their way."""
        with self.turns:
            return bool(self.scheduler.waiting or self.scheduler.running or self._mailbox.num_pending)

    def served_by(self, mode: ForwardMode) -> str:
        """The kernels that attend in forwards of `mode`: the draft's backend in its own, the target's in the others."""
        own = self.round.worker.context if mode in (ForwardMode.DRAFT, ForwardMode.DRAFT_EXTEND) else None
        return (own or self.context).backend.served_by(mode)

    def abandon(self, requests: Sequence[Request]) -> None:
        """Forget `requests`, whatever they are at; their rows and slots return."""
        with self.turns:
            for request in requests:
                self.scheduler.release(request)

    def clear_prefixes(self) -> None:
        """Serve no later request with what is kept now: what `Engine.clear_prefix_cache` does."""
        self.forget_prefixes()

    def forget_prefixes(self) -> None:
        """Keep no K/V of what was served, or is being served, for other requests."""
        with self.turns:
            self.slot_tables.prefixes.clear()
            for request in self.scheduler.running:
                request.is_kept = False

    def close(self) -> None:
        """End what runs, take our marks off the model, and wait for what is on its way: one round may be."""
        with self.turns:
            self.is_closed = True
            self.models.close()
            try:
                self.target.detach()
            finally:
                self.round.worker.close()
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)

    def _require_open(self) -> None:
        if self.is_closed:
            raise DetachedError(DETACHED)

    def _follow_weights(self) -> None:
        """Keep no K/V of models as they were; GraphError for changes that cannot be followed."""
        if self.models.follow():
            self.forget_prefixes()

    def _step(self) -> None:
        if self.scheduler.admitted:
            self._fill()
        pieces = self._next_prefill()
        has_posted = False
        if pieces:
            has_posted = self._prefill(pieces)
        elif decoding := self._ready():
            self._round(decoding)
            has_posted = True
        self._owes_round = bool(pieces)
        self._read_results(self._lag if has_posted else 0)

    def _ready(self) -> list[Request]:
        """Return who plays the next round, with slots for all that it may write; where there are none, the last
        requests in the order of admission are preempted."""
        requests, ahead = self.scheduler.decoding(), self._mailbox.num_pending * (self.config.num_steps + 1)
        while not self.scheduler.grow(requests, ahead):
            if self._mailbox.num_pending:  # some may have ended, and how long the others are is known then
                self._read_results(0)
            else:
                self.scheduler.preempt()
                self._batch = self._batch._replace(requests=[])  # it will be in another row
            requests, ahead = self.scheduler.decoding(), 0
        return requests

    def _read_results(self, num_left: int) -> None:
        """Hand out results, oldest first, until those of `num_left` launches are left."""
        for results, rows in self._mailbox.take(num_left):
            self._hand_out(results, rows)

    def _admit(self) -> None:
        """Admit waiting requests; the models may have changed since they came."""
        if self.scheduler.may_admit:
            try:
                self._follow_weights()
            except GraphError as error:
                self.scheduler.fail(list(self.scheduler.waiting), error)
            self.scheduler.admit()

    def _next_prefill(self) -> list[tuple[Request, int]]:
        """Prompt pieces to prefill now; fewer at a time, a round after each, while earlier requests decode."""
        most = self.config.max_prefill_tokens
        pieces = self.scheduler.next_prefill(most)
        if not pieces or not self.scheduler.is_mixed:
            return pieces
        return [] if self._owes_round else self.scheduler.next_prefill(min(most, self.config.mixed_prefill_tokens))

    def _repair(self, error: BaseException) -> None:
        """Restore order after `error` has ended a turn: a launch that it broke off ends all running requests."""
        if self._is_launching:
            self._mailbox.clear()
            self.scheduler.fail(list(self.scheduler.running), _failure_of(error))
            self._is_launching = False
        self.scheduler.repair()

    def _fill(self) -> None:
        """Tell the device of newly admitted requests."""
        try:
            constants = pack_requests(self.scheduler.admitted)
        except Exception as error:  # admission checks arguments, so there should be none; the others go on
            self.scheduler.fail(list(self.scheduler.admitted), error)
            return
        write_requests(self.state, self.slot_tables, self.scheduler.admitted, constants, self.round.ops)
        if self.round.worker.reads_history:
            write_history(self.state, self.scheduler.admitted)
        write_texts(self.state, self.scheduler.admitted)
        self.scheduler.admitted = []

    def _prefill(self, pieces: list[tuple[Request, int]]) -> bool:
        """Prefill prompt pieces, target and draft, and draw the first token of every prompt that is complete, but of
        texts that go on.

        Returns whether there are such tokens.
        """
        done = [i for i, (r, n) in enumerate(pieces) if r.num_prefilled + n == r.num_to_prefill]
        finished = [pieces[i][0] for i in done]
        new = [r for r in finished if not r.tokens]
        kind = SamplingKind.of(r.sampling for r in new) if new else SamplingKind.GREEDY
        whole, num_tokens = self.prefill.whole, sum(n for _, n in pieces)
        if (
            whole is not None
            and new == finished
            and whole.takes(kind, [r.num_prefilled for r, _ in pieces], num_tokens)
        ):
            packed = [pack_piece(r, n) for r, n in pieces]
            self._begin_launch(pieces)
            lines = whole(kind, packed)
            assert done == list(range(len(done))), "only the last piece can be a part of its prompt"
            if done:
                self._post(finished, lines[: len(done)], is_round=False)
        else:
            self._prefill_in_parts(pieces, done, kind)
        self._is_launching = False
        for request in finished:
            self.scheduler.sharing.keep(request)
        return bool(new)

    def _begin_launch(self, pieces: list[tuple[Request, int]]) -> None:
        """From here on the state of running requests may be half written."""
        self._is_launching = True
        for request, n in pieces:
            request.num_prefilled += n

    def _prefill_in_parts(self, pieces: list[tuple[Request, int]], done: list[int], kind: SamplingKind) -> None:
        """Target, first tokens of the pieces `done`, draft: a runner each."""
        builder = self.context.backend.metadata
        chunk = pack_chunk(pieces, self.slot_tables.table, builder, self.prefill.placement)
        self._begin_launch(pieces)
        worker = self.round.worker
        if worker.reads_history:
            self.round.take_prompts(chunk)
        hidden, aux = self.prefill.target(chunk.metadata, chunk.ids)
        new = [i for i in done if not pieces[i][0].tokens]
        if new:
            places = self._places(new, len(pieces))
            rows, last_rows = chunk.rows[places], chunk.last_rows[places]
            packed = self.graphs.first_tokens(kind, rows, hidden.index_select(0, last_rows))
            self._post([pieces[i][0] for i in new], packed, is_round=False)
            chunk.next_ids.index_copy_(0, last_rows, first_tokens(packed))
        states = None
        if worker.context is not None:
            states = self.prefill.draft(chunk.metadata, chunk.next_ids if worker.id_shift else chunk.ids, aux)
        states = worker.finish_prefill(chunk, states, self.prefill.draft)
        if done and worker.has_begin:
            places, bound = self._places(done, len(pieces)), self._len_bound([pieces[i][0] for i in done])
            self.graphs.begin(chunk.rows[places], None if states is None else states[places], bound)

    def _places(self, chosen: list[int], count: int) -> slice | torch.Tensor:
        """Return the index of those `chosen` of `count` requests."""
        return slice(None) if len(chosen) == count else copy_to(self.device, np.array(chosen))

    def _round(self, requests: list[Request]) -> None:
        """One round of all `requests`; the host learns a launch later what it emitted."""
        batch = self._batch_of(requests)
        bound = self._len_bound(requests)
        self._is_launching = True
        packed = self.graphs.play(batch.kind, batch.rows, bound)
        self._post(requests, packed, is_round=True)
        self._is_launching = False
        self.scheduler.note_round()

    def _len_bound(self, requests: list[Request]) -> int:
        """A host bound of L of all `requests`, what launches on their way may have emitted included."""
        most = self._mailbox.num_pending * (self.config.num_steps + 1)
        longest = max([len(r.prompt_ids) + len(r.tokens) for r in requests]) - 1 + most
        return min(-(-longest // PREFIX_STEP) * PREFIX_STEP, self.slot_tables.table.shape[1])

    def _batch_of(self, requests: list[Request]) -> "StepBatch":
        """Return who plays a round; copied to the device only where it is not who played the last one."""
        if requests != self._batch.requests:
            rows = copy_to(self.device, np.array([r.row for r in requests], dtype=np.int64))
            self._batch = StepBatch(requests, rows, SamplingKind.of(r.sampling for r in requests))
        return self._batch

    def _post(self, requests: list[Request], packed: torch.Tensor, is_round: bool) -> None:
        """Send results on their way to the host; every request in them will have one token more, or be over."""
        self._mailbox.post(requests, packed, is_round)
        for request in requests:
            request.num_certain += 1

    def _hand_out(self, results: Results, rows: list[list[int]]) -> None:
        """Hand arrived tokens to their requests; finished ones give back rows and slots."""
        for i in range(results.num_read, len(rows)):
            request = results.requests[i]
            results.num_read = i + 1  # first: whatever goes wrong with this one, it does not come twice
            try:
                if request.finish_reason is None and request.row is not None:
                    self._hand_over_or_end(request, rows[i], results.is_round)
                if request.finish_reason is not None and request.row is not None:
                    self.scheduler.release(request)
            finally:
                request.notify()

    def _hand_over_or_end(self, request: Request, row: list[int], is_round: bool) -> None:
        try:
            self._hand_over(request, row, is_round)
        except BaseException as error:  # a tokenizer's, say: the others have nothing to do with it
            request.failure, request.finish_reason = _failure_of(error), "error"
            if not isinstance(error, Exception):
                raise

    def _hand_over(self, request: Request, row: list[int], is_round: bool) -> None:
        """Give a running request what it emitted in one launch."""
        emitted = unpack(row, self.config.logprobs, self.config.digests)
        assert emitted.tokens, "a running request emitted nothing: host and device disagree on who runs"
        request.num_certain += len(emitted.tokens) - 1
        if emitted.is_invalid:
            request.finish_reason = "error"
            self.forget_prefixes()  # its prompt's K/V may be in there
            message = f"a request ended: the target's logits are not finite after {len(request.tokens)} tokens"
            warnings.warn(message, stacklevel=7)
            return
        num_before = len(request.tokens)
        request.take(emitted.tokens, emitted.logprobs, emitted.digests)
        if is_round:
            for stats in (request.acceptance, self.acceptance):
                stats.add(len(request.tokens) - num_before)
            request.round_lens.append(len(request.tokens) - num_before)
        # Stop strings, which only text shows, are the one end that the device does not see.
        is_over = request.finish_reason is not None
        assert is_over == emitted.is_finished or request.finish_reason == "stop_string", "host and device disagree"


def _failure_of(error: BaseException) -> Exception:
    """What callers of the requests that `error` has ended are told; an interrupt is for the thread it came to."""
    if isinstance(error, Exception):
        return error
    failure = RuntimeError(f"a step was broken off by {type(error).__name__}; generate this request again")
    failure.__cause__ = error
    return failure


class StepBatch(NamedTuple):
    """Who plays a round, their rows [n] int64 on the device, and the kind of sampling that they need."""

    requests: list[Request]
    rows: torch.Tensor
    kind: SamplingKind
