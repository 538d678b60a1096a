"""Products with 4-bit weights that are unpacked in registers. Sums are those of `parts`.

Twin: `specdec.backends.linear.packed.packed_linear_twin`.
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
from specdec.backends.triton.linear.unpack import unpacked, unpacked_nf4


@triton.jit
def _weights(words, scales, n, is_inside, block, size, GROUP: tl.constexpr, DTYPE: tl.constexpr, UPCAST: tl.constexpr):
    """Return rows n of a block of 128 features, or of a block each; zeros for those that are not inside."""
    inside = is_inside[:, None]
    at = (block * size + n)[:, None] * 16 + tl.arange(0, 16)[None, :]
    packed = tl.load(words + at, mask=inside, other=0)
    group = block * (128 // GROUP) if GROUP < 128 else block // (GROUP // 128)
    at = scales + (group * size + n)[:, None]
    s0 = tl.load(at, mask=inside, other=0)
    s1, s2, s3 = s0, s0, s0
    if GROUP == 64:
        s2 = tl.load(at + size, mask=inside, other=0)
        s3 = s2
    if GROUP == 32:
        s1 = tl.load(at + size, mask=inside, other=0)
        s2 = tl.load(at + 2 * size, mask=inside, other=0)
        s3 = tl.load(at + 3 * size, mask=inside, other=0)
    if scales.dtype.element_ty == tl.float32:
        w = unpacked_nf4(packed, s0, s2, DTYPE, UPCAST)
    else:
        w = unpacked(packed, s0, s1, s2, s3, DTYPE, UPCAST)
    return w


@triton.jit
def _rows(x, m, is_inside, block, stride, NUM: tl.constexpr):
    """Return a block of 128 features of rows m, or a block each, [128, len(m)]; NUM: of the columns that they meet."""
    at = (m.to(tl.int64) * stride + block * 128)[:, None] + tl.arange(0, 128)[None, :]
    rows = tl.load(x + at, mask=is_inside[:, None], other=0.0)
    fence_copies(NUM)
    return rows.T


@triton.jit(do_not_specialize=["num_rows", "num_blocks", "N", "n0", "n1", "n2", "stride"])
def _packed_kernel(
    x,
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
    PAIRED: tl.constexpr,
    IS_ODD: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    NUM_STAGES: tl.constexpr,
):
    """BLOCK_M rows and BLOCK_N columns of one part of out [num_rows, N]. N, sizes of parts, and stride in units of 16.

    num_blocks: of 128 features. ACTIVATION: "" for plain products; else the first part is gate, the second is up.
    """
    N, n0, n1, n2, stride = N * 16, n0 * 16, n1 * 16, n2 * 16, stride * 16
    DTYPE: tl.constexpr = out.dtype.element_ty
    HALVES: tl.constexpr = 2 if PAIRED else 1
    part, number = part_of(tl.program_id(1), n0, n1, BLOCK_N)
    begin, size = picked(0, n0, n0 + n1, part), picked(n0, n1, n2, part)
    words, scales, bias = picked(w0, w1, w2, part), picked(s0, s1, s2, part), picked(b0, b1, b2, part)
    i, j = tl.arange(0, HALVES * BLOCK_N), tl.arange(0, HALVES * BLOCK_M)
    n, m = number * BLOCK_N + i % BLOCK_N, tl.program_id(0) * BLOCK_M + j % BLOCK_M
    total = tl.zeros([HALVES * BLOCK_N, HALVES * BLOCK_M], tl.float32)
    other, up, other_up = total, total, total
    is_column, is_row = n < size, m < num_rows
    for k in tl.range(0, num_blocks, 2, num_stages=NUM_STAGES):
        has_n, has_m = is_column, is_row
        if PAIRED and IS_ODD:
            has_n, has_m = has_n & (k + i // BLOCK_N < num_blocks), has_m & (k + j // BLOCK_M < num_blocks)
        rows = _rows(x, m, has_m, k + j // BLOCK_M, stride, HALVES * BLOCK_N)
        w = _weights(words, scales, n, has_n, k + i // BLOCK_N, size, GROUP, DTYPE, UPCAST)
        total = dot(w, rows, total, UPCAST)
        if ACTIVATION != "":
            w = _weights(w1, s1, n, has_n, k + i // BLOCK_N, size, GROUP, DTYPE, UPCAST)
            up = dot(w, rows, up, UPCAST)
        if not PAIRED:
            has_n, has_m = is_column & (k + 1 < num_blocks), is_row & (k + 1 < num_blocks)
            rows = _rows(x, m, has_m, k + 1, stride, BLOCK_N)
            w = _weights(words, scales, n, has_n, k + 1, size, GROUP, DTYPE, UPCAST)
            other = dot(w, rows, other, UPCAST)
            if ACTIVATION != "":
                w = _weights(w1, s1, n, has_n, k + 1, size, GROUP, DTYPE, UPCAST)
                other_up = dot(w, rows, other_up, UPCAST)
    n, m = number * BLOCK_N + tl.arange(0, BLOCK_N), tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    product = finished(both(total, other, PAIRED, BLOCK_M, BLOCK_N), bias, n, size, HAS_BIAS, DTYPE)
    if ACTIVATION != "":
        added = finished(both(up, other_up, PAIRED, BLOCK_M, BLOCK_N), b1, n, size, HAS_BIAS, DTYPE)
        product = gated(product, added, ACTIVATION)
    at = out + m.to(tl.int64)[None, :] * N + (begin + n)[:, None]
    tl.store(at, product, mask=(m < num_rows)[None, :] & (n < size)[:, None])


# For up to 16, 32 and 64 rows, and for more.
TILES = (Tile(16, 32, True, 4, 6), Tile(32, 32, True, 4, 5), Tile(64, 32, True, 4, 5), Tile(128, 128, False, 8, 2))
GATED = (Tile(16, 32, True, 4, 3, 128), Tile(32, 32, True, 4, 4), Tile(64, 32, True, 4, 4), Tile(128, 64, False, 8, 2))


def choose_tile(num_rows: int, is_gated: bool, shared: int) -> Tile:
    """Return the tile for `num_rows` rows, with as many stages as `shared` bytes hold."""
    tile = (GATED if is_gated else TILES)[sum(num_rows > limit for limit in (16, 32, 64))]
    loaded = 2 * (256 * tile.m + 72 * tile.n * (2 if is_gated else 1))
    return tile._replace(num_stages=max(1, min(tile.num_stages, shared // loaded)))


@cache
def _run_packed(num_warps: int, num_stages: int, maxnreg: int | None) -> CachedLaunch:
    return CachedLaunch(_packed_kernel, num_warps, num_stages, maxnreg)


def packed_linear(
    x: torch.Tensor,
    words: Sequence[torch.Tensor],
    scales: Sequence[torch.Tensor],
    bias: Sequence[torch.Tensor],
    activation: str,
) -> torch.Tensor:
    """See `specdec.backends.linear.packed.packed_linear`; rows x [M, K], aligned."""
    (num_rows, K), sizes = x.shape, [w.shape[1] for w in words]
    own = sizes[:1] if activation else sizes
    N = sum(own)
    out = torch.empty(num_rows, N, dtype=x.dtype, device=x.device)
    if num_rows == 0:
        return out
    tile = choose_tile(num_rows, bool(activation), shared_memory(x.device) - (8 << 10))
    grid = triton.cdiv(num_rows, tile.m), sum(triton.cdiv(size, tile.n) for size in own)
    tensors = x, *filled(words), *filled(scales), *(filled(bias) if bias else [x] * MOST_PARTS), out
    units = [size // 16 for size in (N, *sizes, *[0] * (MOST_PARTS - len(sizes)), x.stride(0))]
    constants = {"GROUP": K // scales[0].shape[0], "ACTIVATION": activation, "HAS_BIAS": bool(bias)}
    constants |= {"UPCAST": INTERPRETED, "PAIRED": tile.is_paired, "IS_ODD": K // 128 % 2 == 1}
    constants |= {"BLOCK_M": tile.m, "BLOCK_N": tile.n, "NUM_STAGES": tile.num_stages}
    run = _run_packed(tile.num_warps, tile.num_stages, tile.maxnreg)
    run(grid, *tensors, num_rows, K // 128, *units, **constants)
    return out
