"""Grouped products of tokens with experts in MXFP4 or in FP8 blocks; programs find their rows as in `products`.

Twins: `specdec.backends.experts.quantised`. Weights are unpacked, or scaled, as in `triton.linear`, and summed in two
accumulators, for even and odd blocks of 128 features.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from specdec.backends.triton.experts import few
from specdec.backends.triton.experts.products import (
    gated_columns,
    grouping,
    is_scanned,
    line_of,
    routed_block,
    scanned,
)
from specdec.backends.triton.launch.fences import fence_copies
from specdec.backends.triton.launch.relaunch import INTERPRETED, capability, wait_for_others
from specdec.backends.triton.launch.sizes import cdiv
from specdec.backends.triton.linear.parts import with_diagonal
from specdec.backends.triton.linear.products import dot
from specdec.backends.triton.linear.unpack import eighths_of_mxfp4, in_order


@triton.jit
def _added(
    total,
    rows,
    row_scales,
    has_row,
    weight,
    scales,
    has_n,
    of_row,
    of_n,
    K,
    stride,
    FP8: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """Return `total` plus products of blocks of features: number of_n of each column, of_row of each row.

    rows, row_scales, weight, scales: pointers to the first blocks. stride: of blocks of MXFP4.
    """
    features = tl.arange(0, 128)[None, :]
    inside = has_row[:, None] & ((of_row * 128)[:, None] + features < K)
    x = tl.load((rows + of_row * 128)[:, None] + features, mask=inside, other=0.0)
    if FP8:
        w = tl.load((weight + of_n * 128)[:, None] + features, mask=has_n[:, None], other=0.0)
        scale, row_scale = tl.load(scales + of_n, mask=has_n), tl.load(row_scales + of_row, mask=has_row)
        fence_copies(w.shape[0])
        total += dot(w, x.T, tl.zeros_like(total), UPCAST) * (scale[:, None] * row_scale[None, :])
    else:
        words = weight + of_n * stride * 16
        packed = tl.load(words[:, None] + tl.arange(0, 16)[None, :], mask=has_n[:, None], other=0)
        exponents = tl.load((scales + of_n * stride)[:, None], mask=has_n[:, None], other=0)
        fence_copies(packed.shape[0])
        total = dot(in_order(eighths_of_mxfp4(packed, exponents, UPCAST)), x.T, total, UPCAST)
    return total


@triton.jit(
    do_not_specialize=["num_rows", "copies", "by_row"],
    do_not_specialize_on_alignment=["ids", "order", "starts"],
)
def _quantised_experts_kernel(
    x,
    row_scales,
    ids,
    weight,
    scales,
    bias,
    out,
    order,
    starts,
    num_rows,
    copies,
    by_row,
    N,
    K,
    num_blocks,
    E: tl.constexpr,
    FP8: tl.constexpr,
    ROUTED: tl.constexpr,
    ACTIVATION: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    UPCAST: tl.constexpr,
    PAIRED: tl.constexpr,
    IS_ODD: tl.constexpr,
    BLOCK_IDS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    NUM_STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    """Compute BLOCK_N columns of the products with one expert; see `products._grouped_linear_kernel` and `parts`."""
    DTYPE: tl.constexpr = out.dtype.element_ty
    HALVES: tl.constexpr = 2 if PAIRED else 1
    HALVED: tl.constexpr = ACTIVATION != "" and ACTIVATION != "swigluoai"
    wait_for_others(PDL, False)
    i, j = tl.arange(0, HALVES * BLOCK_N), tl.arange(0, HALVES * BLOCK_M)
    n = tl.program_id(0) * BLOCK_N + i % BLOCK_N
    is_column = n < N
    if HALVED:  # gate's columns come first in the weight, and are interleaved with up's in a tile
        n = n // 2 + n % 2 * (N // 2)
    program = tl.program_id(1)
    if ROUTED:
        expert, begin, end = routed_block(starts, program, num_rows, E, BLOCK_IDS, BLOCK_M)
        is_own, rank = expert, expert
    else:
        expert, is_own, rank, end = scanned(ids, program, num_rows, by_row, E, BLOCK_IDS)
        begin = 0
    own = expert.to(tl.int64)
    if FP8:
        weights = weight + own * N * K + n * K
        of_weights = scales + own * ((N + 127) // 128) * num_blocks + n // 128 * num_blocks
    else:
        weights, of_weights = weight + own * num_blocks * N * 16 + n * 16, scales + own * num_blocks * N + n
    to_sum = tl.where(expert < E, num_blocks, 0)
    for first in range(begin, end, BLOCK_M):
        m = first + j % BLOCK_M
        is_row = m < end
        row = (line_of(order, is_own, rank, m, end, ROUTED, BLOCK_IDS) // copies).to(tl.int64)
        rows, of_rows = x + row * K, row_scales + row * num_blocks
        total = tl.zeros([HALVES * BLOCK_N, HALVES * BLOCK_M], tl.float32)
        other = total
        for k in tl.range(0, to_sum, 2, num_stages=NUM_STAGES):
            of_n, of_m = k + i // BLOCK_N, k + j // BLOCK_M
            has_n, has_m = is_column, is_row
            if PAIRED and IS_ODD:
                has_n, has_m = has_n & (of_n < num_blocks), has_m & (of_m < num_blocks)
            total = _added(total, rows, of_rows, has_m, weights, of_weights, has_n, of_m, of_n, K, N, FP8, UPCAST)
            if not PAIRED:
                has_n, has_m = is_column & (k + 1 < num_blocks), is_row & (k + 1 < num_blocks)
                other = _added(
                    other, rows, of_rows, has_m, weights, of_weights, has_n, of_m + 1, of_n + 1, K, N, FP8, UPCAST
                )
        if PAIRED:
            product = with_diagonal(tl.zeros([BLOCK_N, BLOCK_M], tl.float32), total, 2)
        else:
            product = total + other
        column, place = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N), first + tl.arange(0, BLOCK_M)
        if HAS_BIAS:
            inside = (column < N) & (expert < E)
            product += tl.load(bias + own * N + column, mask=inside, other=0.0).to(tl.float32)[:, None]
        line = line_of(order, is_own, rank, place, end, ROUTED, BLOCK_IDS).to(tl.int64)
        if ACTIVATION == "":
            at = out + line[None, :] * N + column[:, None]
            tl.store(at, product.to(DTYPE), mask=(place < end)[None, :] & (column < N)[:, None])
        else:
            half = tl.program_id(0) * (BLOCK_N // 2) + tl.arange(0, BLOCK_N // 2)
            at = out + line[None, :] * (N // 2) + half[:, None]
            result = gated_columns(product, ACTIVATION, DTYPE, BLOCK_M, BLOCK_N)
            tl.store(at, result, mask=(place < end)[None, :] & (half < N // 2)[:, None])


class Tile(NamedTuple):
    """Rows and columns of a tile, whether one product has both accumulators, warps, and pipeline stages."""

    m: int
    n: int
    is_paired: bool
    num_warps: int
    num_stages: int


FEW, MORE, MANY = Tile(16, 32, True, 4, 5), Tile(32, 32, True, 4, 4), Tile(64, 64, False, 4, 2)


def choose_tile(num_rows: int, num_experts: int) -> Tile:
    """Return the tile for `num_rows` rows of all experts together."""
    if is_scanned(num_rows, num_experts):
        return FEW
    return MORE if num_rows < 32 * num_experts else MANY


def grouped_mxfp4(
    x: torch.Tensor,
    expert_ids: torch.Tensor,
    words: torch.Tensor,
    exponents: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: str = "",
) -> torch.Tensor:
    return _grouped(x, None, expert_ids, words, exponents, bias, x.dtype, activation)


def grouped_fp8(
    x: torch.Tensor,
    row_scales: torch.Tensor,
    expert_ids: torch.Tensor,
    weight: torch.Tensor,
    scales: torch.Tensor,
    dtype: torch.dtype,
    activation: str = "",
) -> torch.Tensor:
    return _grouped(x, row_scales, expert_ids, weight, scales, None, dtype, activation)


def _grouped(
    x: torch.Tensor,
    row_scales: torch.Tensor | None,
    expert_ids: torch.Tensor,
    weight: torch.Tensor,
    scales: torch.Tensor,
    bias: torch.Tensor | None,
    dtype: torch.dtype,
    activation: str,
) -> torch.Tensor:
    """Return products with experts, in FP8 if there are row_scales, else in MXFP4."""
    x, ids, is_fp8 = x.contiguous(), expert_ids.contiguous(), row_scales is not None
    num_experts, num_rows, K = weight.shape[0], ids.numel(), x.shape[1]
    N, num_blocks = weight.shape[1 if is_fp8 else 2], cdiv(K, 128)
    out = torch.empty(num_rows, N // (2 if activation else 1), dtype=dtype, device=x.device)
    if num_rows == 0:
        return out
    tile = choose_tile(num_rows, num_experts)
    lines, num_groups, constants = grouping(x, ids, num_experts, tile.m)
    if not is_fp8 and not constants["ROUTED"] and (INTERPRETED or capability() == 90):
        few.launch(x, ids, weight, scales, bias, out, activation, lines[2:], num_groups, constants)
        return out
    _quantised_experts_kernel[(cdiv(N, tile.n), num_groups)](
        x,
        out if row_scales is None else row_scales,
        ids,
        weight,
        scales,
        out if bias is None else bias,
        out,
        *lines,
        N,
        K,
        num_blocks,
        FP8=is_fp8,
        ACTIVATION=activation,
        HAS_BIAS=bias is not None,
        UPCAST=INTERPRETED,
        PAIRED=tile.is_paired,
        IS_ODD=num_blocks % 2 == 1,
        BLOCK_M=tile.m,
        BLOCK_N=tile.n,
        NUM_STAGES=tile.num_stages,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        **constants,
    )
    return out
