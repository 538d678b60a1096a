"""Calls: callers wait for their own requests; one of them steps the engine for all, the others sleep. No model here."""

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Protocol
from weakref import WeakKeyDictionary

from specdec.core.engine.request import Request
from specdec.core.interrupts import deferred

REST = 2.0  # seconds that an event loop leaves to others for each that its tasks have taken
LONGEST_REST = 0.02  # seconds


class Waits(Protocol):
    """A caller that waits until `has_news`."""

    @property
    def has_news(self) -> bool:
        """True once the caller need not wait."""


class Call:
    """The requests that one caller waits for. They report to it when they get tokens and when they end.

    left: the requests that have not ended. wants_tokens: new tokens wake the caller, not only the end of a request.
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
        self._tell()
        self._calls.wake()

    def _note(self, request: Request) -> None:
        if request.finish_reason is not None and request in self.left:
            self._ended.append(request)  # first: it is over once both are empty
            del self.left[request]
        self._has_tokens = self._has_tokens or self._wants_tokens
        if self.has_news:
            self._tell()

    def _tell(self) -> None:
        """Wake the caller at the next `wake`."""
        self._calls.note(self)


class Bell:
    """Wakes the tasks of one event loop that have news, all at once, then rests in proportion to the time they took.

    News of the rest, such as several pieces of one text, is handled together, and the stepping thread has the GIL."""

    def __init__(self) -> None:
        self.due: deque[asyncio.Future[None]] = deque()
        self.is_resting = False

    def ring(self, loop: asyncio.AbstractEventLoop) -> None:
        """Wake the tasks that are `due`, after the rest if there is one; called in `loop`."""
        if self.is_resting or not self.due:
            return
        self.is_resting, began = True, time.thread_time()
        for _ in range(len(self.due)):
            future = self.due.popleft()
            if not future.done():
                future.set_result(None)
        loop.call_soon(self._rest, loop, began)  # behind the tasks

    def _rest(self, loop: asyncio.AbstractEventLoop, began: float) -> None:
        rest = min(REST * (time.thread_time() - began), LONGEST_REST)
        loop.call_later(rest, self._end_rest, loop)

    def _end_rest(self, loop: asyncio.AbstractEventLoop) -> None:
        self.is_resting = False  # first: another thread may add what is due, and leaves it to a bell that rests
        self.ring(loop)


class Calls:
    """Lets one waiting caller step the engine for all: until it has news itself, then another one takes over.

    Callers that sleep in a thread are woken by a lock, asyncio tasks by a future; only threads step.
    """

    def __init__(self) -> None:
        self._mutex = threading.Lock()
        self._is_stepped = False
        self._asleep: dict[Waits, threading.Lock | asyncio.Future[None]] = {}
        self._noted: deque[Waits] = deque()
        self._bells: WeakKeyDictionary[asyncio.AbstractEventLoop, Bell] = WeakKeyDictionary()

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
            loop = asyncio.get_running_loop()
            alarm = loop.create_future()
            with self._mutex:
                self._bells.setdefault(loop, Bell())
                self._asleep[call] = alarm
            try:
                if not call.has_news:
                    await alarm
            finally:
                self._leave(call)

    def note(self, call: Waits) -> None:
        """Wake `call` at the next `wake`."""
        self._noted.append(call)

    def wake(self, *calls: Waits) -> None:
        """Wake `calls`, and those that were noted; each event loop is called once for all of its tasks."""
        self._noted.extend(calls)
        futures: dict[asyncio.AbstractEventLoop, list[asyncio.Future[None]]] = {}
        with suppress(IndexError):  # empty, maybe since another thread does the same
            while True:
                alarm = self._asleep.pop(self._noted.popleft(), None)
                if isinstance(alarm, asyncio.Future):
                    futures.setdefault(alarm.get_loop(), []).append(alarm)
                elif alarm is not None:
                    alarm.release()
        for loop, own in futures.items():
            bell = self._bells[loop]
            bell.due.extend(own)
            if not bell.is_resting:
                with suppress(RuntimeError):  # the loop is closed: no task waits in it
                    loop.call_soon_threadsafe(bell.ring, loop)

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
        """Remove `call` from the sleepers; if no thread steps, wake a sleeping thread to take over."""
        with self._mutex:
            self._asleep.pop(call, None)
            asleep = [] if self._is_stepped else list(self._asleep.items())
        for other, alarm in asleep:
            if not isinstance(alarm, asyncio.Future) and not other.has_news:
                self.wake(other)
                break
