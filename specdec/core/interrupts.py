"""Ctrl-C that waits for the end of a context."""

import signal
import threading

# What `signal` wraps: it looks handlers up in an enum, 25 µs a step.
from _signal import getsignal  # type: ignore[import-not-found]
from _signal import signal as set_handler
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def deferred() -> Iterator[Callable[[], bool]]:
    """Raise KeyboardInterrupt at the end of the context if SIGINT has come within it; yield a function that says so.

    A second SIGINT raises at once: the work that it is meant to stop may never end. Only the main thread gets signals;
    in others, and where SIGINT has another handler than Python's own, nothing is changed.
    """
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield lambda: False
        return
    num_came = 0

    def note(number: int, frame: FrameType | None) -> None:
        nonlocal num_came
        num_came += 1
        if num_came > 1:
            raise KeyboardInterrupt

    set_handler(signal.SIGINT, note)
    try:
        yield lambda: num_came > 0
    finally:
        if getsignal(signal.SIGINT) is note:
            set_handler(signal.SIGINT, signal.default_int_handler)
        if num_came:
            raise KeyboardInterrupt
