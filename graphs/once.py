"""Warm-ups run equal parts of a body once: a second run would compile, load and tune nothing more."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class _Thread(threading.local):
    is_once = False


_thread = _Thread()


@contextmanager
def equal_parts_once() -> Iterator[None]:
    """Return a context in which, in this thread, traced callables run each distinct piece once; results are invalid."""
    _thread.is_once, before = True, _thread.is_once
    try:
        yield
    finally:
        _thread.is_once = before


def is_once() -> bool:
    """Return whether this thread is within `equal_parts_once`."""
    return _thread.is_once
