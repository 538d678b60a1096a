"""Random numbers on the device, float64. Twin: `specdec.core.functional.sampling.uniform`."""

import torch
import triton
import triton.language as tl

from specdec.backends.triton.launch.sizes import next_power_of_2

# splitmix64 (Steele, Lea, Flood 2014), its unsigned constants written as the int64 of the same bits.
_GAMMA = tl.constexpr(0x9E3779B97F4A7C15 - (1 << 64))
_MIX_A = tl.constexpr(0xBF58476D1CE4E5B9 - (1 << 64))
_MIX_B = tl.constexpr(0x94D049BB133111EB - (1 << 64))


@triton.jit
def _shift_right(x, BITS: tl.constexpr):
    """Shift right logically: `>>` on int64 copies the sign bit, which the mask clears."""
    return (x >> BITS) & ((1 << (64 - BITS)) - 1)


@triton.jit
def _mix(x):
    """Apply splitmix64's finaliser; products wrap."""
    x = (x ^ _shift_right(x, 30)) * _MIX_A
    x = (x ^ _shift_right(x, 27)) * _MIX_B
    return x ^ _shift_right(x, 31)


@triton.jit(do_not_specialize=["first_stream"], do_not_specialize_on_alignment=["seeds"])
def _uniform_kernel(seeds, counters, out, first_stream, NUM: tl.constexpr, BLOCK: tl.constexpr):
    request = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    none = tl.zeros([BLOCK], tl.int64)
    state = _mix(none + tl.load(seeds + request) + _GAMMA)
    state = _mix(state + (none + tl.load(counters + request) + 1) * _GAMMA)
    state = _mix(state + (i + first_stream + 1).to(tl.int64) * _GAMMA)
    tl.store(out + request * NUM + i, _shift_right(state, 11).to(tl.float64) * (1.0 / 9007199254740992.0), mask=i < NUM)


def uniform(seeds: torch.Tensor, counters: torch.Tensor, first_stream: int, num: int) -> torch.Tensor:
    """Return streams first_stream .. first_stream+num-1 of (seed, counter), [bs, num] float64 in [0, 1).

    seeds, counters: [bs] int64.
    """
    out = torch.empty(seeds.shape[0], num, dtype=torch.float64, device=seeds.device)
    _uniform_kernel[(seeds.shape[0],)](seeds, counters, out, first_stream, NUM=num, BLOCK=next_power_of_2(num))
    return out
