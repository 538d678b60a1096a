"""Grouped products of tokens with their experts, without a sort, atomics, or the host.

Twin: `specdec.backends.experts.grouped_linear`. For few rows, a program scans all ids for the rows of its expert and
reads a tile of that expert's weight once, which decides the time of a decode; programs of experts without rows exit.
For more rows, another launch first orders rows by expert (`route`), and programs take blocks of them. Ids past the last
expert are one more expert, without features: its products are zero. One accumulator sums K in order, so a row's bits
depend on neither its tile nor the other rows.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from specdec.backends.triton.launch.fences import fence_copies
from specdec.backends.triton.launch.relaunch import INTERPRETED, follows_early, wait_for_others
from specdec.backends.triton.launch.shared_memory import shared_memory
from specdec.backends.triton.launch.sizes import cdiv, next_power_of_2
from specdec.backends.triton.linear.gates import gated
from specdec.backends.triton.linear.tiles import Tile

SCANNED = 512  # rows, a power of two; for more, comparing the rows of a block with all ids costs more than a launch
FEW = 64  # rows, also a power of two
SCANNED_AN_EXPERT = 8  # rows on average; for more, some experts would have several tiles, and be read more than once
PRECISION = tl.constexpr("tf32x3")  # of fp32 products: three TF32 products on tensor cores, which lose 2^-22 of a term


@triton.jit(do_not_specialize=["num_rows"], do_not_specialize_on_alignment=["ids"])
def _route_kernel(ids, order, starts, num_rows, E: tl.constexpr, BLOCK: tl.constexpr):
    """Write one expert's rows to `order`, ascending; they start at the number of rows of all lower experts."""
    expert = tl.program_id(0)
    at = tl.zeros([], tl.int32)
    for first in range(0, num_rows, BLOCK):
        row = first + tl.arange(0, BLOCK)
        found = tl.load(ids + row, mask=row < num_rows, other=E).to(tl.int32)
        at += tl.sum((tl.minimum(found, E) < expert).to(tl.int32))
    tl.store(starts + expert, at)
    for first in range(0, num_rows, BLOCK):
        row = first + tl.arange(0, BLOCK)
        found = tl.load(ids + row, mask=row < num_rows, other=E).to(tl.int32)
        is_own = (tl.minimum(found, E) == expert) & (row < num_rows)
        place = at + tl.cumsum(is_own.to(tl.int32), 0) - 1
        tl.store(order + place, row, mask=is_own)
        at += tl.sum(is_own.to(tl.int32))


@triton.jit
def routed_block(starts, block, num_rows, E: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_M: tl.constexpr):
    """Return the expert of a block of rows, and their begin and end in `order`; the end is 0 past the last block."""
    experts = tl.arange(0, BLOCK_E)
    begin = tl.load(starts + experts, mask=experts <= E, other=num_rows)
    end = tl.load(starts + experts + 1, mask=experts < E, other=num_rows)
    num_blocks = (end - begin + BLOCK_M - 1) // BLOCK_M
    upto = tl.cumsum(num_blocks, 0)
    expert = tl.sum((upto <= block).to(tl.int32))
    is_it = experts == expert
    first = tl.sum(tl.where(is_it, begin + (block - upto + num_blocks) * BLOCK_M, 0))
    return expert, first, tl.minimum(first + BLOCK_M, tl.sum(tl.where(is_it, end, 0)))


@triton.jit
def scanned(ids, program, num_rows, by_row, E: tl.constexpr, BLOCK_IDS: tl.constexpr):
    """Scan all ids for a program's rows: return its expert, the mask of the expert's ids, their ranks among these, and
    their number. by_row: 1 if the expert is that of row `program`, with 0 rows unless it is the expert's first. See
    `_grouped_linear_kernel`."""
    i = tl.arange(0, BLOCK_IDS)
    found = tl.minimum(tl.load(ids + i, mask=i < num_rows, other=E).to(tl.int32), E)
    chosen = tl.load(ids + tl.minimum(program, num_rows - 1)).to(tl.int32)
    expert = tl.where(by_row == 1, tl.minimum(chosen, E), program)
    is_own = (found == expert) & (i < num_rows)
    rank = tl.cumsum(is_own.to(tl.int32), 0) - 1
    num_before = tl.sum((is_own & (i < program)).to(tl.int32)) * by_row
    return expert, is_own, rank, tl.where(num_before == 0, tl.sum(is_own.to(tl.int32)), 0)


