"""Turns: one thread at a time uses the engine, in order of arrival. Knows neither requests nor devices."""

import os
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any

from specdec.core.interrupts import deferred


class Turns:
    """A reentrant lock, used as `with turns:`; Ctrl-C takes effect when the turn is free again.

    A plain lock would starve others: a thread that steps in a loop takes it back before any other wakes up. So the
    thread that waits for the turn holds a second lock, the gate, where a thread that has just had the turn must wait.

    repair: called with the exception that ends a `with turns:`, while the turn is still held.
    """

    def __init__(self, repair: Callable[[BaseException], None]):
        self._repair = repair
        self._gate = threading.Lock()
        self._turn = threading.Lock()
        self._owner: tuple[int, int] | None = None  # process and thread
        self._depth = 0
        self._deferral: AbstractContextManager[Any] = deferred()

    def __enter__(self) -> None:
        if not self.is_mine:
            if self._owner is not None and self._owner[0] != os.getpid():
                raise RuntimeError(
                    "this process was forked while a thread used the engine, so the engine's lock is never released "
                    "here: attach an engine in this process, or fork while nothing runs"
                )
            deferral = deferred()
            deferral.__enter__()
            try:
                with self._gate:
                    self._turn.acquire()
            except BaseException:  # a second Ctrl-C, while it waits
                deferral.__exit__(None, None, None)
                raise
            self._owner, self._deferral = _me(), deferral
        self._depth += 1

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if error is not None:
                self._repair(error)
        finally:
            self._depth -= 1
            if self._depth == 0:
                deferral, self._owner = self._deferral, None
                self._turn.release()
                deferral.__exit__(None, None, None)  # may raise KeyboardInterrupt

    @property
    def is_mine(self) -> bool:
        """True if this thread has the turn."""
        return self._owner == _me()


def _me() -> tuple[int, int]:
    return os.getpid(), threading.get_ident()
