"""The engine's host side: decides in each step whether to launch a prefill or a round.

    step():  admit → prefill or round (draft → verify → accept → commit → extend) → hand out what has arrived

While earlier requests decode, prompts are prefilled in small pieces, a round after each.

The scheduler owns requests, the launcher the device programs and their graphs, the delivery what has come back; the
engine knows token ids only. On CUDA the host runs one launch ahead: it launches round r+1 before it reads what round r
emitted. Threads take turns.
"""

import weakref
from collections.abc import Sequence
from functools import partial

import torch

from specdec.core.batch import ForwardMode, on_device, refuse_autocast
from specdec.core.engine.calls import Call, Calls, Waits
from specdec.core.engine.delivery import Delivery, failure_of
from specdec.core.engine.launcher import Launcher
from specdec.core.engine.mailbox import Mailbox
from specdec.core.engine.request import Request
from specdec.core.engine.scheduler import Scheduler
from specdec.core.engine.turns import Turns
from specdec.core.errors import DetachedError, GraphError
from specdec.core.functional.results import line_width
from specdec.core.round.parts import Parts
from specdec.graphs.runner import GraphRunner

DETACHED = "this engine was detached from its model; call specdec.attach() for a new one"


class Core:
    """The step loop behind `Engine`: admits requests, launches prefills and rounds, delivers results."""

    def __init__(self, parts: Parts):
        config, device = parts.config, parts.target.device
        self.target = parts.target
        self.config = config
        self.device = device
        self.counters = parts.counters
        self.slot_tables = parts.tables
        self.state = parts.state
        self.context = parts.context
        self.models = parts.models
        self.scheduler = Scheduler(parts.tables, config.tail_reserve, config.max_batch, parts.worker.looks_ahead)
        width = line_width(config.num_steps + 1, config.logprobs, config.digests)
        self.mailbox = Mailbox(device, config.max_batch * width, parts.ops.mail)
        self.launcher = Launcher(parts, self.scheduler, self.mailbox)
        self.round, self.prefill, self.graphs = self.launcher.program, self.launcher.prefills, self.launcher.rounds
        self.delivery = Delivery(self.mailbox, self.scheduler, config, self.launcher.tiers)
        if parts.feed is not None:
            parts.feed.read_results = partial(self.delivery.read, 0)
        self.grammars = parts.grammars
        self._lag = 1 if device.type == "cuda" else 0  # launches the host may run ahead of its reading
        self._owes_round = False  # whether the last step was a prefill
        self._has_looked = False  # for changes of the models, a moment before the next step
        self.is_closed = False
        self.calls = Calls()
        core = weakref.ref(self)  # no cycle: pools are freed with the last reference, not by some later collection
        self.turns = Turns(lambda error: core()._repair(error))  # type: ignore[union-attr]
        self.models.share(self.turns, is_baked=any(runner.captured for runner in self.runners))

    @property
    def runners(self) -> list[GraphRunner]:
        """All graph runners, those of prefills first."""
        return [*self.prefill.runners, *self.graphs.runners.values()]

    def submit(self, requests: Sequence[Request], steps_next: bool = False, looks: bool = True) -> None:
        """Queue checked requests. steps_next: the caller steps at once. looks: look for changes of the models now, not
        at admission, where an unsupported change would end the requests.

        DetachedError once the core is closed, GraphError for an unsupported change, ValueError within autocast."""
        refuse_autocast(self.device)
        with self.turns:
            self._require_open()
            if looks:
                self._follow_weights()
            self._has_looked = steps_next and looks
            self.scheduler.add(requests)

    @torch.inference_mode()
    def step(self, caller: Waits | None = None) -> None:
        """Launch a prefill or a round, hand out the results that have arrived, and wake the callers that wait for them.

        Does nothing if `caller` has news: another thread may have stepped meanwhile. An error before or after a launch
        ends the request at fault, if any; an error in a launch leaves the state of all running requests half written,
        and ends them. The engine can serve later requests.
        """
        try:
            with self.turns:
                self._require_open()
                if caller is None or not caller.has_news:
                    with on_device(self.device):
                        self.scheduler.end_late()
                        self._undo()
                        self._admit()  # looks for changes of the models, so before a step replaces forwards
                        with self.models.stepping():
                            self._step()
                        # a request in no queue would never end, and its caller would hang
                        is_idle = not self.scheduler.running and not self.scheduler.waiting
                        assert not is_idle or caller is None or caller.has_news, "a request was lost"
        finally:
            self.calls.wake()

    def call(self, requests: Sequence[Request], wants_tokens: bool = True) -> Call:
        """Return a Call that waits for `requests`, not queued yet, to end; with `wants_tokens` also for new tokens."""
        return Call(self.calls, requests, wants_tokens)

    def collect(self, caller: Waits) -> None:
        """Return as soon as `caller` has news: step for all, or sleep while another thread does."""
        self.calls.collect(caller, lambda: self.step(caller), may_sleep=not self.turns.is_mine)

    @property
    def has_work(self) -> bool:
        """True if requests wait or run, or results are on their way."""
        with self.turns:
            return bool(self.scheduler.waiting or self.scheduler.running or self.mailbox.num_pending)

    def served_by(self, mode: ForwardMode) -> str:
        """Name the kernels that attend in forwards of `mode`: the draft's in its own, the target's in others."""
        own = self.round.worker.context if mode in (ForwardMode.DRAFT, ForwardMode.DRAFT_EXTEND) else None
        return (own or self.context).backend.served_by(mode)

    def agree(self, what: str, value: object) -> None:
        """Check that all ranks, if there are several, pass the same `value` to the call `what`."""

    def abandon(self, requests: Sequence[Request]) -> None:
        """Drop `requests`, whatever their state, and free their rows and KV slots."""
        with self.turns:
            for request in requests:
                self.scheduler.release(request)

    def clear_prefixes(self) -> None:
        """Read the adapters again and empty the prefix cache; see `Engine.clear_prefix_cache`."""
        with self.turns:
            self.models.reread()
            self.forget_prefixes()

    def forget_prefixes(self) -> None:
        """Empty the prefix cache; K/V of running requests is not cached either."""
        with self.turns:
            self.scheduler.forget_prefixes()

    def close(self) -> None:
        """Stop, restore the model, and wait for launches in flight; one round may be."""
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
        """Fill the rows of admitted requests, launch a prefill or a round, and hand out what has arrived."""
        if self.scheduler.admitted:
            self.launcher.fill()
        pieces = self._next_prefill()
        has_posted = False
        if pieces:
            has_posted = self.launcher.prefill(pieces)
        else:
            self.launcher.admit()
            if decoding := self._ready():
                self.launcher.round(decoding)
                has_posted = True
        self._owes_round = bool(pieces)
        self.delivery.read(self._lag if has_posted else 0)

    def _admit(self) -> None:
        """Admit waiting requests; the models may have changed since they came."""
        has_looked, self._has_looked = self._has_looked, False
        if self.scheduler.may_admit:
            try:
                if not has_looked:
                    self._follow_weights()
            except GraphError as error:
                self.scheduler.fail(list(self.scheduler.waiting), error)
            self.scheduler.admit()

    def _undo(self) -> None:
        """Take requests back to before the first token that their grammar forbids; results on the way are dropped."""
        if self.delivery.undone:
            self.delivery.read(0)
            if undone := [r for r in self.delivery.undone if r.is_running]:  # else they have ended since
                self.launcher.rewind(undone)
            self.delivery.undone = []

    def _next_prefill(self) -> list[tuple[Request, int]]:
        """Return prompt pieces to prefill now; fewer at a time, a round after each, while earlier requests decode."""
        most = self.config.max_prefill_tokens
        pieces = self.scheduler.next_prefill(most)
        if not pieces or not self.scheduler.is_mixed:
            return pieces
        return [] if self._owes_round else self.scheduler.next_prefill(min(most, self.config.mixed_prefill_tokens))

    def _ready(self) -> list[Request]:
        """Return who plays the next round, with slots for all that it may write; where there are none, the last
        requests in the order of admission are preempted."""
        requests, ahead = self.scheduler.decoding(), self.launcher.tokens_in_flight
        while not self.scheduler.grow(requests, ahead):
            if self.mailbox.num_pending:  # some may have ended, and how long the others are is known then
                self.delivery.read(0)
            else:
                self.scheduler.preempt()
                self.launcher.forget_rows()  # it will be in another row
            requests, ahead = self.scheduler.decoding(), 0
        return requests

    def _repair(self, error: BaseException) -> None:
        """Restore order after `error` has ended a turn: a launch that it broke off ends all running requests."""
        if self.launcher.is_launching:
            self.mailbox.clear()
            self.scheduler.fail(list(self.scheduler.running), failure_of(error))
            self.launcher.is_launching = False
        self.scheduler.repair()