@triton.jit
def line_of(order, is_own, rank, m, end, ROUTED: tl.constexpr, BLOCK_IDS: tl.constexpr):
    """Return the indices in `ids` of rows m of an expert."""
    if ROUTED:
        line = tl.load(order + m, mask=m < end, other=0)
    else:
        is_it = is_own[None, :] & (rank[None, :] == m[:, None])
        line = tl.sum(tl.where(is_it, tl.arange(0, BLOCK_IDS)[None, :], 0), 1)
    return line


@triton.jit
def gated_columns(product, ACTIVATION: tl.constexpr, DTYPE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Return activation(gate) * up of interleaved columns of gate and up; "swigluoai" in fp32, rounded once."""
    gate, up = tl.split(product.reshape([BLOCK_N // 2, 2, BLOCK_M]).permute(0, 2, 1))
    if ACTIVATION == "swigluoai":
        gate = tl.where(gate > 7, 7.0, gate)
        up = tl.where(up > 7, 7.0, tl.where(up < -7, -7.0, up))
        result = (gate / (1 + tl.exp(-1.702 * gate)) * (up + 1)).to(DTYPE)
    else:
        result = gated(gate.to(DTYPE), up.to(DTYPE), ACTIVATION)
    return result


@triton.jit(
    do_not_specialize=["num_rows", "copies", "by_row"],
    do_not_specialize_on_alignment=["ids", "order", "starts"],
)
def _grouped_linear_kernel(
    x,
    ids,
    weight,
    bias,
    out,
    order,
    starts,
    num_rows,
    copies,
    by_row,
    N,
    K,
    stride_e,
    stride_row,
    E: tl.constexpr,
    ROUTED: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    ACTIVATION: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    UPCAST: tl.constexpr,
    BLOCK_IDS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):
    """Compute BLOCK_N columns of the products with one expert: for one block of its rows if ROUTED, else for all.

    Unless ROUTED, there is a program per expert, or, if by_row is 1, per row, and only the first row of each expert has
    work. ACTIVATION: "" for a plain product; else gate and up columns are interleaved in a tile, as they are in the
    weight of "swigluoai".
    """
    wait_for_others(PDL, False)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    is_column = n < N
    if ACTIVATION != "" and ACTIVATION != "swigluoai":
        n = n // 2 + n % 2 * (N // 2)
    program = tl.program_id(1)
    i = tl.arange(0, BLOCK_IDS)
    if ROUTED:
        expert, begin, end = routed_block(starts, program, num_rows, E, BLOCK_IDS, BLOCK_M)
    else:
        expert, is_own, rank, end = scanned(ids, program, num_rows, by_row, E, BLOCK_IDS)
        begin = 0
    num_features = tl.where(expert < E, K, 0)
    matrix = weight + expert.to(tl.int64) * stride_e
    for first in range(begin, end, BLOCK_M):
        m = first + tl.arange(0, BLOCK_M)
        if ROUTED:
            row = tl.load(order + m, mask=m < end, other=0).to(tl.int64)
        else:
            is_it = is_own[None, :] & (rank[None, :] == m[:, None])
            row = tl.sum(tl.where(is_it, i[None, :], 0), 1).to(tl.int64)
        is_row = (m < end)[:, None]
        total = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
        for k_first in range(0, num_features, BLOCK_K):
            k = k_first + tl.arange(0, BLOCK_K)
            a = tl.load(x + (row // copies)[:, None] * K + k, mask=is_row & (k < K), other=0.0)
            inside = (k < K)[:, None] & is_column
            if TRANSPOSED:
                b = tl.load(matrix + k[:, None] * stride_row + n, mask=inside, other=0.0)
            else:
                b = tl.load(matrix + n * stride_row + k[:, None], mask=inside, other=0.0)
            if UPCAST:  # the interpreter cannot multiply bf16
                a, b = a.to(tl.float32), b.to(tl.float32)
            fence_copies(BLOCK_M)
            total = tl.dot(a, b, total, input_precision=PRECISION)
        product = total.to(out.dtype.element_ty)
        if HAS_BIAS:
            added = tl.load(bias + expert * N + n, mask=is_column & (expert < E), other=0.0)
            product = (product.to(tl.float32) + added.to(tl.float32)).to(out.dtype.element_ty)
        if ACTIVATION == "":
            tl.store(out + row[:, None] * N + n, product, mask=is_row & is_column)
        else:
            gate, up = tl.split(tl.reshape(product, [BLOCK_M, BLOCK_N // 2, 2]))
            half = tl.program_id(0) * (BLOCK_N // 2) + tl.arange(0, BLOCK_N // 2)
            at = out + row[:, None] * (N // 2) + half
            tl.store(at, gated(gate, up, ACTIVATION), mask=is_row & (half < N // 2))


def is_scanned(num_rows: int, num_experts: int) -> bool:
    """Return whether programs scan all ids for the rows of their experts."""
    return num_rows <= min(SCANNED, SCANNED_AN_EXPERT * num_experts)


def tiling(num_rows: int, num_experts: int, K: int, itemsize: int, shared: int) -> Tile:
    """Return the tile for `num_rows` rows of all experts together, of K elements of `itemsize` bytes.

    Few rows: narrow tiles, so that many programs read weights at once, if each has much to read. Many rows: a large
    tile that reuses loaded data, with as many stages as fit in `shared` bytes of memory.
    """
    if itemsize > 2:  # TF32 parts take registers: larger tiles would not fit
        return Tile(16, 64, 32, 4, 4) if is_scanned(num_rows, num_experts) else Tile(32, 128, 32, 4, 3)
    if is_scanned(num_rows, num_experts):
        is_short = num_rows <= FEW and (num_rows > 16 or K <= 1024)
        return Tile(16, 64, 128, 4, 3) if is_short else Tile(16, 32, 128, 4, 4)
    if num_rows < 32 * num_experts:
        return Tile(32, 64, 64, 4, 4)
    loaded = (128 + 256) * 64 * itemsize
    return Tile(128, 256, 64, 8, max(min(shared // loaded, 4), 1))


def grouped_linear(
    x: torch.Tensor,
    expert_ids: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    is_transposed: bool = False,
    activation: str = "",
) -> torch.Tensor:
    """See `specdec.backends.experts.grouped_linear`; bf16, fp16 or fp32, weight with a dense dim besides the first."""
    if weight.stride(2) != 1:  # a transposed view
        weight, is_transposed = weight.transpose(1, 2), not is_transposed
    assert weight.stride(2) == 1 and x.dtype == weight.dtype, "experts need a dense dim, and x of their dtype"
    x, ids = x.contiguous(), expert_ids.contiguous()
    num_experts, num_rows = weight.shape[0], ids.numel()
    num_columns = weight.shape[2 if is_transposed else 1]
    out = torch.empty(num_rows, num_columns // (2 if activation else 1), dtype=x.dtype, device=x.device)
    if num_rows == 0:
        return out
    tile = tiling(num_rows, num_experts, x.shape[1], x.element_size(), shared_memory(x.device))
    lines, num_groups, constants = grouping(x, ids, num_experts, tile.m)
    _grouped_linear_kernel[(cdiv(num_columns, tile.n), num_groups)](
        x,
        ids,
        weight,
        weight if bias is None else bias.contiguous(),
        out,
        *lines,
        num_columns,
        x.shape[1],
        weight.stride(0),
        weight.stride(1),
        TRANSPOSED=is_transposed,
        ACTIVATION=activation,
        HAS_BIAS=bias is not None,
        UPCAST=INTERPRETED and x.dtype == torch.bfloat16,
        BLOCK_M=tile.m,
        BLOCK_N=tile.n,
        BLOCK_K=tile.k,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        **constants,
    )
    return out


def grouping(
    x: torch.Tensor, ids: torch.Tensor, num_experts: int, block_m: int
) -> tuple[tuple[Any, ...], int, dict[str, Any]]:
    """Return the arguments, grid size and constants of a launch that depend on the expert choices `ids`.

    Arguments: the results of `route`, or `ids` twice if programs scan them; the number of rows, the rows per row of x,
    and by_row. Grid size: an upper bound of the groups of `block_m` rows.
    """
    num_rows = ids.numel()
    is_routed, num_groups = not is_scanned(num_rows, num_experts), min(num_experts + 1, num_rows)
    is_early = follows_early() and not is_routed
    constants = {"E": num_experts, "ROUTED": is_routed, "PDL": is_early, "launch_pdl": is_early}
    counts = num_rows, num_rows // x.shape[0], int(num_rows <= num_experts)
    if not is_routed:
        return (ids, ids, *counts), num_groups, {**constants, "BLOCK_IDS": FEW if num_rows <= FEW else SCANNED}
    constants["BLOCK_IDS"] = next_power_of_2(num_experts + 1)
    return (*route(ids, num_experts), *counts), num_groups + num_rows // block_m, constants


def route(ids: torch.Tensor, num_experts: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the rows ordered by expert [num_rows], and where each expert's begin [E + 1], both int32."""
    order = torch.empty(ids.numel(), dtype=torch.int32, device=ids.device)
    starts = torch.empty(num_experts + 1, dtype=torch.int32, device=ids.device)
    _route_kernel[(num_experts + 1,)](ids, order, starts, ids.numel(), E=num_experts, BLOCK=4096, num_warps=8)
    return order, starts
