"""Gated products of few rows and weights in FP8 by blocks, on Hopper. A program has 128 columns, and may quantise them.

Sums are those of `parts`, in one loop over all splits of K, so that blocks of the next split are prefetched while
one ends. Weights are the first operand: wgmma needs at least 64 rows there, and x has fewer.

Twins: `specdec.backends.linear.fp8`.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from specdec.backends.triton.launch.fences import fence_copies
from specdec.backends.triton.launch.relaunch import (
    INTERPRETED,
    cached_launch,
    capability,
    follows_early,
    wait_for_others,
)
from specdec.backends.triton.launch.sizes import cdiv
from specdec.backends.triton.linear.gates import gated
from specdec.backends.triton.linear.parts import finished
from specdec.backends.triton.linear.products import dot
from specdec.backends.triton.linear.rounding import quantised
from specdec.backends.triton.linear.tiles import NUM_MULTIPROCESSORS

MOST_ROWS, LEAST_BUSY = 16, 0.75  # rows, and share of multiprocessors
BLOCKS, NUM_STAGES = 2, 3  # blocks of features per step, and pipeline stages; measured on an H200
DTYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


@triton.jit
def _added(sums, rows, row_scale, weight, scales, has_column, has_row, UPCAST: tl.constexpr):
    """Return `sums` [columns, rows] plus a product of blocks; scales: for each row a pointer to the columns' scale."""
    w = tl.load(weight[:, None] + tl.arange(0, 128)[None, :], mask=has_column[:, None], other=0.0)
    scale = row_scale * tl.load(scales, mask=has_row, other=0.0)
    fence_copies(w.shape[0])
    return sums + dot(w, rows.T, tl.zeros_like(sums), UPCAST) * scale[None, :]


@triton.jit(do_not_specialize=["num_rows", "num_blocks", "N", "stride"])
def _gated_kernel(
    x,
    scales_of_rows,
    w0,
    w1,
    s0,
    s1,
    b0,
    b1,
    out,
    scales_of_out,
    num_rows,
    num_blocks,
    N,
    stride,
    DTYPE: tl.constexpr,
    ACTIVATION: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    QUANTISES: tl.constexpr,
    UPCAST: tl.constexpr,
    IS_UNEVEN: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCKS: tl.constexpr,
    NUM_STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    """Compute 128 columns of out [num_rows, N], of DTYPE, or FP8 if QUANTISES. N and stride in units of 16.

    IS_UNEVEN: splits of K are not whole steps of BLOCKS blocks, or the last ones are shorter.
    """
    N, stride, number = N * 16, stride * 16, tl.program_id(0)
    n, m = number * 128 + tl.arange(0, 128), tl.arange(0, BLOCK_M)
    rows, row_scales, of_columns = x + m.to(tl.int64) * stride, scales_of_rows + m * num_blocks, number * num_blocks
    columns = n.to(tl.int64) * num_blocks * 128
    split = tl.cdiv(num_blocks, 4)
    steps = tl.cdiv(split, BLOCKS)
    has_n, has_m = n < N, m < num_rows
    sums = tl.zeros([128, BLOCK_M], tl.float32)
    up_sums, total, up = sums, sums, sums
    wait_for_others(PDL, False)
    for step in tl.range(0, 4 * steps, num_stages=NUM_STAGES):
        for i in tl.static_range(BLOCKS):
            block, inside_n, inside_m = step * BLOCKS + i, has_n, has_m
            if IS_UNEVEN:
                of_split = step % steps * BLOCKS + i
                block = step // steps * split + of_split
                inside = (of_split < split) & (block < num_blocks)
                inside_n, inside_m = has_n & inside, has_m & inside
            features = (rows + block * 128)[:, None] + tl.arange(0, 128)[None, :]
            features = tl.load(features, mask=inside_m[:, None], other=0.0)
            row_scale = tl.load(row_scales + block, mask=inside_m, other=0.0)
            w, s = columns + block * 128, of_columns + block + tl.zeros_like(m)
            sums = _added(sums, features, row_scale, w0 + w, s0 + s, inside_n, inside_m, UPCAST)
            up_sums = _added(up_sums, features, row_scale, w1 + w, s1 + s, inside_n, inside_m, UPCAST)
        ends = (step + 1) % steps == 0
        total, up = tl.where(ends, total + sums, total), tl.where(ends, up + up_sums, up)
        sums, up_sums = tl.where(ends, 0.0, sums), tl.where(ends, 0.0, up_sums)
    gate, up = finished(total, b0, n, N, HAS_BIAS, DTYPE), finished(up, b1, n, N, HAS_BIAS, DTYPE)
    product = gated(gate, up, ACTIVATION)
    if QUANTISES:
        product, scale = quantised(product.to(tl.float32), 0)
        tl.store(scales_of_out + m * (N // 128) + number, scale, mask=has_m)
    tl.store(out + m.to(tl.int64)[None, :] * N + n[:, None], product, mask=has_m[None, :] & has_n[:, None])


def takes(num_rows: int, N: int, scales: Sequence[torch.Tensor], activation: str) -> bool:
    """Return whether `gated_fp8` is the kernel for `num_rows` rows and N columns; scales: of the weights.

    Programs, one per multiprocessor, must keep most of them busy: with fewer programs, narrower tiles are faster.
    """
    if not activation or num_rows > MOST_ROWS or scales[0].dim() == 1:
        return False
    num_programs = cdiv(N, 128)
    places = NUM_MULTIPROCESSORS * cdiv(num_programs, NUM_MULTIPROCESSORS)
    return INTERPRETED or (capability() == 90 and num_programs >= LEAST_BUSY * places)


def gated_fp8(
    x: torch.Tensor,
    row_scales: torch.Tensor,
    weights: Sequence[torch.Tensor],
    scales: Sequence[torch.Tensor],
    bias: Sequence[torch.Tensor],
    dtype: torch.dtype,
    activation: str,
    quantises: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `specdec.backends.linear.fp8.gated_linear_fp8`; x [M, K]. Without `quantises`: `dtype`, no scales."""
    num_rows, num_blocks, N = x.shape[0], x.shape[1] // 128, weights[0].shape[0]
    out = torch.empty(num_rows, N, dtype=torch.float8_e4m3fn if quantises else dtype, device=x.device)
    out_scales = torch.empty(num_rows, N // 128 if quantises else 0, dtype=torch.float32, device=x.device)
    if num_rows == 0:
        return out, out_scales
    args = x, row_scales, *weights, *scales, *(bias or [out, out]), out, out_scales
    is_early = follows_early(num_rows)
    constants = {"DTYPE": DTYPES[dtype], "ACTIVATION": activation, "HAS_BIAS": bool(bias), "QUANTISES": quantises}
    constants |= {"UPCAST": INTERPRETED, "IS_UNEVEN": num_blocks % (4 * BLOCKS) > 0, "BLOCK_M": MOST_ROWS}
    constants |= {"BLOCKS": BLOCKS, "NUM_STAGES": NUM_STAGES, "PDL": is_early}
    run = cached_launch(_gated_kernel, 4, NUM_STAGES, is_early)
    run((cdiv(N, 128),), *args, num_rows, num_blocks, N // 16, x.stride(0) // 16, **constants)
    return out, out_scales
