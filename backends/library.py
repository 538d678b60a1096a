"""Custom ops in torch's library `specdec`, and the scopes that answer a thread's calls of them."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import wraps
from typing import Any, Generic, ParamSpec, TypeVar

import torch

P = ParamSpec("P")
T = TypeVar("T")
LIBRARY = torch.library.Library("specdec", "FRAGMENT")
RUN: dict[str, Callable[..., Any]] = {}  # by the name of an op: what it runs


def define_op(schema: str, run: Callable[..., Any], fake: Callable[..., Any]) -> None:
    """Define `specdec::NAME(...)`. fake: makes results of the right shape and dtype.

    Plain Library calls: `torch.library.custom_op` would add microseconds to every call on a CPU.
    """
    name = schema.partition("(")[0]
    RUN[name] = run
    LIBRARY.define(schema)
    LIBRARY.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"specdec::{name}", fake, lib=LIBRARY)


def op(schema: str, fake: Callable[..., Any]) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Define an op that runs the decorated function, whose name calls the op from then on; see `define_op`."""

    def define(run: Callable[P, T]) -> Callable[P, T]:
        define_op(schema, run, fake)
        overload = getattr(torch.ops.specdec, schema.partition("(")[0]).default

        @wraps(run)
        def call(*args: P.args, **kwargs: P.kwargs) -> T:
            return overload(*args, **kwargs)

        return call

    return define


class Scope(Generic[T]):
    """The object that answers one kind of calls, of each thread its own. advice: ends the message of a call outside."""

    def __init__(self, kind: str, advice: str = ""):
        self._kind, self._advice = kind, advice
        self._current: ContextVar[T] = ContextVar(f"specdec_{kind}")

    @contextmanager
    def within(self, scope: T) -> Iterator[None]:
        """Within, calls of this thread go to `scope`."""
        token = self._current.set(scope)
        try:
            yield
        finally:
            self._current.reset(token)

    def find(self) -> T | None:
        """Return this thread's scope, or None."""
        return self._current.get(None)

    def get(self) -> T:
        """Return this thread's scope; RuntimeError where there is none."""
        scope = self._current.get(None)
        if scope is None:
            raise RuntimeError(
                f"an attached model's {self._kind} was called outside its engine: the model ran in one thread while "
                "the engine stepped in another, or its forward was compiled. While an engine works, use "
                f"engine.generate() or wait; detach() before compiling the model{self._advice}"
            )
        return scope
