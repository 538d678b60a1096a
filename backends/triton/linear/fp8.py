"""Products of rows and weights in FP8, each with a scale per 128 features (and 128 columns, of a weight), as
DeepSeek-V3 has them. Tensor cores multiply FP8; a block of features is scaled in fp32 before it is added, in order.

Twins: `specdec.backends.linear.fp8`.
"""

from collections.abc import Sequence
from functools import cache

import torch
import triton
import triton.language as tl

from specdec.backends.linear import MOST_PARTS
from specdec.backends.triton.launch.fences import fence_copies
from specdec.backends.triton.launch.relaunch import INTERPRETED, CachedLaunch
from specdec.backends.triton.launch.shared_memory import shared_memory
from specdec.backends.triton.linear.gates import gated
from specdec.backends.triton.linear.parts import Tile, both, filled, finished, part_of, picked
from specdec.backends.triton.linear.products import dot
from specdec.backends.triton.linear.rounding import quantised


@triton.jit(do_not_specialize=["stride"])
def _quantise_kernel(x, out, scales, stride, NUM: tl.constexpr, BLOCKS: tl.constexpr):
    """BLOCKS blocks of 128 features of one row, of NUM blocks in all; stride in units of 16."""
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCKS + tl.arange(0, BLOCKS)
    at, inside = block[:, None] * 128 + tl.arange(0, 128)[None, :], (block < NUM)[:, None]
    value = tl.load(x + row * stride * 16 + at, mask=inside, other=0.0).to(tl.float32)
    value, scale = quantised(value, 1)
    tl.store(out + row * NUM * 128 + at, value, mask=inside)
    tl.store(scales + row * NUM + block, scale, mask=block < NUM)


