"""Mutual exclusion of a live model's two callers: its owner, and the engine, which reroutes its attention.

While an engine is attached, a forward of the model waits until the engine's step is over, and vice versa.
"""

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn


def make_exclusive(model: nn.Module, turns: AbstractContextManager[Any]) -> Callable[[], None]:
    """Make every call of `model` enter `turns`, a lock, until the returned function is called.

    Calls traced by `torch.compile` do not: a trace must not hold a lock.
    """
    taken = _Taken()

    def before(*args: Any) -> None:
        turns.__enter__()
        taken.num += 1

    def after(*args: Any) -> None:
        if taken.num:  # not for a call that was under way when the hooks were added
            taken.num -= 1
            turns.__exit__(None, None, None)

    handles = [
        model.register_forward_pre_hook(_Hook(before), prepend=True),
        model.register_forward_hook(_Hook(after), always_call=True),
    ]

    def release() -> None:
        for handle in handles:
            handle.remove()

    return release


class _Taken(threading.local):
    """Number of turns that calls of the model hold in this thread."""

    num = 0


class _Hook:
    """Calls `fn`, but not in a trace; a copy of the model, or a pickle, gets a hook that does nothing."""

    def __init__(self, fn: Callable[..., None] | None = None):
        self._fn = fn

    def __call__(self, *args: Any) -> None:
        if self._fn is not None and not torch.compiler.is_compiling():
            self._fn(*args)

    def __reduce__(self) -> tuple[type["_Hook"], tuple[()]]:
        return _Hook, ()
