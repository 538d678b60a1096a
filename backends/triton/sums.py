"""A one-shot all-reduce: every rank writes its part into the memory of the others and adds up the parts it received.

No rank waits until others have read its part: buffers alternate between two places, and a rank that sends the part
after next has received the next part of each other rank, which sent that after reading this one. So a sum costs one
way between two GPUs. Parts are added in the order of ranks, in fp32, so results are bitwise equal on all ranks.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from specdec.backends.triton.launch.relaunch import CachedLaunch
from specdec.backends.triton.launch.sizes import cdiv

BLOCK_BYTES = 4096  # of a part; one program sends, sums and counts each block independently
_DTYPES = {torch.bfloat16: tl.bfloat16, torch.float32: tl.float32}


class PushedSum:
    """Sums over the ranks of one group. memory: uint8, this rank's part of the symmetric memory, `num_bytes` of it;
    addresses: of every rank's part, as mapped on this rank. All memory must be zero before the first sum of any rank.

    Sums must come in the same order on all ranks, on one stream at a time. most: the largest part in bytes, a multiple
    of BLOCK_BYTES.
    """

    def __init__(self, memory: torch.Tensor, addresses: Sequence[int], rank: int, most: int):
        self._memory = memory
        self._rank, self._size, self._most = rank, len(addresses), most
        blocks = most // BLOCK_BYTES
        self._counts = torch.zeros(blocks, dtype=torch.int32, device=memory.device)
        self._addresses = torch.tensor(addresses, dtype=torch.int64, device=memory.device)

    @staticmethod
    def num_bytes(size: int, most: int) -> int:
        """Return the bytes that a rank needs: two buffers for the part of each of `size` ranks, and their flags."""
        return 2 * size * most + 4 * size * (most // BLOCK_BYTES)

    @property
    def flags(self) -> torch.Tensor:
        """Return the flags [size * blocks] int32 that other ranks set here: the number of parts they have sent."""
        return self._memory[2 * self._size * self._most :].view(torch.int32)

    def takes(self, x: torch.Tensor) -> bool:
        """Return whether the size and dtype of `x` are supported."""
        return x.dtype in _DTYPES and 0 < x.numel() * x.element_size() <= self._most

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return the sum of all ranks' x, a new tensor."""
        x, out = x.contiguous(), torch.empty_like(x, memory_format=torch.contiguous_format)
        block = BLOCK_BYTES // x.element_size()
        constants = {
            "rank": self._rank,
            "size": self._size,
            "block": block,
            "most": self._most // x.element_size(),
            "num_blocks": self._most // BLOCK_BYTES,
            "flags_at": 2 * self._size * self._most,
            "dtype": _DTYPES[x.dtype],
        }
        grid = (cdiv(x.numel(), block),)
        _LAUNCH(grid, x, out, x.numel(), self._memory, self._addresses, self._counts, **constants)
        return out


@triton.jit(do_not_specialize=["numel"], do_not_specialize_on_alignment=["x", "out"])
def _pushed_sum_kernel(
    x,
    out,
    numel,
    memory,
    addresses,
    counts,
    rank: tl.constexpr,
    size: tl.constexpr,
    block: tl.constexpr,
    most: tl.constexpr,
    num_blocks: tl.constexpr,
    flags_at: tl.constexpr,
    dtype: tl.constexpr,
):
    """Sum `block` elements: send them, set the flags, wait for the other ranks' elements, add up."""
    pid = tl.program_id(0)
    at = pid * block + tl.arange(0, block)
    mask = at < numel
    count = tl.load(counts + pid) + 1
    place = (count % 2) * size
    own = tl.load(x + at, mask=mask, other=0.0)
    for other in tl.static_range(size):
        if other != rank:
            there = tl.load(addresses + other).to(tl.pointer_type(dtype))
            tl.store(there + (place + rank) * most + at, own, mask=mask)
    tl.debug_barrier()  # all threads have stored before one of them sets the flags
    for other in tl.static_range(size):
        if other != rank:
            flags = (tl.load(addresses + other) + flags_at).to(tl.pointer_type(tl.int32))
            tl.atomic_xchg(flags + rank * num_blocks + pid, count, sem="release", scope="sys")
    flags = (tl.load(addresses + rank) + flags_at).to(tl.pointer_type(tl.int32))
    for other in tl.static_range(size):
        if other != rank:
            seen = tl.atomic_add(flags + other * num_blocks + pid, 0, sem="acquire", scope="sys")
            while seen < count:
                seen = tl.atomic_add(flags + other * num_blocks + pid, 0, sem="acquire", scope="sys")
    tl.debug_barrier()  # one thread has seen the flags: now all may read
    here = tl.load(addresses + rank).to(tl.pointer_type(dtype))
    total = tl.zeros([block], dtype=tl.float32)
    for other in tl.static_range(size):
        if other == rank:
            total += own.to(tl.float32)
        else:
            total += tl.load(here + (place + other) * most + at, mask=mask, other=0.0, volatile=True).to(tl.float32)
    tl.store(out + at, total.to(dtype), mask=mask)
    tl.store(counts + pid, count)


_LAUNCH = CachedLaunch(_pushed_sum_kernel, num_warps=8)
