"""Worker processes that compile kernels into Triton's cache during `attach`.

Triton's compiler holds the GIL for most of a kernel's time, and a first attach needs a hundred kernels. So a process
that sees no GPU imports torch and the compiler while the model is examined, and forks workers. Each serves one thread
of `ahead`, which then finds its kernel in the cache. Pools of `multiprocessing` would import the user's main module.
"""

import hashlib
import importlib
import inspect
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import Executor
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection, Pipe
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.driver import CudaLauncher
from triton.compiler import ASTSource
from triton.runtime import build
from triton.runtime.cache import get_cache_manager, triton_key
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

MOST = 16  # threads, and processes for them
DONE = "attached"  # a file in Triton's cache
_CURRENT: list["CompileWorkers | None"] = []  # of the running attach; None: all kernels are cached


@contextmanager
def compile_workers(name: str) -> Iterator[None]:
    """Let worker processes compile the kernels of `ahead` within the `with` block, unless Triton's cache, which has the
    kernels, notes that a block for `name` ended without error before. One block at a time. name: all that the choice of
    kernels depends on."""
    workers = None
    with suppress(OSError, ValueError):  # the cache may be read-only, or no process may start: both are optional
        notes = get_cache_manager(_digest(name))
        if not notes.get_file(DONE):
            workers = CompileWorkers(num_compiling())
        _CURRENT.append(workers)
    try:
        yield
    finally:
        if workers is not None:
            workers.close()
        _CURRENT.clear()
    if workers is not None:
        with suppress(OSError):
            notes.put(b"", DONE)


def kernels_are_cached() -> bool:
    """Return whether the same was attached before on this machine: loading kernels is faster than rehearsing then."""
    return None in _CURRENT


def _digest(name: str) -> str:
    """Return a digest of `name`, of the versions of torch and Triton, and of when the package's files were written."""
    walk = os.walk(Path(__file__).parents[3], followlinks=True)
    paths = [os.path.join(folder, file) for folder, _, files in walk for file in files if file.endswith(".py")]
    written = sorted((path, os.stat(path).st_mtime_ns) for path in paths)
    return hashlib.sha256(repr((torch.__version__, triton.__version__, name, written)).encode()).hexdigest()


def num_compiling() -> int:
    """Return how many kernels are compiled at once."""
    return min(MOST, os.cpu_count() or 1)


def compile_in_worker(compiling: Callable[[], Any]) -> None:
    """Compile, in a worker if there is one, the kernel that `compiling` would, into Triton's cache. compiling: the
    function that Triton's AsyncCompileMode submits to an executor. If the worker fails, `compiling` compiles."""
    for workers in filter(None, _CURRENT):
        workers.compile(compiling)


def close_with_attach(pool: Executor) -> None:
    """Make the running attach, if any, wait for `pool` before it ends its workers."""
    for workers in filter(None, _CURRENT):
        workers.pools.append(pool)


class CompileWorkers:
    """`num` worker processes. They end with `close`, or with this process. pools: executors that may wait for them."""

    def __init__(self, num: int):
        self.pools: list[Executor] = []
        pairs = [Pipe() for _ in range(num)]
        theirs = [their.fileno() for _, their in pairs]
        paths = {"PYTHONPATH": os.pathsep.join(sys.path), "TRITON_CACHE_DIR": triton.knobs.cache.dir}
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", __name__, *map(str, theirs)],
            pass_fds=theirs,
            env={**os.environ, **paths, "CUDA_VISIBLE_DEVICES": ""},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        self._idle: SimpleQueue[Connection] = SimpleQueue()
        for our, their in pairs:
            their.close()
            self._idle.put(our)

    def compile(self, compiling: Callable[[], Any]) -> None:
        """Compile what `compiling` would in a worker, if one is ready, and wait for it."""
        parts = inspect.getclosurevars(compiling).nonlocals
        if not {"src", "target", "options"} <= parts.keys():  # in another version of Triton
            return
        src = parts["src"]
        key = src.fn.cache_key  # depends on which kernels computed theirs before
        job = (src.fn, key, src.signature, src.constants, src.attrs, parts["target"], vars(parts["options"]))
        worker = self._idle.get()
        with suppress(Exception):  # the worker is gone, or the job cannot be pickled
            if worker.poll():
                worker.recv()
                worker.send(job)
                worker.poll(None)  # until it is ready again
        self._idle.put(worker)

    def close(self) -> None:
        """End the workers, once all `pools` are done."""
        for pool in self.pools:
            pool.shutdown()
        while not self._idle.empty():
            self._idle.get().close()
        self._process.kill()  # it may still be importing torch
        self._process.wait()


class _NamedTarget:
    """The part of a driver that Triton uses to compile."""

    def __init__(self, target: GPUTarget):
        self.get_current_target = lambda: target


def _find(module: str, name: str) -> Any:
    return getattr(importlib.import_module(module), name)


ForkingPickler.register(JITFunction, lambda kernel: (_find, (kernel.module, kernel.__name__)))


def _serve(connection: Connection) -> None:
    """Report that the worker is ready, then compile a job, and repeat until the other end closes."""
    with suppress(OSError):
        while True:
            connection.send(None)
            with suppress(Exception):  # the caller compiles it, and gets the error
                kernel, kernel.hash, signature, constants, attrs, target, options = connection.recv()
                driver.set_active(_NamedTarget(target))
                compiled = triton.compile(ASTSource(kernel, signature, constants, attrs), target, options)
                # Triton before 3.7 builds a C module for the launches, and caches it; 3.7 has none, and this fails.
                CudaLauncher(compiled.src, compiled.metadata)


def _main(ends: list[int]) -> None:
    """Fork a worker for each of `ends`, file descriptors, and wait for them."""
    triton_key()  # hashes Triton's compiler, once per process
    own = build._build
    build._build = lambda *args: own(*args[:-1], [*args[-1], "-O0"])  # halves the C compiler's time for launchers
    for end in ends:
        if os.fork() == 0:
            for other in set(ends) - {end}:
                os.close(other)
            _serve(Connection(end))
            os._exit(0)  # torch takes a second to shut down
    for end in ends:
        os.close(end)
    for _ in ends:
        os.wait()


if __name__ == "__main__":
    _main([int(end) for end in sys.argv[1:]])
