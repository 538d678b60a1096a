"""Products x @ weight.T, K in order in one accumulator: a row's bits depend on neither the tile nor the other rows.

Twin: `specdec.backends.linear.product_twin`. The tile of weight is the first operand and rows are the second,
so one tensor-core instruction serves few rows and many. Weights come through TMA where their layout allows it.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from triton.tools.tensor_descriptor import TensorDescriptor

from specdec.backends.triton.launch.relaunch import INTERPRETED, cached_launch, capability, follows_early, is_aligned
from specdec.backends.triton.launch.sizes import cdiv
from specdec.backends.triton.linear.gates import gated
from specdec.backends.triton.linear.tiles import Tile, choose_tile

SMALL = 40 << 20  # elements of a weight, below which the next kernel may start early: after larger ones it costs time


@triton.jit
def dot(a, b, acc, UPCAST: tl.constexpr):
    """Return acc + a @ b. UPCAST: the interpreter has no bf16 product (numpy has no bf16); widening is exact."""
    if UPCAST:
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, acc)


@triton.jit
def _tile(matrix, first, k, end, K, stride, BLOCK: tl.constexpr, BLOCK_K: tl.constexpr, TMA: tl.constexpr):
    """Load BLOCK rows from `first` on and BLOCK_K columns from k on; zeros past column K, and past row `end` or later.

    matrix: a descriptor if TMA, else a pointer.
    """
    if TMA:
        tile = matrix.load([first, k])
    else:
        rows, columns = first + tl.arange(0, BLOCK), k + tl.arange(0, BLOCK_K)
        inside = (rows < end)[:, None] & (columns < K)[None, :]
        tile = tl.load(matrix + rows.to(tl.int64)[:, None] * stride + columns[None, :], mask=inside, other=0.0)
    return tile


@triton.jit
def first_row(num_rows, BLOCK_M: tl.constexpr):
    """Return where a program's rows begin. The last tile overlaps the previous one instead of passing the last row,
    where TMA is slow."""
    return tl.minimum(tl.program_id(0) * BLOCK_M, tl.maximum(num_rows - BLOCK_M, 0))


@triton.jit
def product_sums(
    weight,
    x,
    first_m,
    first_n,
    num_rows,
    N,
    K,
    stride_w,
    stride_x,
    TMA: tl.constexpr,
    IS_GATED: tl.constexpr,
    UPCAST: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Return the product [BLOCK_N, BLOCK_M] fp32 of a tile, and that of the weight rows N further on if IS_GATED."""
    total = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    up = total
    for k in range(0, K, BLOCK_K):
        w = _tile(weight, first_n, k, N, K, stride_w, BLOCK_N, BLOCK_K, TMA)
        rows = _tile(x, first_m, k, num_rows, K, stride_x, BLOCK_M, BLOCK_K, TMA).T
        total = dot(w, rows, total, UPCAST)
        if IS_GATED:
            w = _tile(weight, N + first_n, k, 2 * N, K, stride_w, BLOCK_N, BLOCK_K, TMA)
            up = dot(w, rows, up, UPCAST)
    return total, up


@triton.jit
def finished(total, bias, n, N, HAS_BIAS: tl.constexpr, DTYPE: tl.constexpr):
    """Add the bias of columns n to `total` and round."""
    if HAS_BIAS:
        total += tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32)[:, None]
    return total.to(DTYPE)


