"""Products of few rows with LoRA adapters, in two launches: the sums of `shrink`, then a product that adds B @ sums to
its tile in the epilogue.

Twins: `product_twin`, `lora_twin`, `gate_twin`, one after the other. Bits are those of `products`, `lora` and `gates`.
The second launch starts while the first one runs (PDL), and waits for it only after its main loop. Its other inputs are
complete by then: the first launch triggers it only after all kernels before have ended.
"""

from collections.abc import Sequence
from itertools import accumulate

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents

from specdec.backends.linear import MOST_PARTS
from specdec.backends.triton.launch.fences import fence_copies
from specdec.backends.triton.launch.relaunch import cached_launch, follows_early, is_aligned, wait_for_others
from specdec.backends.triton.linear.gates import gated
from specdec.backends.triton.linear.lora import low_rows, one_by_one, plus
from specdec.backends.triton.linear.parts import filled, picked
from specdec.backends.triton.linear.products import SMALL, dot, finished, first_row, launch_of, product_sums
from specdec.backends.triton.linear.shrink import sums_by_adapter
from specdec.backends.triton.linear.tiles import choose_tile

MOST_ROWS = 64  # with 128 rows, separate ops are faster
AHEAD = tl.constexpr(3)  # pipeline stages of B's tiles
REGISTERS = 184  # per thread with a gate: programs of both launches fit on a multiprocessor
SPAN = 8192  # elements of B or of rows that are multiplied at once, except for large ranks


