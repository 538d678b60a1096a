"""LoRA products of rows with an adapter each, in two launches: shrink sums x @ A.T over chunks of K, expand applies B.

Twin: `specdec.backends.linear.lora.lora_twin`. A tile of rows loops over the adapters of its rows, and every row keeps
the result of its own, so its bits depend neither on the tile nor on the other rows. Chunks of K (split-K) fill the GPU
if there are few rows. The tile of weights is the first operand, as in `products`.
"""

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl

from specdec.backends.linear import MOST_PARTS
from specdec.backends.triton.launch.fences import fence_copies
from specdec.backends.triton.launch.relaunch import (
    INTERPRETED,
    cached_launch,
    follows_early,
    is_aligned,
    wait_for_others,
)
from specdec.backends.triton.launch.sizes import cdiv
from specdec.backends.triton.linear.parts import filled, picked
from specdec.backends.triton.linear.products import dot

CHUNK = 1024  # features of one partial sum; bits depend on it
BLOCK_M = 16  # rows of a tile, the minimum of tensor cores
TOGETHER = ((64, 1), (512, 8))  # (most rows of a batch, rows used per tile): more programs with fewer adapters each


@triton.jit
def _adapters_of(adapters, first, num_rows, TOGETHER: tl.constexpr, BLOCK_M: tl.constexpr):
    """Return the rows of a tile, the mask of those that count, and their adapters."""
    i = tl.arange(0, BLOCK_M)
    rows = (first + i).to(tl.int64)
    counts = (i < TOGETHER) & (rows < num_rows)
    return rows, counts, tl.load(adapters + rows, mask=counts, other=0)


@triton.jit
def _next_adapter(own, before):
    """Return a tile's smallest adapter above `before`; one more than the largest if there is none."""
    return tl.min(tl.where(own > before, own, tl.max(own, 0) + 1), 0)


