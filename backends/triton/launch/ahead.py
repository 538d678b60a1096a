"""Compiles kernels on threads, ahead of the first run of the code that launches them.

Compiling a kernel takes 0.2-0.5 s, in worker processes during a first attach (see `workers`), and code that runs
normally compiles its kernels one after another. So it is rehearsed first: it runs without its launches, which only
collect the kernels to compile. Tensors that a kernel would have written are zero, and so are indices that torch uses.
Collectives do nothing in a rehearsal: ranks may rehearse different code, or fail in it.
"""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import torch
import triton
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only
from triton.runtime.jit import JITFunction

from specdec.backends import comm
from specdec.backends.library import RUN
from specdec.backends.triton.launch.workers import close_with_attach, compile_in_worker, num_compiling

PACKAGE = __name__.partition(".")[0]
_aten = torch.ops.aten
EMPTY = (
    _aten.empty.memory_format,
    _aten.empty_strided.default,
    _aten.empty_like.default,
    _aten.new_empty.default,
    _aten.new_empty_strided.default,
)
INDICES = ("index", "indices")  # names of arguments


class _Thread(threading.local):
    is_rehearsing = False


_thread = _Thread()
_rehearsal = threading.Lock()  # one at a time: each replaces Triton's launches and restores them


def is_rehearsing() -> bool:
    """Return whether this thread skips launches."""
    return _thread.is_rehearsing


@contextmanager
def compiling_ahead(device: torch.device, package: str = PACKAGE) -> Iterator[Callable[[], int]]:
    """Make this thread's launches of kernels of `package` launch nothing and return None, within the `with` block.

    Threads compile the kernels and load them on `device`, also after the block has ended: a launch waits for its own
    kernel, and raises its compile error. Yields a function that returns how many kernels were not in memory so far.
    """
    pool = _Workers(device, num_compiling())
    close_with_attach(pool)
    try:
        with _Unawaited(pool), _without_launches(package), _Zeros():
            yield lambda: pool.num_submitted
    finally:
        pool.shutdown(wait=False)


class _Unawaited(triton.AsyncCompileMode):
    """Ends without waiting for pending compilations."""

    def submit(self, key: Any, compile_fn: Callable[[], Any], finalize_fn: Callable[[Any], None]) -> Any:
        kernel = super().submit(key, compile_fn, finalize_fn)
        finalize_fn(kernel)  # else launches would not find it before it is compiled, in Triton before 3.7
        return kernel

    def __exit__(self, *error: Any) -> None:
        self.raw_futures: list[Future[Any]] = []
        super().__exit__(*error)


@contextmanager
def _without_launches(package: str) -> Iterator[None]:
    """Compile kernels of `package` instead of launching them, in this thread only."""
    with _rehearsal:
        run = JITFunction.run

        def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
            if not (_thread.is_rehearsing and self.module.partition(".")[0] == package):
                return run(self, *args, grid=grid, warmup=warmup, **kwargs)
            run(self, *args, grid=grid, warmup=True, **kwargs)
            return None

        JITFunction.run = compile_only
        _thread.is_rehearsing = True
        try:
            yield
        finally:
            _thread.is_rehearsing = False
            JITFunction.run = run


class _Zeros(TorchDispatchMode):
    """Zeroes allocations, indices and tensors of other ranks, also within our own ops; indexed writes write nothing."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in EMPTY:
            return func(*args, **kwargs).zero_()
        if func in comm.FAKES:
            return comm.FAKES[func](*args, **kwargs).zero_()
        if func.namespace == PACKAGE:
            with self:  # which is off while it handles a call
                return RUN[func.overloadpacket.__name__](*args, **kwargs)
        if not any(argument.name in INDICES for argument in func._schema.arguments):
            return func(*args, **kwargs)
        if func._schema.is_mutable:
            return args[0]
        names = [argument.name for argument in func._schema.arguments]
        args = [_zeros(arg) if name in INDICES else arg for name, arg in zip(names, args, strict=False)]
        return func(*args, **{name: _zeros(arg) if name in INDICES else arg for name, arg in kwargs.items()})


def _zeros(index: Any) -> Any:
    """Return zeros like `index`, a tensor or a list of tensors; masks are kept."""
    is_index = lambda t: not t.is_floating_point() and t.dtype != torch.bool  # noqa: E731
    return tree_map_only(torch.Tensor, lambda t: torch.zeros_like(t) if is_index(t) else t, index)


class _Workers(ThreadPoolExecutor):
    """Threads whose current device is `device`; they also load compiled kernels, with their launchers."""

    def __init__(self, device: torch.device, num: int):
        index = torch.cuda.current_device() if device.index is None else device.index
        super().__init__(num, "specdec-compile", torch.cuda.set_device, (index,))
        self.num_submitted = 0

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        def loaded() -> Any:
            compile_in_worker(fn)
            kernel = fn(*args, **kwargs)
            kernel.run  # noqa: B018 (loads it)
            return kernel

        self.num_submitted += 1
        return super().submit(loaded)
