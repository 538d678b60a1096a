"""The kernel of `fp8` and `packed`: products of rows and quantised weights, in up to three parts. See `parts`.

Twins: `specdec.backends.linear.fp8.fp8_linear` and `specdec.backends.linear.packed.packed_linear`.
"""

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl

from specdec.backends.linear import MOST_PARTS
from specdec.backends.triton.launch.fences import fence_copies
from specdec.backends.triton.launch.relaunch import INTERPRETED, cached_launch, follows_early, wait_for_others
from specdec.backends.triton.launch.shared_memory import shared_memory
from specdec.backends.triton.launch.sizes import cdiv
from specdec.backends.triton.linear import few
from specdec.backends.triton.linear.gates import gated
from specdec.backends.triton.linear.parts import Tile, Tiles, filled, finished, part_of, picked, with_diagonal
from specdec.backends.triton.linear.products import dot
from specdec.backends.triton.linear.unpack import eighths_of_words, in_order, scales_of


@triton.jit
def _fp8_added(sums, rows, row_scale, weight, scales, has_row, has_column, GROUP: tl.constexpr, UPCAST: tl.constexpr):
    """Return `sums` [rows, columns] plus a product of blocks; scales: for each row a pointer to the columns' scale, if
    blocks have scales."""
    w = tl.load(weight[:, None] + tl.arange(0, 128)[None, :], mask=has_column[:, None], other=0.0)
    if GROUP == 0:
        scale = row_scale * tl.load(scales, mask=has_row, other=0.0)
    fence_copies(rows.shape[0])
    product = dot(rows, w.T, tl.zeros_like(sums), UPCAST)
    if GROUP == 0:
        product *= scale[:, None]
    return sums + product


@triton.jit
def _by_channel(sums, row_scales, scales, is_row, is_column):
    """Return `sums` [rows, columns] times the scales of rows and of columns; row_scales, scales: pointers to them."""
    of_row, of_column = tl.load(row_scales, mask=is_row, other=0.0), tl.load(scales, mask=is_column, other=0.0)
    return sums * (of_row[:, None] * of_column[None, :])


@triton.jit
def _packed_added(sums, rows, words, scales, block, size, has_column, GROUP: tl.constexpr, UPCAST: tl.constexpr):
    """Return `sums` [columns, rows] plus a product of blocks; words: pointers; scales: pointers to the first scales."""
    inside = has_column[:, None]
    packed = tl.load(words[:, None] + tl.arange(0, 16)[None, :], mask=inside, other=0)
    of_block = scales_of(scales[:, None], inside, block[:, None], size, GROUP, True)
    w = in_order(eighths_of_words(packed, of_block, GROUP, rows.dtype, UPCAST))
    fence_copies(packed.shape[0])
    return dot(w, rows.T, sums, UPCAST)