@triton.jit
def _together(weights, low, own, n, size, SPAN: tl.constexpr, UPCAST: tl.constexpr):
    """Return what `one_by_one` does, with the B of SPAN // RANK adapters in one product: a row is zero outside its own
    adapter's columns. B of adapters without rows is not loaded. Zeros change no sum, except times non-finite values.
    """
    RANK: tl.constexpr = low.shape[1]
    COUNT: tl.constexpr = SPAN // RANK
    c, i, last = tl.arange(0, SPAN), tl.arange(0, COUNT), tl.max(own, 0)
    lows = tl.broadcast_to(low[:, None, :], [low.shape[0], COUNT, RANK]).reshape([low.shape[0], SPAN])
    added = tl.zeros([n.shape[0], low.shape[0]], tl.float32)
    for first in tl.range(tl.min(tl.where(own > 0, own, last), 0), last + 1, COUNT, num_stages=AHEAD):
        has_one = tl.max((own[:, None] == (first + i)[None, :]).to(tl.int32), 0)
        present = tl.sum(has_one << i, 0)  # a bit per adapter, so that loads stay wide
        inside = (n < size)[:, None] & ((present >> (c // RANK)) & 1 == 1)[None, :]
        column = weights + (first - 1 + c // RANK).to(tl.int64) * size * RANK + c % RANK
        b = tl.load(column[None, :] + n[:, None] * RANK, mask=inside, other=0.0)
        fence_copies(n.shape[0])
        is_own = own[:, None] == (first + c // RANK)[None, :]
        added = dot(b, tl.where(is_own, lows, 0.0).T, added, UPCAST)
    return added


@triton.jit
def _with_adapters(
    product,
    own,
    rows,
    sums,
    weights,
    scales,
    n,
    size,
    num_rows,
    NUM_CHUNKS: tl.constexpr,
    RANK: tl.constexpr,
    SPAN: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """Return `product` [BLOCK_N, BLOCK_M] plus scale * B @ sums for rows with an adapter; n: columns of one part."""
    low = low_rows(sums, rows, own, num_rows, NUM_CHUNKS, RANK, product.dtype)
    added = _together(weights, low, own, n, size, SPAN, UPCAST)
    if tl.max((added != added).to(tl.int32)) > 0:  # NaN: perhaps 0 times a non-finite value of another row's adapter
        added = one_by_one(weights, low, own, n, size, UPCAST)
    return plus(product.to(tl.float32), added, scales, own).to(product.dtype)


@triton.jit(
    do_not_specialize=["num_rows", "N", "K", "stride_w", "stride_x", "n0", "n1", "n2"],
    do_not_specialize_on_alignment=["adapters"],
)
def _adapted_kernel(
    weight,
    x,
    bias,
    out,
    num_rows,
    N,
    K,
    stride_w,
    stride_x,
    adapters,
    sums,
    b0,
    b1,
    b2,
    scales0,
    scales1,
    scales2,
    n0,
    n1,
    n2,
    UNIT: tl.constexpr,
    TMA: tl.constexpr,
    ACTIVATION: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    UPCAST: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    NUM_CHUNKS: tl.constexpr,
    RANK: tl.constexpr,
    SPAN: tl.constexpr,
    PDL: tl.constexpr,
    LEADS: tl.constexpr,
):
    """See `products._product_kernel`. n0, n1, n2: columns of the parts, which begin at tile boundaries; columns after
    them have no adapters. With an activation, gate and up are the parts."""
    N, K, stride_w, stride_x = N * UNIT, K * UNIT, stride_w * UNIT, stride_x * UNIT
    first_m, first_n = first_row(num_rows, BLOCK_M), tl.program_id(1) * BLOCK_N
    m, n = first_m + tl.arange(0, BLOCK_M), first_n + tl.arange(0, BLOCK_N)
    if LEADS:
        gdc_launch_dependents()
    own = tl.load(adapters + m, mask=m < num_rows, other=0).to(tl.int32)
    total, up = product_sums(
        weight, x, first_m, first_n, num_rows, N, K, stride_w, stride_x,
        TMA, ACTIVATION != "", UPCAST, BLOCK_M, BLOCK_N, BLOCK_K,
    )  # fmt: skip
    product = finished(total, bias, n, N, HAS_BIAS, out.dtype.element_ty)
    wait_for_others(PDL, False)  # in every program: this launch ends after the one before
    if ACTIVATION != "":
        up = finished(up, bias + N, n, N, HAS_BIAS, out.dtype.element_ty)
        if tl.max(own, 0) > 0:
            product = _with_adapters(product, own, m, sums, b0, scales0, n, N, num_rows, NUM_CHUNKS, RANK, SPAN, UPCAST)
            sums += NUM_CHUNKS * num_rows * RANK
            up = _with_adapters(up, own, m, sums, b1, scales1, n, N, num_rows, NUM_CHUNKS, RANK, SPAN, UPCAST)
        product = gated(product, up, ACTIVATION)
    else:
        end1, end2 = n0 + n1, n0 + n1 + n2
        part = (first_n >= n0).to(tl.int32) + (first_n >= end1).to(tl.int32) + (first_n >= end2).to(tl.int32)
        if (tl.max(own, 0) > 0) & (part < 3):
            product = _with_adapters(
                product, own, m, sums + part * NUM_CHUNKS * num_rows * RANK, picked(b0, b1, b2, part),
                picked(scales0, scales1, scales2, part), n - picked(0, n0, end1, part), picked(n0, n1, n2, part),
                num_rows, NUM_CHUNKS, RANK, SPAN, UPCAST,
            )  # fmt: skip
    at = out + m.to(tl.int64)[None, :] * N + n[:, None]
    tl.store(at, product, mask=(m < num_rows)[None, :] & (n < N)[:, None])


def lora_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    a: Sequence[torch.Tensor],
    b: Sequence[torch.Tensor],
    scales: Sequence[torch.Tensor],
    activation: str,
    adapters: torch.Tensor,
) -> torch.Tensor | None:
    """See `specdec.backends.linear.lora.lora_linear`; rows x [T, K], adapters [T] int64.

    None for many rows, tensors that are not aligned or dense, and parts that do not begin at tile boundaries.
    """
    if not 0 < len(x) <= MOST_ROWS or x.stride(1) != 1 or not is_aligned(x, weight, bias, *a, *b, *scales):
        return None
    assert adapters.is_contiguous(), "they are dense"
    N, of_parts = weight.shape[0] // (2 if activation else 1), [of_b.shape[1] for of_b in b]
    tile = choose_tile(len(x), N, bool(activation), x.device)
    if of_parts != [N, N] if activation else any(end != N and end % tile.n for end in accumulate(of_parts)):
        return None
    sums = sums_by_adapter(x, a, adapters)
    out = torch.empty(len(x), N, dtype=x.dtype, device=x.device)
    grid, args, constants = launch_of(x, weight, bias, activation, out, tile)
    (_, num_chunks, _, rank), is_early = sums.shape, follows_early()
    span = max(rank, min(256, SPAN // max(tile.m, tile.n)))
    constants |= {"NUM_CHUNKS": num_chunks, "RANK": rank, "SPAN": span, "PDL": is_early}
    constants |= {"LEADS": is_early and weight.numel() < SMALL}
    maxnreg = REGISTERS if activation else None
    sizes = [*of_parts, 0, 0][:MOST_PARTS]
    run = cached_launch(_adapted_kernel, tile.num_warps, tile.num_stages, is_early, maxnreg)
    run(grid, *args, adapters, sums, *filled(b), *filled(scales), *sizes, **constants)
    return out
