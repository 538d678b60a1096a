"""Custom ops in torch's library `specdec`, and the scopes that answer a thread's calls of them."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Generic, TypeVar

import torch

T = TypeVar("T")
LIBRARY = torch.library.Library("specdec", "FRAGMENT")
RUN: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {}  # by the name of an op: on CPUs, and on CUDA


def define_op(
    schema: str, run: Callable[..., Any], fake: Callable[..., Any], on_cuda: Callable[..., Any] | None = None
) -> None:
    """Define `specdec::NAME(...)`. run: on every device, or with on_cuda on CPUs; fake: makes results of the right
    shape and dtype. Plain Library calls: `torch.library.custom_op` would add microseconds to every call on a CPU."""
    name = schema.partition("(")[0]
    RUN[name] = run, on_cuda or run
    LIBRARY.define(schema)
    LIBRARY.impl(name, run, "CompositeExplicitAutograd" if on_cuda is None else "CPU")
    if on_cuda is not None:
        LIBRARY.impl(name, on_cuda, "CUDA")
    torch.library.register_fake(f"specdec::{name}", fake, lib=LIBRARY)


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
