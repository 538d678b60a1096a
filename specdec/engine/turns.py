"""Turns: one thread at a time is at the engine, in order of arrival, and finishes what it is at before Ctrl-C counts.

Knows neither requests nor devices. What a turn that broke off has left behind is repaired before the next one begins.
"""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType


class Turns:
    """A lock to be used as `with turns:`; the thread that has the turn may take it again.

    A bare lock would starve others: a thread that steps in a loop takes it back before any other has woken up. So one
    who waits for the turn holds the gate meanwhile, and whoever has just had the turn finds the gate shut.

    repair: called first in a turn if the last one was left by an exception.
    """

    def __init__(self, repair: Callable[[], None]):
        self._repair = repair
        self._gate = threading.Lock()
        self._turn = threading.Lock()
        self._owner: int | None = None
        self._depth = 0
        self._is_dirty = False  # while a turn is under way, and after one that an exception has ended
        self._interrupts = _Interrupts()

    def __enter__(self) -> None:
        me = threading.get_ident()
        if self._owner == me:
            self._depth += 1
            return
        self._interrupts.hold()
        try:
            with self._gate:
                self._turn.acquire()
        except BaseException:  # a second Ctrl-C, while it waits
            self._interrupts.let_go()
            raise
        self._owner, self._depth = me, 1
        if self._is_dirty:
            try:
                self._repair()
            except BaseException:
                self._leave()
                raise
        self._is_dirty = True

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._depth -= 1
        if self._depth == 0:
            self._is_dirty = error is not None
            self._leave()

    @property
    def is_mine(self) -> bool:
        """Whether this thread has the turn."""
        return self._owner == threading.get_ident()

    @contextmanager
    def many(self) -> Iterator[None]:
        """Around a loop that takes many turns: signal handlers are changed once, which costs more than a turn.

        Ctrl-C still counts between two turns.
        """
        self._interrupts.hold()
        self._interrupts.install()
        try:
            self._interrupts.let_go()  # of the first of the two; the handler stays
            yield
        finally:
            self._interrupts.hold()
            self._interrupts.remove()
            self._interrupts.let_go()

    def _leave(self) -> None:
        self._owner, self._depth = None, 0
        self._turn.release()
        self._interrupts.let_go()  # may raise KeyboardInterrupt


class _Interrupts:
    """Holds SIGINT back, in the main thread and where Python handles it: only that thread is ever interrupted by one.

    A second SIGINT is not held back: what it is meant to break off may never end.
    """

    def __init__(self) -> None:
        self._before: Callable[[int, FrameType | None], object] | None = None  # whose place we are in
        self._num_installed = 0
        self._is_held = False
        self._came: tuple[int, FrameType | None] | None = None

    def hold(self) -> None:
        """Hold back from here on; does nothing where nobody could be interrupted."""
        if threading.current_thread() is threading.main_thread():
            self._is_held = True  # first, so that none comes between the next two lines
            self.install()

    def let_go(self) -> None:
        """Hand over what has come meanwhile."""
        if threading.current_thread() is threading.main_thread():
            before = self._before
            self.remove()
            self._is_held = False
            came, self._came = self._came, None
            if came is not None and before is not None:
                before(*came)

    def install(self) -> None:
        """Take the handler's place, once more; while held."""
        if threading.current_thread() is not threading.main_thread():
            return
        if self._num_installed == 0:
            handler = signal.getsignal(signal.SIGINT)
            if not callable(handler):
                return
            self._before = handler
            signal.signal(signal.SIGINT, self._on_signal)
        self._num_installed += 1

    def remove(self) -> None:
        """Undo one `install`; while held."""
        if threading.current_thread() is threading.main_thread() and self._num_installed:
            self._num_installed -= 1
            if self._num_installed == 0:
                signal.signal(signal.SIGINT, self._before)
                self._before = None

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self._is_held and self._came is None:
            self._came = number, frame
        elif self._before is not None:
            self._came = None
            self._before(number, frame)
