"""Hands emitted tokens to their requests, and ends the finished ones."""

import warnings

from specdec.core.config import EngineConfig
from specdec.core.engine.mailbox import Mailbox, Results
from specdec.core.engine.request import Request
from specdec.core.engine.scheduler import Scheduler
from specdec.core.engine.tiers import Tiers
from specdec.core.functional.results import unpack
from specdec.core.metrics import AcceptanceStats


class Delivery:
    """Reads results from the mailbox and hands them to requests; finished ones give back rows and slots.

    acceptance: over all requests, abandoned ones included. undone: requests whose last round emitted a token that their
    grammar forbids; their results in flight are dropped.
    """

    def __init__(self, mailbox: Mailbox, scheduler: Scheduler, config: EngineConfig, tiers: Tiers):
        self._mailbox = mailbox
        self._scheduler = scheduler
        self._config = config
        self._tiers = tiers
        self.acceptance = AcceptanceStats()
        self.undone: list[Request] = []

    def read(self, num_left: int) -> None:
        """Hand out results, oldest first, until those of `num_left` launches are left."""
        for results, rows in self._mailbox.take(num_left):
            self.hand_out(results, rows)

    def hand_out(self, results: Results, rows: list[list[int]]) -> None:
        """Hand arrived tokens to their requests; finished ones give back rows and slots."""
        for i in range(results.num_read, len(rows)):
            request = results.requests[i]
            results.num_read = i + 1  # first: even if this one fails, it is not handed out twice
            try:
                if request.is_running and request not in self.undone:
                    self._hand_over_or_end(request, rows[i], results)
                if request.finish_reason is not None and request.row is not None:
                    self._scheduler.release(request)
            finally:
                request.notify()
        if results.played is not None:
            self.acceptance.add(results.lens)
            self._tiers.end(results.played, results.requests)

    def _hand_over_or_end(self, request: Request, row: list[int], results: Results) -> None:
        try:
            self.hand_over(request, row, results)
        except BaseException as error:  # such as a tokenizer's: the others are not affected
            request.failure, request.finish_reason = failure_of(error), "error"
            if not isinstance(error, Exception):
                raise

    def hand_over(self, request: Request, row: list[int], results: Results) -> None:
        """Give a running request its `row` of `results`."""
        emitted = unpack(row, self._config.logprobs, self._config.digests)
        assert emitted.tokens, "a running request emitted nothing: host and device disagree on who runs"
        request.num_certain += len(emitted.tokens) - 1
        tokens = emitted.tokens[: len(emitted.tokens) - emitted.is_invalid]
        num_before, count = len(request.tokens), len(tokens)
        if request.constraint is not None:
            count = request.constraint.advance(tokens, results.is_masked)
        if count:
            request.take(tokens[:count], emitted.logprobs[:count], emitted.digests[:count])
        if count < len(tokens) and request.finish_reason is None:
            if results.is_masked:
                _end_dead(request)
            else:
                self.undone.append(request)
        if emitted.is_invalid and request.finish_reason is None:
            self._end_invalid(request)
        if results.played is not None:
            for lens in (request.round_lens, results.lens):
                lens.append(len(request.tokens) - num_before)
        # The device does not see stop strings, which only text shows, dead ends and forbidden tokens.
        is_over, reason = request.finish_reason is not None, request.finish_reason
        is_unseen = reason in ("stop_string", "dead_end") or request in self.undone
        assert is_unseen or is_over == emitted.is_finished, "host and device disagree"

    def _end_invalid(self, request: Request) -> None:
        """End a request because the target's logits after its text are not finite."""
        request.finish_reason = "error"
        self._scheduler.forget_prefixes()  # its prompt's K/V may be cached
        message = f"a request ended: the target's logits are not finite after {len(request.tokens)} tokens"
        if request.sampling.has_processors:
            message += f", or its {'grammar and its ' * (request.constraint is not None)}bans leave no token"
        warnings.warn(message, stacklevel=8)


def _end_dead(request: Request) -> None:
    assert request.constraint is not None
    request.finish_reason = "dead_end"
    tokens = len(request.tokens)
    warnings.warn(f"a request ended after {tokens} tokens: {request.constraint.error}", stacklevel=8)


def failure_of(error: BaseException) -> Exception:
    """Return what callers of the requests that `error` has ended get; an interrupt is for the thread it came to."""
    if isinstance(error, Exception):
        return error
    failure = RuntimeError(f"a step was interrupted by {type(error).__name__}; generate this request again")
    failure.__cause__ = error
    return failure
