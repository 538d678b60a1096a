"""Products of rows and weights in FP8, each with a scale per 128 features (and 128 columns, of a weight), as
DeepSeek-V3 has them. Tensor cores multiply FP8; a block of features is scaled in fp32 before it is added, in order.

Twins: `specdec.backends.linear.fp8`.
"""

from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from specdec.backends.linear import MOST_PARTS
from specdec.backends.triton.launch.relaunch import INTERPRETED, CachedLaunch
from specdec.backends.triton.launch.shared_memory import shared_memory
from specdec.backends.triton.linear.gates import gated
from specdec.backends.triton.linear.parts import filled, finished, part_of, picked
from specdec.backends.triton.linear.products import dot, has_tma, tile_of
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
def scaled_product(total, w, scale, rows, row_scale, UPCAST: tl.constexpr):
    """Return `total` and the product of a block of features, scaled."""
    return total + dot(w, rows.T, tl.zeros_like(total), UPCAST) * (scale[:, None] * row_scale[None, :])


@triton.jit
def _added(
    total,
    x,
    row_scales,
    weight,
    scales,
    block,
    first_m,
    first_n,
    num_rows,
    size,
    num_blocks,
    UPCAST: tl.constexpr,
    TMA: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Return `total` and the product of a block of features; past the last one there are zeros."""
    K, is_block = num_blocks * 128, block < num_blocks
    m, n = first_m + tl.arange(0, BLOCK_M), first_n + tl.arange(0, BLOCK_N)
    rows = tile_of(x, first_m, block * 128, num_rows, K, K, BLOCK_M, 128, TMA)
    w = tile_of(weight, first_n, block * 128, size, K, K, BLOCK_N, 128, TMA)
    row_scale = tl.load(row_scales + m * num_blocks + block, mask=(m < num_rows) & is_block, other=0.0)
    scale = tl.load(scales + n // 128 * num_blocks + block, mask=(n < size) & is_block, other=0.0)
    return scaled_product(total, w, scale, rows, row_scale, UPCAST)


@triton.jit
def _sums(
    x,
    row_scales,
    weight,
    scales,
    up_weight,
    up_scales,
    first_m,
    first_n,
    num_rows,
    size,
    num_blocks,
    GATED: tl.constexpr,
    UPCAST: tl.constexpr,
    TMA: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    NUM_STAGES: tl.constexpr,
):
    """Return the products with `weight`, and with `up_weight` if GATED."""
    total = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    other, up, other_up = total, total, total
    for k in tl.range(0, num_blocks, 2, num_stages=NUM_STAGES):
        total = _added(
            total,
            x,
            row_scales,
            weight,
            scales,
            k,
            first_m,
            first_n,
            num_rows,
            size,
            num_blocks,
            UPCAST,
            TMA,
            BLOCK_M,
            BLOCK_N,
        )
        other = _added(
            other,
            x,
            row_scales,
            weight,
            scales,
            k + 1,
            first_m,
            first_n,
            num_rows,
            size,
            num_blocks,
            UPCAST,
            TMA,
            BLOCK_M,
            BLOCK_N,
        )
        if GATED:
            up = _added(
                up,
                x,
                row_scales,
                up_weight,
                up_scales,
                k,
                first_m,
                first_n,
                num_rows,
                size,
                num_blocks,
                UPCAST,
                TMA,
                BLOCK_M,
                BLOCK_N,
            )
            other_up = _added(
                other_up,
                x,
                row_scales,
                up_weight,
                up_scales,
                k + 1,
                first_m,
                first_n,
                num_rows,
                size,
                num_blocks,
                UPCAST,
                TMA,
                BLOCK_M,
                BLOCK_N,
            )
    return total + other, up + other_up


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
    TMA: tl.constexpr,
    NUM_PARTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    NUM_STAGES: tl.constexpr,
):
    """BLOCK_M rows and BLOCK_N columns of one part of out [num_rows, N]. N and sizes of parts in units of 16.

    num_blocks: of 128 features. ACTIVATION: "" for plain products; else the first part is gate, the second is up.
    """
    N, n0, n1, n2 = N * 16, n0 * 16, n1 * 16, n2 * 16
    DTYPE: tl.constexpr = out.dtype.element_ty
    part, number = part_of(tl.program_id(1), n0, n1, BLOCK_N)
    begin, size = picked(0, n0, n0 + n1, part), picked(n0, n1, n2, part)
    scales, bias = picked(s0, s1, s2, part), picked(b0, b1, b2, part)
    first_m, first_n, GATED = tl.program_id(0) * BLOCK_M, number * BLOCK_N, ACTIVATION != ""
    if NUM_PARTS == 1 or part == 0:  # descriptors cannot be chosen by a number
        total, up = _sums(
            x,
            row_scales,
            w0,
            scales,
            w1,
            s1,
            first_m,
            first_n,
            num_rows,
            size,
            num_blocks,
            GATED,
            UPCAST,
            TMA,
            BLOCK_M,
            BLOCK_N,
            NUM_STAGES,
        )
    elif NUM_PARTS == 2 or part == 1:
        total, up = _sums(
            x,
            row_scales,
            w1,
            scales,
            w1,
            s1,
            first_m,
            first_n,
            num_rows,
            size,
            num_blocks,
            GATED,
            UPCAST,
            TMA,
            BLOCK_M,
            BLOCK_N,
            NUM_STAGES,
        )
    else:
        total, up = _sums(
            x,
            row_scales,
            w2,
            scales,
            w1,
            s1,
            first_m,
            first_n,
            num_rows,
            size,
            num_blocks,
            GATED,
            UPCAST,
            TMA,
            BLOCK_M,
            BLOCK_N,
            NUM_STAGES,
        )
    n, m = first_n + tl.arange(0, BLOCK_N), first_m + tl.arange(0, BLOCK_M)
    product = finished(total, bias, n, size, HAS_BIAS, DTYPE)
    if GATED:
        product = gated(product, finished(up, b1, n, size, HAS_BIAS, DTYPE), ACTIVATION)
    at = out + m.to(tl.int64)[None, :] * N + (begin + n)[:, None]
    tl.store(at, product, mask=(m < num_rows)[None, :] & (n < size)[:, None])


class Tile(NamedTuple):
    """Rows and columns of a tile, warps of a program, and pairs of blocks that it loads ahead."""

    m: int
    n: int
    num_warps: int
    num_stages: int


# For up to 16, 32 and 64 rows, and for more.
TILES = (Tile(16, 64, 4, 5), Tile(32, 64, 4, 5), Tile(64, 64, 4, 4), Tile(128, 64, 8, 3))
GATED = (Tile(16, 64, 4, 3), Tile(32, 64, 4, 3), Tile(64, 64, 8, 3), Tile(64, 64, 8, 3))


def choose_tile(num_rows: int, is_gated: bool, shared: int) -> Tile:
    """Return the tile for `num_rows` rows, with as many stages as `shared` bytes hold, two at least if it can be."""
    fitting = [tile for tile in (GATED if is_gated else TILES) if _loaded(tile, is_gated) * 2 <= shared]
    tile = [*TILES[:1], *fitting][min(len(fitting), 1 + sum(num_rows > limit for limit in (16, 32, 64)))]
    return tile._replace(num_stages=max(1, min(tile.num_stages, shared // _loaded(tile, is_gated))))


def _loaded(tile: Tile, is_gated: bool) -> int:
    """Return the bytes of a pair of blocks."""
    return 2 * 132 * (tile.m + tile.n * (2 if is_gated else 1))


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
    tile = choose_tile(num_rows, bool(activation), (shared_memory(x.device) - (8 << 10)) // len(own))
    grid = triton.cdiv(num_rows, tile.m), sum(triton.cdiv(size, tile.n) for size in own)
    is_tma = has_tma()
    given = [TensorDescriptor(w, [*w.shape], [K, 1], [tile.n, 128]) for w in weights] if is_tma else weights
    rows = TensorDescriptor(x, [num_rows, K], [K, 1], [tile.m, 128]) if is_tma else x
    tensors = rows, row_scales, *filled(given), *filled(scales), *(filled(bias) if bias else [out] * MOST_PARTS), out
    units = [size // 16 for size in (N, *sizes, *[0] * (MOST_PARTS - len(sizes)))]
    constants = {"ACTIVATION": activation, "HAS_BIAS": bool(bias), "UPCAST": INTERPRETED}
    constants |= {"TMA": is_tma, "NUM_PARTS": len(own)}
    constants |= {"BLOCK_M": tile.m, "BLOCK_N": tile.n, "NUM_STAGES": tile.num_stages}
    _run_fp8(tile.num_warps, tile.num_stages)(grid, *tensors, num_rows, K // 128, *units, **constants)
    return out