@triton.jit
def _block(x, scales, i, is_inside, block, num_blocks, SHARED: tl.constexpr):
    """Return a block of 128 features of rows i of FP8, or a block each, and its scales; SHARED: rows of one scale."""
    at = (i.to(tl.int64) * num_blocks + block)[:, None] * 128 + tl.arange(0, 128)[None, :]
    values = tl.load(x + at, mask=is_inside[:, None], other=0.0)
    return values, tl.load(scales + i // SHARED * num_blocks + block, mask=is_inside, other=0.0)


@triton.jit
def scaled_product(total, w, scale, rows, row_scale, UPCAST: tl.constexpr):
    """Return `total` and the product of a block of features, scaled."""
    fence_copies(w.shape[0])
    return total + dot(w, rows.T, tl.zeros_like(total), UPCAST) * (scale[:, None] * row_scale[None, :])


@triton.jit(do_not_specialize=["num_rows", "num_blocks", "N", "n0", "n1", "n2"])
def _fp8_kernel(
    x,
    row_scales,
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
    ACTIVATION: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    UPCAST: tl.constexpr,
    PAIRED: tl.constexpr,
    IS_ODD: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    NUM_STAGES: tl.constexpr,
):
    """BLOCK_M rows and BLOCK_N columns of one part of out [num_rows, N]. N and sizes of parts in units of 16.

    num_blocks: of 128 features. ACTIVATION: "" for plain products; else the first part is gate, the second is up.
    """
    N, n0, n1, n2 = N * 16, n0 * 16, n1 * 16, n2 * 16
    DTYPE: tl.constexpr = out.dtype.element_ty
    HALVES: tl.constexpr = 2 if PAIRED else 1
    part, number = part_of(tl.program_id(1), n0, n1, BLOCK_N)
    begin, size = picked(0, n0, n0 + n1, part), picked(n0, n1, n2, part)
    weight, scales, bias = picked(w0, w1, w2, part), picked(s0, s1, s2, part), picked(b0, b1, b2, part)
    i, j = tl.arange(0, HALVES * BLOCK_N), tl.arange(0, HALVES * BLOCK_M)
    n, m = number * BLOCK_N + i % BLOCK_N, tl.program_id(0) * BLOCK_M + j % BLOCK_M
    is_column, is_row = n < size, m < num_rows
    total = tl.zeros([HALVES * BLOCK_N, HALVES * BLOCK_M], tl.float32)
    other, up, other_up = total, total, total
    for k in tl.range(0, num_blocks, 2, num_stages=NUM_STAGES):
        of_n, of_m = k + i // BLOCK_N, k + j // BLOCK_M
        has_n, has_m = is_column, is_row
        if PAIRED and IS_ODD:
            has_n, has_m = has_n & (of_n < num_blocks), has_m & (of_m < num_blocks)
        rows, row_scale = _block(x, row_scales, m, has_m, of_m, num_blocks, 1)
        w, scale = _block(weight, scales, n, has_n, of_n, num_blocks, 128)
        total = scaled_product(total, w, scale, rows, row_scale, UPCAST)
        if ACTIVATION != "":
            w, scale = _block(w1, s1, n, has_n, of_n, num_blocks, 128)
            up = scaled_product(up, w, scale, rows, row_scale, UPCAST)
        if not PAIRED:
            has_n, has_m = is_column & (k + 1 < num_blocks), is_row & (k + 1 < num_blocks)
            rows, row_scale = _block(x, row_scales, m, has_m, k + 1, num_blocks, 1)
            w, scale = _block(weight, scales, n, has_n, k + 1, num_blocks, 128)
            other = scaled_product(other, w, scale, rows, row_scale, UPCAST)
            if ACTIVATION != "":
                w, scale = _block(w1, s1, n, has_n, k + 1, num_blocks, 128)
                other_up = scaled_product(other_up, w, scale, rows, row_scale, UPCAST)
    n, m = number * BLOCK_N + tl.arange(0, BLOCK_N), tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    product = finished(both(total, other, PAIRED, BLOCK_M, BLOCK_N), bias, n, size, HAS_BIAS, DTYPE)
    if ACTIVATION != "":
        added = finished(both(up, other_up, PAIRED, BLOCK_M, BLOCK_N), b1, n, size, HAS_BIAS, DTYPE)
        product = gated(product, added, ACTIVATION)
    at = out + m.to(tl.int64)[None, :] * N + (begin + n)[:, None]
    tl.store(at, product, mask=(m < num_rows)[None, :] & (n < size)[:, None])


# For up to 16, 32 and 64 rows, and for more.
TILES = (Tile(16, 32, True, 4, 7), Tile(32, 32, True, 4, 6), Tile(64, 32, True, 8, 5), Tile(128, 64, False, 8, 3))
GATED = (Tile(16, 32, True, 4, 4), Tile(32, 32, True, 4, 4), Tile(64, 32, True, 8, 3), Tile(64, 64, False, 8, 3))


def choose_tile(num_rows: int, is_gated: bool, shared: int) -> Tile:
    """Return the tile for `num_rows` rows, with as many stages as `shared` bytes hold."""
    tile = (GATED if is_gated else TILES)[sum(num_rows > limit for limit in (16, 32, 64))]
    loaded = 2 * 132 * (tile.m + tile.n * (2 if is_gated else 1))
    return tile._replace(num_stages=max(1, min(tile.num_stages, shared // loaded)))


_quantise = CachedLaunch(_quantise_kernel)


@cache
def _run_fp8(num_warps: int, num_stages: int) -> CachedLaunch:
    return CachedLaunch(_fp8_kernel, num_warps, num_stages)


def quantise(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """See `specdec.backends.linear.fp8.quantise`; rows x [M, K], aligned."""
    num_rows, num = x.shape[0], x.shape[1] // 128
    out = torch.empty(x.shape, dtype=torch.float8_e4m3fn, device=x.device)
    scales = torch.empty(num_rows, num, dtype=torch.float32, device=x.device)
    if num_rows:
        grid = num_rows, triton.cdiv(num, 16)
        _quantise(grid, x, out, scales, x.stride(0) // 16, NUM=num, BLOCKS=16)
    return out, scales


def fp8_linear(
    x: torch.Tensor,
    row_scales: torch.Tensor,
    weights: Sequence[torch.Tensor],
    scales: Sequence[torch.Tensor],
    bias: Sequence[torch.Tensor],
    dtype: torch.dtype,
    activation: str,
) -> torch.Tensor:
    """See `specdec.backends.linear.fp8.fp8_linear`; rows x [M, K]."""
    (num_rows, K), sizes = x.shape, [w.shape[0] for w in weights]
    own = sizes[:1] if activation else sizes
    N = sum(own)
    out = torch.empty(num_rows, N, dtype=dtype, device=x.device)
    if num_rows == 0:
        return out
    tile = choose_tile(num_rows, bool(activation), shared_memory(x.device) - (8 << 10))
    grid = triton.cdiv(num_rows, tile.m), sum(triton.cdiv(size, tile.n) for size in own)
    tensors = x, row_scales, *filled(weights), *filled(scales), *(filled(bias) if bias else [out] * MOST_PARTS), out
    units = [size // 16 for size in (N, *sizes, *[0] * (MOST_PARTS - len(sizes)))]
    constants = {"ACTIVATION": activation, "HAS_BIAS": bool(bias), "UPCAST": INTERPRETED}
    constants |= {"PAIRED": tile.is_paired, "IS_ODD": K // 128 % 2 == 1}
    constants |= {"BLOCK_M": tile.m, "BLOCK_N": tile.n, "NUM_STAGES": tile.num_stages}
    _run_fp8(tile.num_warps, tile.num_stages)(grid, *tensors, num_rows, K // 128, *units, **constants)
    return out