@triton.jit(do_not_specialize=["num_rows", "N", "K", "stride_w", "stride_x", "leads"])
def _product_kernel(
    weight,
    x,
    bias,
    out,
    num_rows,
    N,
    K,
    stride_w,
    stride_x,
    leads,
    UNIT: tl.constexpr,
    TMA: tl.constexpr,
    ACTIVATION: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    UPCAST: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):
    """Compute BLOCK_M rows and BLOCK_N columns of out [num_rows, N]. weight and x: descriptors if TMA, else pointers.

    N, K and strides come in units of UNIT, so that the compiler knows their alignment. ACTIVATION: "" for a plain
    product; else weight has N more rows, whose product is `up`.
    leads: 1 if the next kernel may start early, else 0.
    """
    N, K, stride_w, stride_x = N * UNIT, K * UNIT, stride_w * UNIT, stride_x * UNIT
    first_m, first_n = first_row(num_rows, BLOCK_M), tl.program_id(1) * BLOCK_N
    if PDL:
        if leads != 0:
            gdc_launch_dependents()
        gdc_wait()
    total, up = product_sums(
        weight, x, first_m, first_n, num_rows, N, K, stride_w, stride_x,
        TMA, ACTIVATION != "", UPCAST, BLOCK_M, BLOCK_N, BLOCK_K,
    )  # fmt: skip
    m, n = first_m + tl.arange(0, BLOCK_M), first_n + tl.arange(0, BLOCK_N)
    product = finished(total, bias, n, N, HAS_BIAS, out.dtype.element_ty)
    if ACTIVATION != "":
        product = gated(product, finished(up, bias + N, n, N, HAS_BIAS, out.dtype.element_ty), ACTIVATION)
    at = out + m.to(tl.int64)[None, :] * N + n[:, None]
    tl.store(at, product, mask=(m < num_rows)[None, :] & (n < N)[:, None])


def product(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    activation: str | None,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Multiply rows x [M, K], dense in K, with weight [N, K], or [2*N, K] with an activation: [M, N].

    dtype: of the result; by default that of x.
    """
    assert weight.stride(1) == 1 and x.stride(1) == 1 and x.dtype == weight.dtype, "rows are dense, and of one dtype"
    num_rows, N = x.shape[0], weight.shape[0] // (1 if activation is None else 2)
    out = torch.empty(num_rows, N, dtype=dtype or x.dtype, device=x.device)
    if num_rows == 0:
        return out
    tile = choose_tile(num_rows, N, activation is not None, x.device)
    grid, args, constants = launch_of(x, weight, bias, activation or "", out, tile)
    is_early = follows_early(num_rows)
    args, constants["PDL"] = (*args, int(is_early and weight.numel() < SMALL)), is_early
    options = {"num_warps": tile.num_warps, "num_stages": tile.num_stages, "launch_pdl": is_early}
    if is_aligned(weight, x, bias):
        cached_launch(_product_kernel, **options)(grid, *args, **constants)
    else:
        _product_kernel[grid](*args, **constants, **options)
    return out


def launch_of(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, activation: str, out: torch.Tensor, tile: Tile
) -> tuple[tuple[int, int], tuple[Any, ...], dict[str, Any]]:
    """Return the grid, the arguments and the constants of a product's kernel; activation: "" for none."""
    (num_rows, N), K = out.shape, x.shape[1]
    strides = weight.stride(0), x.stride(0)
    is_tma = is_aligned(weight, x, bias) and all(stride % 8 == 0 for stride in strides)
    is_tma = is_tma and (INTERPRETED or capability() >= 90)  # Hopper and later; the interpreter emulates it
    unit = 8 if all(size % 8 == 0 for size in (N, K, *strides)) else 1
    args = (
        TensorDescriptor(weight, [*weight.shape], [strides[0], 1], [tile.n, tile.k]) if is_tma else weight,
        TensorDescriptor(x, [num_rows, K], [strides[1], 1], [tile.m, tile.k]) if is_tma else x,
        out if bias is None else bias,
        out,
        num_rows,
        *(size // unit for size in (N, K, *strides)),
    )
    constants = {"UNIT": unit, "TMA": is_tma, "ACTIVATION": activation, "HAS_BIAS": bias is not None}
    constants |= {"UPCAST": INTERPRETED, "BLOCK_M": tile.m, "BLOCK_N": tile.n, "BLOCK_K": tile.k}
    return (cdiv(num_rows, tile.m), cdiv(N, tile.n)), args, constants
