"""LoRA's shrink for few rows, sums of x @ A.T over chunks of K: a program gathers up to BLOCK_M rows of one adapter, so
that A is read once for all of them.

Twin: `specdec.backends.linear.lora.lora_twin`; sums are those of `lora`.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from specdec.backends.triton.launch.relaunch import INTERPRETED, cached_launch, follows_early
from specdec.backends.triton.launch.sizes import cdiv, next_power_of_2
from specdec.backends.triton.linear.lora import BLOCK_M, CHUNK, block_k, chunk_sums
from specdec.backends.triton.linear.parts import filled, picked


@triton.jit
def _own_tile(adapters, num_rows, number, ROWS: tl.constexpr, BLOCK_M: tl.constexpr):
    """Return the adapter of tile `number`, its rows [BLOCK_M] and the mask of those that count; adapter 0 and no rows
    if there is no such tile.

    A tile has up to BLOCK_M rows of one adapter; tiles are in the order of their first rows.
    """
    r, i = tl.arange(0, ROWS), tl.arange(0, BLOCK_M)
    own = tl.load(adapters + r, mask=r < num_rows, other=0).to(tl.int32)
    place = tl.zeros([ROWS], tl.int32)  # among the rows of its adapter
    for first in range(0, num_rows, BLOCK_M):
        others = tl.load(adapters + first + i, mask=first + i < num_rows, other=0).to(tl.int32)
        is_before = (own[:, None] == others[None, :]) & (first + i[None, :] < r[:, None])
        place += tl.sum(is_before.to(tl.int32), 1)
    begins = ((own > 0) & (place % BLOCK_M == 0)).to(tl.int32)
    is_first = (begins > 0) & (tl.cumsum(begins, 0) == number + 1)
    adapter, begin = tl.sum(tl.where(is_first, own, 0), 0), tl.sum(tl.where(is_first, place, 0), 0)
    is_at = ((own > 0) & (own == adapter))[:, None] & (place[:, None] - begin == i[None, :])
    return adapter, tl.sum(tl.where(is_at, r[:, None], 0), 0), tl.sum(is_at.to(tl.int32), 0) > 0


@triton.jit(do_not_specialize=["num_rows", "K", "stride_x"], do_not_specialize_on_alignment=["adapters"])
def _shrink_by_adapter_kernel(
    x,
    a0,
    a1,
    a2,
    adapters,
    sums,
    num_rows,
    K,
    stride_x,
    UNIT: tl.constexpr,
    CHUNK: tl.constexpr,
    RANK: tl.constexpr,
    UPCAST: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):
    """Compute sums [parts, chunks, num_rows, RANK] fp32 of one tile of rows of one adapter, chunk of K and part.

    K and stride_x come in units of UNIT, so that the compiler knows their alignment.
    """
    K, stride_x = K * UNIT, stride_x * UNIT
    chunk, part, r = tl.program_id(1), tl.program_id(2), tl.arange(0, RANK)
    adapter, rows, counts = _own_tile(adapters, num_rows, tl.program_id(0), ROWS, BLOCK_M)
    if PDL:
        gdc_wait()  # for x; `adapters` were complete before the kernel that writes x
        gdc_launch_dependents()  # only now: the next kernel reads x before it waits for this launch
    if adapter == 0:
        return
    matrix = picked(a0, a1, a2, part) + (adapter - 1).to(tl.int64) * RANK * K
    low = chunk_sums(x, matrix, rows, counts, chunk, K, stride_x, CHUNK, RANK, UPCAST, BLOCK_M, BLOCK_K)
    at = sums + ((part * tl.num_programs(1) + chunk).to(tl.int64) * num_rows + rows)[None, :] * RANK + r[:, None]
    tl.store(at, low, mask=counts[None, :])


def sums_by_adapter(x: torch.Tensor, a: Sequence[torch.Tensor], adapters: torch.Tensor) -> torch.Tensor:
    """Return sums [parts, chunks, T, R] fp32 of aligned rows x [T, K] that have an adapter.

    With PDL, the next launch may start before this one has ended.
    """
    (num_rows, K), (num_adapters, rank, _) = x.shape, a[0].shape
    num_chunks, unit = cdiv(K, CHUNK), 8 if K % 8 == 0 and x.stride(0) % 8 == 0 else 1
    sums = torch.empty(len(a), num_chunks, num_rows, rank, dtype=torch.float32, device=x.device)
    most_tiles = min(num_rows, num_adapters + num_rows // BLOCK_M)
    constants = {"UNIT": unit, "CHUNK": CHUNK, "RANK": rank, "UPCAST": INTERPRETED}
    constants |= {"ROWS": max(BLOCK_M, next_power_of_2(num_rows)), "BLOCK_M": BLOCK_M}
    constants |= {"BLOCK_K": block_k(rank), "PDL": (is_early := follows_early())}
    args = (x, *filled(a), adapters, sums, num_rows, K // unit, x.stride(0) // unit)
    run = cached_launch(_shrink_by_adapter_kernel, num_warps=4, launch_pdl=is_early)
    run((most_tiles, num_chunks, len(a)), *args, **constants)
    return sums
