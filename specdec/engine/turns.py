"""Turns: one thread at a time uses the engine, in order of arrival, and Ctrl-C waits for the end of its turn.

Knows neither requests nor devices. After a turn that an exception ended, the next one begins with a repair.
"""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType


class Turns:
    """A reentrant lock, used as `with turns:`.

    A plain lock would starve others: a thread that steps in a loop takes it back before any other wakes up. So the
    thread that waits for the turn holds a second lock, the gate, where a thread that has just had the turn must wait.

    repair: called first in a turn if the last one was ended by an exception.
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
        """True if this thread has the turn."""
        return self._owner == threading.get_ident()

    @contextmanager
    def many(self) -> Iterator[None]:
        """Wrap a loop that takes many turns: signal handlers are changed only once, as a change costs more than a turn.

        Ctrl-C still takes effect between two turns.
        """
        self._interrupts.hold()
        self._interrupts.install()
        try:
            self._interrupts.let_go()  # undoes `hold`; the handler stays installed
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
    """Delays SIGINT, in the main thread and where Python handles it: SIGINT only ever interrupts that thread.

    A second SIGINT is not delayed: the work it is meant to stop may never end.
    """

    def __init__(self) -> None:
        self._before: Callable[[int, FrameType | None], object] | None = None  # the handler that ours replaces
        self._num_installed = 0
        self._is_held = False
        self._came: tuple[int, FrameType | None] | None = None

    def hold(self) -> None:
        """Delay SIGINT from here on; does nothing in a thread that it cannot interrupt."""
        if threading.current_thread() is threading.main_thread():
            self._is_held = True  # first, so that none comes between the next two lines
            self.install()

    def let_go(self) -> None:
        """Stop delaying, and deliver a SIGINT that has arrived meanwhile."""
        if threading.current_thread() is threading.main_thread():
            before = self._before
            self.remove()
            self._is_held = False
            came, self._came = self._came, None
            if came is not None and before is not None:
                before(*came)

    def install(self) -> None:
        """Replace the SIGINT handler by ours; calls are counted. To be called while held."""
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
        """Undo one `install`. To be called while held."""
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
