"""Custom ops in torch's library `specdec`, and the scopes that hold their state for the current thread."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache, wraps
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Generic, ParamSpec, Protocol, TypeVar, cast

import torch

P = ParamSpec("P")
T = TypeVar("T")
KERNEL_DTYPES = (torch.bfloat16, torch.float16)  # supported by most kernels
LIBRARY = torch.library.Library("specdec", "FRAGMENT")
RUN: dict[str, Callable[..., Any]] = {}  # implementation of each op, by name


def define_op(schema: str, run: Callable[..., Any], fake: Callable[..., Any]) -> None:
    """Define the op `specdec::NAME` of `schema`, implemented by `run` on every device. fake: returns empty results of
    the right shapes and dtypes, for tracing. Plain Library calls: `torch.library.custom_op` would add microseconds to
    every call on a CPU."""
    name = schema.partition("(")[0]
    RUN[name] = run
    LIBRARY.define(schema)
    LIBRARY.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"specdec::{name}", fake, lib=LIBRARY)


@cache
def has_triton() -> bool:
    return find_spec("triton") is not None


class Op(Protocol[P, T]):
    """A callable op. twin: its reference in plain torch, which specifies it; kernels: see `op`."""

    twin: Callable[P, T]
    kernels: str

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> T: ...


def op(
    schema: str,
    fake: Callable[..., Any],
    kernels: str = "",
    takes: Callable[..., bool] = lambda x, *_: x.dtype in KERNEL_DTYPES,
) -> Callable[[Callable[P, T]], Op[P, T]]:
    """Define an op (see `define_op`) whose torch reference is the decorated function; the name then calls the op.

    kernels: a module of `backends.triton`, whose function of the op's name runs instead if the first argument is on
    CUDA, Triton is installed and `takes(*arguments)`; "": the decorated function always runs. takes: by default true
    if the first argument is bf16 or fp16.
    """
    name, module = schema.partition("(")[0], f"specdec.backends.triton.{kernels}"

    def define(twin: Callable[P, T]) -> Op[P, T]:
        def run_either(*args: Any) -> Any:
            is_ours = args[0].is_cuda and has_triton() and takes(*args)
            return getattr(import_module(module), name)(*args) if is_ours else twin(*args)  # type: ignore[call-arg]

        define_op(schema, run_either if kernels else twin, fake)
        overload = getattr(torch.ops.specdec, name).default

        @wraps(twin)
        def call(*args: P.args, **kwargs: P.kwargs) -> T:
            return overload(*args, **kwargs)

        made = cast(Op[P, T], call)
        made.twin, made.kernels = twin, kernels
        return made

    return define


class Scope(Generic[T]):
    """Holds the object that executes one `kind` of calls, for each thread. advice: ends the error of a call outside."""

    def __init__(self, kind: str, advice: str = ""):
        self._kind, self._advice = kind, advice
        self._current: ContextVar[T] = ContextVar(f"specdec_{kind}")

    @contextmanager
    def within(self, scope: T) -> Iterator[None]:
        """Within this context, calls from this thread go to `scope`."""
        token = self._current.set(scope)
        try:
            yield
        finally:
            self._current.reset(token)

    def find(self) -> T | None:
        """Return this thread's scope, or None."""
        return self._current.get(None)

    def get(self) -> T:
        """Return this thread's scope; RuntimeError if there is none."""
        scope = self._current.get(None)
        if scope is None:
            raise RuntimeError(
                f"an attached model's {self._kind} was called outside its engine: the model ran in one thread while "
                "the engine stepped in another, or its forward was compiled. While an engine works, use "
                f"engine.generate() or wait; detach() before compiling the model{self._advice}"
            )
        return scope