@triton.jit
def chunk_sums(
    x,
    matrix,
    rows,
    counts,
    chunk,
    K,
    stride_x,
    CHUNK: tl.constexpr,
    RANK: tl.constexpr,
    UPCAST: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Return matrix [RANK, K] @ rows of x, over one chunk of K: [RANK, BLOCK_M] fp32, 0 for rows that do not count."""
    low, r = tl.zeros([RANK, BLOCK_M], tl.float32), tl.arange(0, RANK)
    for k in range(chunk * CHUNK, tl.minimum(K, (chunk + 1) * CHUNK), BLOCK_K):
        columns = k + tl.arange(0, BLOCK_K)
        inside = (columns < K)[None, :]
        w = tl.load(matrix + r[:, None] * K + columns[None, :], mask=inside, other=0.0)
        tile = tl.load(x + rows[:, None] * stride_x + columns[None, :], mask=counts[:, None] & inside, other=0.0)
        fence_copies(RANK)
        low = dot(w, tile.T, low, UPCAST)
    return low


@triton.jit
def low_rows(sums, rows, own, num_rows, NUM_CHUNKS: tl.constexpr, RANK: tl.constexpr, DTYPE: tl.constexpr):
    """Return x @ A.T of rows [BLOCK_M, RANK]: the sums of one part, chunks in order, rounded; 0 without an adapter."""
    low, r = tl.zeros([rows.shape[0], RANK], tl.float32), tl.arange(0, RANK)
    for chunk in tl.static_range(NUM_CHUNKS):
        at = sums + (chunk * num_rows + rows)[:, None] * RANK + r[None, :]
        low += tl.load(at, mask=(own > 0)[:, None], other=0.0)
    return low.to(DTYPE)


@triton.jit
def one_by_one(weights, low, own, n, size, UPCAST: tl.constexpr):
    """Return columns n of B @ low [BLOCK_N, BLOCK_M] fp32, with B [size, RANK] of each row's own adapter."""
    r, added = tl.arange(0, low.shape[1]), tl.zeros([n.shape[0], low.shape[0]], tl.float32)
    current, last = _next_adapter(own, 0), tl.max(own, 0)
    while current <= last:
        place = weights + ((current - 1).to(tl.int64) * size + n)[:, None] * low.shape[1] + r[None, :]
        w = tl.load(place, mask=(n < size)[:, None], other=0.0)
        fence_copies(n.shape[0])
        of_one = dot(w, low.T, tl.zeros([n.shape[0], low.shape[0]], tl.float32), UPCAST)
        added = tl.where((own == current)[None, :], of_one, added)
        current = _next_adapter(own, current)
    return added


@triton.jit
def plus(total, added, scales, own):
    """Return total + scale * added, each row with the scale of its adapter; `total` of rows without one. All fp32."""
    scale = tl.load(scales + own - 1, mask=own > 0, other=0.0)
    return tl.where((own > 0)[None, :], tl.fma(added, scale[None, :], total), total)


@triton.jit(do_not_specialize=["num_rows", "K", "stride_x"])
def _shrink_kernel(
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
    TOGETHER: tl.constexpr,
    UPCAST: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):
    """Compute sums [parts, chunks, num_rows, RANK] fp32 of one tile of rows, chunk of K and part, for rows with an
    adapter. K and stride_x come in units of UNIT, so that the compiler knows their alignment.
    """
    wait_for_others(PDL, True)
    K, stride_x = K * UNIT, stride_x * UNIT
    chunk, part = tl.program_id(1), tl.program_id(2)
    rows, counts, own = _adapters_of(adapters, tl.program_id(0) * TOGETHER, num_rows, TOGETHER, BLOCK_M)
    weights, r = picked(a0, a1, a2, part), tl.arange(0, RANK)
    total = tl.zeros([RANK, BLOCK_M], tl.float32)
    current, last = _next_adapter(own, 0), tl.max(own, 0)
    while current <= last:
        matrix = weights + (current - 1) * RANK * K
        low = chunk_sums(x, matrix, rows, counts, chunk, K, stride_x, CHUNK, RANK, UPCAST, BLOCK_M, BLOCK_K)
        total = tl.where((own == current)[None, :], low, total)
        current = _next_adapter(own, current)
    at = sums + ((part * tl.num_programs(1) + chunk).to(tl.int64) * num_rows + rows)[None, :] * RANK + r[:, None]
    tl.store(at, total, mask=(own > 0)[None, :])


@triton.jit(do_not_specialize=["num_rows", "stride_y", "N", "n0", "n1", "n2"])
def _expand_kernel(
    y,
    b0,
    b1,
    b2,
    scales0,
    scales1,
    scales2,
    adapters,
    sums,
    out,
    num_rows,
    stride_y,
    N,
    n0,
    n1,
    n2,
    UNIT: tl.constexpr,
    NUM_CHUNKS: tl.constexpr,
    RANK: tl.constexpr,
    TOGETHER: tl.constexpr,
    UPCAST: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PDL: tl.constexpr,
):
    """Compute columns of one part of out [num_rows, N]: y + scale * B @ sums. n0, n1, n2: columns of the parts; columns
    after them are a part without adapters. Sizes and stride_y come in units of UNIT."""
    wait_for_others(PDL, True)
    N, stride_y, n0, n1, n2 = N * UNIT, stride_y * UNIT, n0 * UNIT, n1 * UNIT, n2 * UNIT
    block, end0 = tl.program_id(1), tl.cdiv(n0, BLOCK_N)
    end1 = end0 + tl.cdiv(n1, BLOCK_N)
    end2 = end1 + tl.cdiv(n2, BLOCK_N)
    part = (block >= end0).to(tl.int32) + (block >= end1).to(tl.int32) + (block >= end2).to(tl.int32)
    block -= tl.where(part == 0, 0, picked(end0, end1, end2, part - 1))
    begin = tl.where(part == 0, 0, picked(n0, n0 + n1, n0 + n1 + n2, part - 1))
    size = tl.where(part == 3, N - begin, picked(n0, n1, n2, part))
    rows, counts, own = _adapters_of(adapters, tl.program_id(0) * TOGETHER, num_rows, TOGETHER, BLOCK_M)
    own = tl.where(part < 3, own, 0)
    weights, scales = picked(b0, b1, b2, part), picked(scales0, scales1, scales2, part)
    n = block * BLOCK_N + tl.arange(0, BLOCK_N)
    columns = begin + n
    mask = (n < size)[:, None] & counts[None, :]
    total = tl.load(y + rows[None, :] * stride_y + columns[:, None], mask=mask, other=0.0).to(tl.float32)
    sums += part.to(tl.int64) * NUM_CHUNKS * num_rows * RANK
    low = low_rows(sums, rows, own, num_rows, NUM_CHUNKS, RANK, out.dtype.element_ty)
    total = plus(total, one_by_one(weights, low, own, n, size, UPCAST), scales, own)
    tl.store(out + rows[None, :] * N + columns[:, None], total.to(out.dtype.element_ty), mask=mask)


def block_k(rank: int) -> int:
    """Return the number of A's features in one step of its product."""
    return min(128, 4096 // rank)


def _launch(
    kernel: Any, grid: Sequence[int], args: Sequence[Any], constants: dict[str, Any], num_stages: int = 3
) -> None:
    options = {"num_warps": 4, "num_stages": num_stages, "launch_pdl": constants["PDL"]}
    if is_aligned(*(t for t in args if isinstance(t, torch.Tensor))):
        cached_launch(kernel, **options)(grid, *args, **constants)
    else:
        kernel[tuple(grid)](*args, **constants, **options)


def _unit(*sizes: int) -> int:
    return 8 if all(size % 8 == 0 for size in sizes) else 1


def lora(
    x: torch.Tensor,
    y: torch.Tensor,
    a: Sequence[torch.Tensor],
    b: Sequence[torch.Tensor],
    scales: Sequence[torch.Tensor],
    adapters: torch.Tensor,
) -> torch.Tensor:
    """See `specdec.backends.linear.lora.lora`: rows x [T, K] and y [T, N], their adapters [T] int64; [T, N]."""
    assert len(a) <= MOST_PARTS and x.stride(1) == y.stride(1) == 1 and adapters.is_contiguous(), "rows are dense"
    (num_rows, K), N, rank = x.shape, y.shape[1], a[0].shape[1]
    out = torch.empty(num_rows, N, dtype=y.dtype, device=y.device)
    if num_rows == 0:
        return out
    num_chunks, block, is_early = cdiv(K, CHUNK), 128 if rank < 64 else 64, follows_early(num_rows)
    sums = torch.empty(len(a), num_chunks, num_rows, rank, dtype=torch.float32, device=x.device)
    together = next((count for most, count in TOGETHER if num_rows <= most), BLOCK_M)
    tiles, unit = cdiv(num_rows, together), _unit(K, x.stride(0))
    shape = {"RANK": rank, "TOGETHER": together, "UPCAST": INTERPRETED, "BLOCK_M": BLOCK_M}
    args: tuple[Any, ...] = (x, *filled(a), adapters, sums, num_rows, K // unit, x.stride(0) // unit)
    _launch(
        _shrink_kernel,
        (tiles, num_chunks, len(a)),
        args,
        {"UNIT": unit, "CHUNK": CHUNK, **shape, "BLOCK_K": block_k(rank), "PDL": is_early},
        num_stages=5,
    )
    sizes = [*(of_b.shape[1] for of_b in b), *[0] * (MOST_PARTS - len(b))]
    unit = _unit(N, y.stride(0), *sizes)
    blocks = sum(cdiv(size, block) for size in (*sizes, N - sum(sizes)))
    numbers = num_rows, *(size // unit for size in (y.stride(0), N, *sizes))
    args = y, *filled(b), *filled(scales), adapters, sums, out, *numbers
    constants = {"UNIT": unit, "NUM_CHUNKS": num_chunks, **shape, "BLOCK_N": block, "PDL": is_early}
    _launch(_expand_kernel, (tiles, blocks), args, constants)
    return out
