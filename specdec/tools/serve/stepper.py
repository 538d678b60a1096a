"""The thread that owns the engine: it submits jobs, steps, and hands what became certain to the event loop.

Knows neither HTTP nor JSON. No other thread submits, steps or abandons, so all jobs share the same rounds.
"""

import asyncio
import logging
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

from specdec.api import Engine
from specdec.core.engine.request import Request
from specdec.core.errors import DetachedError
from specdec.core.outputs import TokenLogprob


class Closing(Exception):
    """No job is taken any more, or this one was ended."""


class Busy(Exception):
    """Too many requests wait."""


class Failed(Exception):
    """The engine could not finish a request."""


class StreamPiece(NamedTuple):
    """A part of the text of a choice that is final. finish_reason: the request's, once the text is complete.

    tokens, logprobs: emitted since the last piece, which hold this text and what is held back; none if the engine
    computes no log-probabilities.
    """

    choice: int
    text: str
    finish_reason: str | None
    tokens: Sequence[int] = ()
    logprobs: Sequence[TokenLogprob] = ()


@dataclass(eq=False)
class Job:
    """One prompt. events, which jobs may share: an empty piece when the engine has taken it, its pieces, or an error.

    request: set by the stepper; is_dropped: set by the reader of `events` when it leaves.
    """

    choice: int
    prompt: list[int]
    options: dict[str, Any]
    events: asyncio.Queue[StreamPiece | Exception]
    request: Request | None = None
    is_dropped: bool = False
    num_scored: int = 0  # tokens whose log-probabilities have been handed out


class Stepper:
    """Steps `engine` while there are jobs. num_tokens: of the requests that have ended.

    max_waiting: jobs that may wait beside those that run.
    """

    def __init__(self, engine: Engine, max_waiting: int):
        self.engine = engine
        self.num_tokens = 0
        self.jobs: list[Job] = []  # appended to by the event loop; the rest is done by the thread
        self._most = engine.config.max_batch + max_waiting
        self._num_coming = 0  # jobs that are being made
        self._has_work = False
        self._outbox: list[tuple[Job, StreamPiece | Exception]] = []
        self._deadline = float("inf")  # no job is taken once it is set, and none goes on after it
        self._wake = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="stepper", daemon=True)

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Start the thread; events are put into their queues by `loop`."""
        self._loop = loop
        self._thread.start()

    @property
    def is_open(self) -> bool:
        """True while jobs are taken."""
        return self._deadline == float("inf")

    @contextmanager
    def room_for(self, count: int) -> Iterator[None]:
        """Count `count` jobs among those that wait, while they are made and submitted; raises Busy if too many do,
        ValueError if so many never can."""
        if count > self._most:
            raise ValueError(
                f"{count} texts at once: at most {self._most} run and wait; lower n, or send fewer prompts"
            )
        there = len(self.jobs) + self._num_coming
        if there + count > self._most:
            raise Busy(
                f"{there} requests run or wait and {count} would be added: at most {self._most}; try again later"
            )
        self._num_coming += count
        try:
            yield
        finally:
            self._num_coming -= count

    def submit(self, jobs: Sequence[Job]) -> None:
        """Queue all of `jobs`, for which there is room; raises Closing."""
        with self._wake:
            if not self.is_open:
                raise Closing("the server is shutting down")
            self.jobs.extend(jobs)
            self._wake.notify()

    def drain(self, seconds: float) -> None:
        """Take no more jobs, and end those that are unfinished after `seconds`."""
        self._deadline = min(self._deadline, time.monotonic() + seconds)

    def close(self) -> None:
        """End all jobs and the thread."""
        self.drain(0)
        with self._wake:
            self._wake.notify()
        if self._thread.ident is not None:  # it was started
            self._thread.join()

    def _run(self) -> None:
        try:
            while self._wait():
                for job in list(self.jobs):
                    self._admit_or_drop(job)
                self._step()
                for job in list(self.jobs):
                    self._hand_out(job)
                self._deliver()
        finally:
            with self._wake:  # refuse new requests: no thread is left to serve them
                self.drain(0)
            self._end_all(Closing("the server is shutting down"))
            self._deliver()

    def _wait(self) -> bool:
        """Wait for work; False once there shall be none."""
        with self._wake:
            self._wake.wait_for(lambda: self.jobs or self._has_work or not self.is_open)
        return time.monotonic() < self._deadline and (self.is_open or bool(self.jobs))

    def _admit_or_drop(self, job: Job) -> None:
        try:
            if job.is_dropped:
                self._end(job)
            elif job.request is None:
                (job.request,) = self.engine.submit([job.prompt], **job.options)
                self._outbox.append((job, StreamPiece(job.choice, "", None)))
        except Exception as error:  # the client's mistake, mostly
            self._end(job, error)

    def _step(self) -> None:
        """Step. The engine ends requests whose launch failed; all are ended if it did not."""
        try:
            self._has_work = self.engine.step()
        except Exception as error:
            logging.getLogger(__name__).exception("a step failed")
            self._has_work = False
            if not any(job.request and job.request.failure for job in self.jobs):
                self._end_all(Failed(f"a step failed: {error}"))

    def _hand_out(self, job: Job) -> None:
        if job.request is None:  # it came during the step
            return
        reason = job.request.finish_reason
        try:
            text = job.request.read()
        except Exception as error:  # the tokenizer's
            return self._end(job, Failed(f"the text cannot be decoded: {error!r}"))
        if reason == "error":
            failure = job.request.failure or FloatingPointError("the target's logits are not finite")
            return self._end(job, Failed(f"the request failed: {failure}"))
        if text or reason:
            scores = (job.request.logprobs or [])[job.num_scored :]
            tokens = job.request.tokens[job.num_scored :] if scores else ()
            job.num_scored += len(scores)
            self._outbox.append((job, StreamPiece(job.choice, text, reason, tokens, scores)))
        if reason:
            self._end(job)

    def _end_all(self, error: Exception) -> None:
        for job in list(self.jobs):
            self._end(job, error)

    def _end(self, job: Job, error: Exception | None = None) -> None:
        """Forget `job` and free what it holds; its reader gets `error`."""
        self.jobs.remove(job)
        if error is not None:
            self._outbox.append((job, error))
        if job.request is not None:
            with suppress(DetachedError):
                self.engine.abandon([job.request])
            self.num_tokens += len(job.request.tokens)

    def _deliver(self) -> None:
        """Hand over events, in one call of the event loop for all."""
        if self._outbox:
            events, self._outbox = self._outbox, []
            self._loop.call_soon_threadsafe(_put, events)


def _put(events: list[tuple[Job, StreamPiece | Exception]]) -> None:
    for job, event in events:
        job.events.put_nowait(event)
