"""Relaunches a compiled kernel with new first arguments, so that Triton need not inspect all arguments again.

A launch from Python costs 20 µs or more, most of it to find the compiled kernel that fits the arguments. The layers of
one forward launch attention with equal arguments, except q, out, K, V and sinks.
"""

import os
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from specdec.backends.triton.launch.ahead import is_rehearsing

# Programmatic dependent launch: a kernel is launched before the previous one has ended. SPECDEC_PDL=0 turns it off.
PDL = os.environ.get("SPECDEC_PDL", "1") == "1"
EARLY_ROWS = 128  # at most, of products and norms that use it
OUR_ROWS = 64  # at most, of products that always run our kernels: larger ones may run cuBLAS
INTERPRETED = os.environ.get("TRITON_INTERPRET", "0") == "1"  # triton.jit reads it too, on import


class Relaunch:
    """Repeats the launch kernel[grid](*args, **constants) of a JIT function, which returned `compiled`."""

    def __init__(
        self, kernel: Any, compiled: Any, grid: Sequence[int], args: Sequence[Any], constants: Mapping[str, Any]
    ):
        self._args = [*args, *(constants[name] for name in kernel.arg_names[len(args) :])]
        self._compiled = _loaded(compiled)
        self._grid = (*grid, 1, 1)[:3]

    def __call__(self, *first: Any) -> None:
        """Launch with `first` in place of the first arguments: tensors of the same dtype, strides and alignment."""
        self._args[: len(first)] = first
        _launch(self._compiled, self._grid, first[0].device, self._args)


class CachedLaunch:
    """Launches a JIT function and looks up its compiled kernel only once per device, dtypes and constants.

    For kernels that specialise on nothing else: not on integers, which must fit 32 bits, and not on the alignment of
    pointers, unless those pointers are always aligned equally. An instance lives as long as its kernel, like Triton's
    own cache.
    """

    def __init__(
        self,
        kernel: Any,
        num_warps: int = 4,
        num_stages: int = 3,
        maxnreg: int | None = None,
        launch_pdl: bool = False,
    ):
        self._kernel = kernel
        self._options = {"num_warps": num_warps, "num_stages": num_stages, "maxnreg": maxnreg, "launch_pdl": launch_pdl}
        self._compiled: dict[tuple[object, ...], Any] = {}

    def __call__(self, grid: Sequence[int], *args: Any, **constants: Any) -> None:
        """Launch kernel[grid](*args, **constants); constants in the order of the signature, after all of `args`."""
        kinds = [a.dtype if isinstance(a, torch.Tensor) else type(a) for a in args]
        device = next(a.device for a in args if isinstance(a, torch.Tensor))
        key = (device, *kinds, *constants.values())
        if key in self._compiled:
            _launch(self._compiled[key], (*grid, 1, 1)[:3], device, (*args, *constants.values()))
            return
        compiled = self._kernel[tuple(grid)](*args, **constants, **self._options)
        if compiled is not None:  # the interpreter compiles nothing; a rehearsal gets it later
            self._compiled[key] = _loaded(compiled)


@cache
def cached_launch(
    kernel: Any, num_warps: int, num_stages: int = 3, launch_pdl: bool = False, maxnreg: int | None = None
) -> CachedLaunch:
    """Return the one `CachedLaunch` of a kernel with these options."""
    return CachedLaunch(kernel, num_warps, num_stages, maxnreg, launch_pdl)


def _loaded(compiled: Any) -> Any:
    """Return a kernel, from its future if Triton's launch has returned that of a kernel compiled ahead."""
    return compiled.result() if hasattr(compiled, "result") else compiled


def _launch(compiled: Any, grid: Sequence[int], device: torch.device, args: Sequence[Any]) -> None:
    """Launch as compiled[grid](*args) does, without the hooks of Triton's profiler and their metadata."""
    if is_rehearsing():
        return
    stream = torch._C._cuda_getCurrentRawStream(device.index)
    compiled.run(*grid, stream, compiled.function, compiled.packed_metadata, None, None, None, *args)


def follows_early(num_rows: int = 1) -> bool:
    """Return whether kernels that wait for the previous one are launched before it ends (PDL, from Hopper on).

    num_rows: of a product, or of a norm before one; those of many rows run too long to gain from it.
    """
    return PDL and num_rows <= EARLY_ROWS and capability() >= 90


def early(num_rows: int = 1) -> dict[str, bool]:
    """Return the arguments of a launch whose kernel begins with `wait_for_others(PDL, ...)`; see `follows_early`."""
    is_early = follows_early(num_rows)
    return {"PDL": is_early, "launch_pdl": is_early}


def early_and_leading(num_rows: int) -> dict[str, bool]:
    """Return the arguments of a launch whose kernel begins with `wait_for_others(PDL, LEADS)` and may run before a
    product.

    num_rows: of that product, or more.
    """
    is_early = early(num_rows)
    return {**is_early, "LEADS": is_early["PDL"] and num_rows <= OUR_ROWS}


@triton.jit
def wait_for_others(PDL: tl.constexpr, LEADS: tl.constexpr):
    """Wait until all previous kernels have ended. LEADS: let the next kernel start now. It must be ours, which waits as
    well, or be launched without PDL; LEADS is not for kernels before a library's, such as cuBLAS's."""
    if PDL:
        if LEADS:
            gdc_launch_dependents()
        gdc_wait()


def capability() -> int:
    """Return the compute capability of the GPU, such as 90 for Hopper; 0 without an NVIDIA GPU."""
    return 0 if INTERPRETED else _capability(triton.runtime.driver.active.get_current_device())


@cache
def _capability(device: int) -> int:
    """device: the current one."""
    target = triton.runtime.driver.active.get_current_target()
    return target.arch if target.backend == "cuda" else 0


def is_aligned(*tensors: torch.Tensor | None) -> bool:
    """Return whether Triton treats all `tensors` as aligned, as nearly always; unaligned ones need other variants."""
    return all(t is None or t.data_ptr() % 16 == 0 for t in tensors)
