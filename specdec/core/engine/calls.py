"""Calls: callers wait for their own requests; one of them steps the engine for all, the others sleep. No model here."""

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Protocol

from specdec.core.engine.request import Request
from specdec.core.interrupts import deferred


class Waits(Protocol):
    """A caller that can wait: until `has_news`."""

    @property
    def has_news(self) -> bool:
        """True once it need not wait."""


class Call:
    """The requests that one caller waits for; `left` are not over yet. They report to it as they get tokens and end.

    wants_tokens: new tokens are news, not only the end of a request.
    """

    def __init__(self, calls: "Calls", requests: Sequence[Request], wants_tokens: bool):
        self.requests, self.left = requests, dict.fromkeys(requests)
        self._calls, self._wants_tokens = calls, wants_tokens
        self._ended: deque[Request] = deque()
        self._has_tokens = False
        self._error: BaseException | None = None
        for request in requests:
            request.on_change = self._note

    @property
    def has_news(self) -> bool:
        """True if a request has ended, or has tokens if they are wanted, since the last `take`."""
        return self._has_tokens or bool(self._ended) or self._error is not None

    @property
    def is_over(self) -> bool:
        """True once `take` has returned all requests."""
        return not self.left and not self._ended

    def take(self) -> list[Request]:
        """Return the requests that have ended since the last call; raise the error that ended one."""
        self._has_tokens = False  # first: another thread's step may bring more
        if self._error is not None:
            raise self._error
        ended = [self._ended.popleft() for _ in range(len(self._ended))]
        for request in ended:
            if request.failure is not None:  # it may have occurred in another caller's step
                raise request.failure
        return ended

    def fail(self, error: BaseException) -> None:
        """Make the next `take` raise `error`, and wake the caller."""
        self._error = error
        self._calls.note(self)
        self._calls.wake()

    def _note(self, request: Request) -> None:
        if request.finish_reason is not None and request in self.left:
            self._ended.append(request)  # first: it is over once both are empty
            del self.left[request]
        self._has_tokens = self._has_tokens or self._wants_tokens
        if self.has_news:
            self._calls.note(self)


class Calls:
    """Callers that wait. One that finds no other stepping steps until it has news itself, then passes that on.

    Those that sleep in a thread have a lock that wakes them, those in asyncio a future; only threads step.
    """

    def __init__(self) -> None:
        self._mutex = threading.Lock()
        self._is_stepped = False
        self._asleep: dict[Waits, threading.Lock | asyncio.Future[None]] = {}
        self._noted: deque[Waits] = deque()

    def collect(self, call: Waits, step: Callable[[], None], may_sleep: bool = True) -> None:
        """Return once `call` has news: step, or sleep while another thread steps if it `may_sleep`.

        Ctrl-C takes effect between two steps, and at once in a sleep.
        """
        while not call.has_news:
            alarm = threading.Lock()
            alarm.acquire()
            try:
                if not self._step(call, step, alarm if may_sleep else None) and not call.has_news:
                    alarm.acquire()
            finally:
                self._leave(call)

    async def wait(self, call: Waits) -> None:
        """Return once `call` has news; a thread must be stepping for it."""
        while not call.has_news:
            alarm = asyncio.get_running_loop().create_future()
            with self._mutex:
                self._asleep[call] = alarm
            try:
                if not call.has_news:
                    await alarm
            finally:
                self._leave(call)

    def note(self, call: Waits) -> None:
        """Wake `call` at the next `wake`."""
        self._noted.append(call)

    def wake(self) -> None:
        """Wake those that have been noted; an event loop is called once for all of its own."""
        futures: dict[asyncio.AbstractEventLoop, list[asyncio.Future[None]]] = {}
        with suppress(IndexError):  # empty, maybe since another thread does the same
            while True:
                alarm = self._asleep.pop(self._noted.popleft(), None)
                if isinstance(alarm, asyncio.Future):
                    futures.setdefault(alarm.get_loop(), []).append(alarm)
                elif alarm is not None:
                    alarm.release()
        for loop, own in futures.items():
            with suppress(RuntimeError):  # the loop is closed, and nobody waits in it
                loop.call_soon_threadsafe(_end, own)

    def _step(self, call: Waits, step: Callable[[], None], alarm: "threading.Lock | None") -> bool:
        """Step until `call` has news; if another thread does, put `call` to sleep with `alarm` and return False."""
        with deferred() as is_interrupted:  # a Ctrl-C must not leave the others without anybody who steps
            with self._mutex:
                if self._is_stepped and alarm is not None:
                    self._asleep[call] = alarm
                    return False
                self._is_stepped = True
            try:
                while not call.has_news and not is_interrupted():
                    step()
            finally:
                self._is_stepped = False
                self._leave(call)
        return True

    def _leave(self, call: Waits) -> None:
        """`call` sleeps no longer; if nobody steps, wake one that waits for it in a thread."""
        with self._mutex:
            self._asleep.pop(call, None)
            asleep = [] if self._is_stepped else list(self._asleep.items())
        for other, alarm in asleep:
            if not isinstance(alarm, asyncio.Future) and not other.has_news:
                self.note(other)
                self.wake()
                break


def _end(futures: Sequence["asyncio.Future[None]"]) -> None:
    for future in futures:
        if not future.done():
            future.set_result(None)
