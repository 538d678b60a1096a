"""Driver: serves asyncio callers. A thread, alive while there are any, submits, steps and abandons for them."""

import atexit
import threading
from collections import deque
from collections.abc import AsyncGenerator, Callable, Sequence
from functools import partial

from specdec.core.engine.calls import Call
from specdec.core.engine.core import Core
from specdec.core.engine.request import Request


class Driver:
    """Submits, steps and abandons for callers in any number of event loops; to other stepping threads it is one caller.
    An error of a step ends the calls whose requests it ended; if it ended none, all calls."""

    def __init__(self, core: Core):
        self._core = core
        self._mutex = threading.Lock()
        self._inbox: deque[Callable[[], None]] = deque()
        self._open: dict[Call, None] = {}  # calls whose requests are queued
        self._is_running = self._is_leaving = False

    async def run(self, call: Call) -> AsyncGenerator[list[Request], None]:
        """Submit the requests of `call`, and yield those that have finished whenever it has news. Closing this, or
        cancelling the task that waits for it, frees their rows and pages after the current step."""
        self.begin(call)
        try:
            while not call.is_over:
                await self._core.calls.wait(call)
                yield call.take()
        finally:
            self.end(call)

    def begin(self, call: Call) -> None:
        """Submit the requests of `call`, and step for them."""
        self._do(partial(self._submit, call))

    def end(self, call: Call) -> None:
        """Free rows and pages of the unfinished requests of `call`, after the current step."""
        self._open.pop(call, None)
        if call.left:
            self._do(partial(self._abandon, call))

    @property
    def has_news(self) -> bool:
        """True once there is other work than stepping."""
        return bool(self._inbox) or self._is_leaving or not any(call.left for call in list(self._open))

    def _do(self, command: Callable[[], None]) -> None:
        """Queue `command` for the thread, which calls it between two steps."""
        self._inbox.append(command)
        with self._mutex:
            if not self._is_running:
                self._is_running = True
                self._thread = threading.Thread(target=self._run, name="specdec", daemon=True)
                self._thread.start()
                atexit.register(self._leave)
        self._core.calls.wake(self)  # it sleeps where another caller steps

    def _leave(self) -> None:
        """End the thread after its step, for good: Python, at its end, would take PyTorch down under it."""
        self._is_leaving = True
        self._core.calls.wake(self)
        self._thread.join()

    def _run(self) -> None:
        while not self._is_leaving:
            with self._mutex:
                if not self._inbox and self.has_news:
                    self._is_running = False
                    atexit.unregister(self._leave)
                    return
            try:
                while self._inbox:
                    self._inbox.popleft()()
                self._core.collect(self)
            except BaseException as error:
                calls = list(self._open)
                self._fail([c for c in calls if any(r.failure for r in c.requests)] or calls, error)

    def _fail(self, calls: Sequence[Call], error: BaseException) -> None:
        for call in calls:
            self._open.pop(call, None)
            call.fail(error)

    def _submit(self, call: Call) -> None:
        try:
            self._core.submit(call.requests, looks=False)
            self._open[call] = None
        except Exception as error:  # a detached engine
            self._fail([call], error)

    def _abandon(self, call: Call) -> None:
        self._open.pop(call, None)
        self._core.abandon([r for r in call.left if r.finish_reason is None])
