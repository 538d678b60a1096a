"""Launching a compiled kernel again with its first arguments exchanged, without Triton looking at all of them again.

A launch from Python costs 20 µs and more, most of it the search for the kernel that fits the arguments. The layers of
one forward launch attention alike: all but q, out, K, V and sinks stays the same.
"""

import os
from collections.abc import Mapping, Sequence
from typing import Any

import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET", "0") == "1"  # what triton.jit looks at, too: on import


class Relaunch:
    """Repeats the launch kernel[grid](*args, **constants) of a JIT function, which has returned `compiled`."""

    def __init__(
        self, kernel: Any, compiled: Any, grid: Sequence[int], args: Sequence[Any], constants: Mapping[str, Any]
    ):
        self._args = [*args, *(constants[name] for name in kernel.arg_names[len(args) :])]
        self._compiled = compiled
        self._grid = (*grid, 1, 1)[:3]

    def __call__(self, *first: Any) -> None:
        """Launch with `first` in place of the first arguments: tensors of the same dtype, strides and alignment."""
        self._args[: len(first)] = first
        _launch(self._compiled, self._grid, first[0].device, self._args)


class CachedLaunch:
    """Launches a JIT function, whose compiled kernel is looked for once for each device, dtypes and constants.

    For kernels that specialise on nothing else: neither on integers, which must fit 32 bits, nor on how far pointers
    are aligned, unless those that do are always aligned alike. One lies beside its kernel, as Triton's own cache does.
    """

    def __init__(self, kernel: Any):
        self._kernel = kernel
        self._compiled: dict[tuple[object, ...], Any] = {}

    def __call__(self, grid: Sequence[int], *args: Any, **constants: Any) -> None:
        """kernel[grid](*args, **constants); constants in the order of the kernel's signature, after all of `args`."""
        kinds = [a.dtype if isinstance(a, torch.Tensor) else type(a) for a in args]
        device = next(a.device for a in args if isinstance(a, torch.Tensor))
        key = (device, *kinds, *constants.values())
        if key in self._compiled:
            _launch(self._compiled[key], (*grid, 1, 1)[:3], device, (*args, *constants.values()))
            return
        compiled = self._kernel[tuple(grid)](*args, **constants)
        if compiled is not None:  # the interpreter compiles nothing
            self._compiled[key] = compiled


def _launch(compiled: Any, grid: Sequence[int], device: torch.device, args: Sequence[Any]) -> None:
    """What compiled[grid](*args) does, but for the hooks of Triton's own profiler and what is made for them."""
    stream = torch._C._cuda_getCurrentRawStream(device.index)
    compiled.run(*grid, stream, compiled.function, compiled.packed_metadata, None, None, None, *args)


def is_aligned(*tensors: torch.Tensor | None) -> bool:
    """Whether Triton takes all of `tensors` for aligned, as it does nearly always; others get kernels of their own."""
    return all(t is None or t.data_ptr() % 16 == 0 for t in tensors)