@triton.jit(do_not_specialize=["num_rows", "num_blocks", "N", "n0", "n1", "n2", "stride"])
def _quantised_kernel(
    x,
    scales_of_rows,
    w0,
    w1,
    w2,
    s0,
    s1,
    s2,
    b0,
    b1,
    b2,
    out,
    num_rows,
    num_blocks,
    N,
    n0,
    n1,
    n2,
    stride,
    GROUP: tl.constexpr,
    ACTIVATION: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    UPCAST: tl.constexpr,
    IS_UNEVEN: tl.constexpr,
    SPLITS: tl.constexpr,
    PACK: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    NUM_STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    """Compute BLOCK_M rows and BLOCK_N columns of one part of out [num_rows, N]. N, n0 to n2 and stride in units of 16.

    num_blocks: of 128 features. GROUP: features per scale of 4-bit weights; for FP8, 0 for scales by block, -1 by
    channel. ACTIVATION: "" for plain products; else the first part is gate, the second is up. IS_UNEVEN: the last
    splits of K may be shorter.
    """
    N, n0, n1, n2, stride = N * 16, n0 * 16, n1 * 16, n2 * 16, stride * 16
    DTYPE: tl.constexpr = out.dtype.element_ty
    part, number = part_of(tl.program_id(1), n0, n1, BLOCK_N)
    begin, size = picked(0, n0, n0 + n1, part), picked(n0, n1, n2, part)
    weight, scales, bias = picked(w0, w1, w2, part), picked(s0, s1, s2, part), picked(b0, b1, b2, part)
    i, j = tl.arange(0, PACK * BLOCK_N), tl.arange(0, PACK * BLOCK_M)
    n, m = (number * BLOCK_N + i % BLOCK_N).to(tl.int64), (tl.program_id(0) * BLOCK_M + j % BLOCK_M).to(tl.int64)
    is_column, is_row = n < size, m < num_rows
    split = tl.cdiv(num_blocks, SPLITS)
    wait_for_others(PDL, False)
    if GROUP <= 0:
        total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    else:
        total = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    up = total
    for first in range(0, SPLITS, PACK):
        of_n, of_m = (first + i // BLOCK_N) * split, (first + j // BLOCK_M) * split
        rows = x + m * stride + of_m * 128
        if GROUP <= 0:
            row_scales, at = scales_of_rows + m * num_blocks + of_m, (n * num_blocks + of_n) * 128
            of_scale = number * BLOCK_N // 128 * num_blocks + of_m
            sums = tl.zeros([PACK * BLOCK_M, PACK * BLOCK_N], tl.float32)
        else:
            at = (of_n * size + n) * 16
            sums = tl.zeros([PACK * BLOCK_N, PACK * BLOCK_M], tl.float32)
        up_sums = sums
        for t in tl.range(0, split, num_stages=NUM_STAGES):
            has_n, has_m = is_column, is_row
            if IS_UNEVEN:
                has_n, has_m = has_n & (of_n + t < num_blocks), has_m & (of_m + t < num_blocks)
            block = tl.load((rows + t * 128)[:, None] + tl.arange(0, 128)[None, :], mask=has_m[:, None], other=0.0)
            if GROUP <= 0:
                w, s, row_scale = at + t * 128, of_scale + t, 1.0
                if GROUP == 0:
                    row_scale = tl.load(row_scales + t, mask=has_m, other=0.0)
                sums = _fp8_added(sums, block, row_scale, weight + w, scales + s, has_m, has_n, GROUP, UPCAST)
                if ACTIVATION != "":
                    up_sums = _fp8_added(up_sums, block, row_scale, w1 + w, s1 + s, has_m, has_n, GROUP, UPCAST)
            else:
                w, of_block = at + t * size * 16, of_n + t
                sums = _packed_added(sums, block, weight + w, scales + n, of_block, size, has_n, GROUP, UPCAST)
                if ACTIVATION != "":
                    up_sums = _packed_added(up_sums, block, w1 + w, s1 + n, of_block, size, has_n, GROUP, UPCAST)
        total = with_diagonal(total, sums, PACK)
        if ACTIVATION != "":
            up = with_diagonal(up, up_sums, PACK)
    n, m = number * BLOCK_N + tl.arange(0, BLOCK_N), tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    if GROUP == -1:
        total = _by_channel(total, scales_of_rows + m, scales + n, m < num_rows, n < size)
        if ACTIVATION != "":
            up = _by_channel(up, scales_of_rows + m, s1 + n, m < num_rows, n < size)
    if GROUP <= 0:
        total, up = total.T, up.T
    product = finished(total, bias, n, size, HAS_BIAS, DTYPE)
    if ACTIVATION != "":
        product = gated(product, finished(up, b1, n, size, HAS_BIAS, DTYPE), ACTIVATION)
    at = out + m.to(tl.int64)[None, :] * N + (begin + n)[:, None]
    tl.store(at, product, mask=(m < num_rows)[None, :] & (n < size)[:, None])


def launch(
    x: torch.Tensor,
    row_scales: torch.Tensor | None,
    weights: Sequence[torch.Tensor],
    scales: Sequence[torch.Tensor],
    sizes: Sequence[int],
    bias: Sequence[torch.Tensor],
    dtype: torch.dtype,
    activation: str,
    group: int,
    tiles: Tiles,
) -> torch.Tensor:
    """Multiply rows x [M, K] with weights of `sizes` columns: [M, N] of `dtype`; group: GROUP of the kernel."""
    num_rows, num_blocks = x.shape[0], x.shape[1] // 128
    own = sizes[:1] if activation else sizes
    N = sum(own)
    out = torch.empty(num_rows, N, dtype=dtype, device=x.device)
    if num_rows == 0:
        return out
    splits = few.splits_of(num_blocks) if group > 0 else 4
    is_few = group > 0 and few.takes(num_rows)
    if is_few:
        tile = Tile(8 if num_rows <= 8 else 16, few.COLUMNS.value, 1, splits, 1)
        constants: dict[str, Any] = {"STEP": few.step_of(splits, bool(activation), num_rows)}
    else:
        tile = tiles.choose(num_rows, N, bool(activation), shared_memory(x.device) - (8 << 10))
        constants = {"PACK": tile.pack, "BLOCK_N": tile.n, "NUM_STAGES": tile.num_stages}
    num_columns = sum(cdiv(size, tile.n) for size in own)
    grid = (num_columns,) if is_few else (cdiv(num_rows, tile.m), num_columns)
    rows = [x] if is_few else [x, x if row_scales is None else row_scales]
    tensors = *rows, *filled(weights), *filled(scales), *(filled(bias) if bias else [out] * MOST_PARTS), out
    units = [size // 16 for size in (N, *sizes, *[0] * (MOST_PARTS - len(sizes)), x.stride(0))]
    args = *tensors, num_rows, num_blocks, *units
    is_early = follows_early(num_rows)
    constants |= {"GROUP": group, "ACTIVATION": activation, "HAS_BIAS": bool(bias), "UPCAST": INTERPRETED}
    constants |= {"SPLITS": splits, "BLOCK_M": tile.m, "PDL": is_early}
    constants["IS_UNEVEN"] = num_blocks % (splits * constants.get("STEP", 1)) > 0
    kernel = few.packed_few_rows_kernel if is_few else _quantised_kernel
    cached_launch(kernel, tile.num_warps, tile.num_stages, is_early)(grid, *args, **constants)
    return out
