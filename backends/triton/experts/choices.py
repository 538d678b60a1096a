"""Top-k of routers, a warp a row, and sums of chosen experts' results. Routers ask for eight of 256, and torch sorts.

Twins: `specdec.backends.experts.choices.top_scores_twin` and `weighted_sum_twin`.
"""

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from specdec.backends.triton.launch.relaunch import follows_early

LOWEST = tl.constexpr(-(1 << 63))  # below every key
COLUMNS = 1024  # of a program of `weighted_sum`, at most


@triton.jit(do_not_specialize_on_alignment=["scores", "values", "indices"])
def _top_kernel(
    scores,
    values,
    indices,
    row_stride,
    NUM: tl.constexpr,
    K: tl.constexpr,
    SOFTMAX: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):
    """One row. Keys hold what orders scores, and below it what puts the lower of two equal ones' indices first."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    index, place = tl.arange(0, BLOCK), tl.arange(0, BLOCK_K)
    score = tl.load(scores + row * row_stride + index, mask=index < NUM, other=float("-inf")).to(tl.float32)
    bits = (score + 0.0).to(tl.int32, bitcast=True)  # -0.0 and 0.0 are equal
    ordered = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    keys = (ordered.to(tl.int64) << 32) | (BLOCK - 1 - index).to(tl.int64)
    keys = tl.where(index < NUM, keys, LOWEST)
    chosen = tl.full([BLOCK_K], float("-inf"), tl.float32)
    for i in tl.static_range(K):
        best = tl.max(keys, 0)
        keys = tl.where(keys == best, LOWEST, keys)
        found = BLOCK - 1 - (best & 0xFFFFFFFF)
        tl.store(indices + row * K + i, found)
        chosen = tl.where(place == i, tl.load(scores + row * row_stride + found).to(tl.float32), chosen)
    if SOFTMAX != "":
        largest = tl.max(chosen, 0)
        chosen = tl.exp(chosen - largest)
        chosen = chosen / tl.sum(chosen if SOFTMAX == "chosen" else tl.exp(score - largest), 0)
    tl.store(values + row * K + place, chosen.to(values.dtype.element_ty), mask=place < K)


@triton.jit(do_not_specialize_on_alignment=["rows", "weights", "out"])
def _weighted_sum_kernel(
    rows,
    weights,
    out,
    H: tl.constexpr,
    K: tl.constexpr,
    ROUND: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """A block of columns of one token. ROUND: to the dtype of rows, after each product."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    token = tl.program_id(0).to(tl.int64)
    h = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for j in tl.static_range(K):
        weight = tl.load(weights + token * K + j).to(tl.float32)
        row = tl.load(rows + (token * K + j) * H + h, mask=h < H, other=0.0)
        product = row.to(tl.float32) * weight
        if ROUND:
            product = product.to(row.dtype).to(tl.float32)
        total += product
    tl.store(out + token * H + h, total.to(out.dtype.element_ty), mask=h < H)


def top_scores(
    scores: torch.Tensor, k: int, softmax: str = "", dtype: torch.dtype | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `specdec.backends.experts.choices.top_scores`."""
    num_rows, num = scores.shape
    values = torch.empty(num_rows, k, dtype=dtype or scores.dtype, device=scores.device)
    indices = torch.empty(num_rows, k, dtype=torch.int64, device=scores.device)
    block, is_early = triton.next_power_of_2(num), follows_early(num_rows)
    if num_rows:
        _top_kernel[(num_rows,)](
            scores,
            values,
            indices,
            scores.stride(0),
            NUM=num,
            K=k,
            SOFTMAX=softmax,
            BLOCK=block,
            BLOCK_K=triton.next_power_of_2(k),
            PDL=is_early,
            num_warps=1 if block <= 512 else 4,
            launch_pdl=is_early,
        )
    return values, indices


def weighted_sum(rows: torch.Tensor, weights: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """See `specdec.backends.experts.choices.weighted_sum`."""
    rows, weights = rows.contiguous(), weights.contiguous()
    (num_tokens, k), num_columns = weights.shape, rows.shape[1]
    out = torch.empty(num_tokens, num_columns, dtype=dtype, device=rows.device)
    block = min(triton.next_power_of_2(num_columns), COLUMNS)
    if num_tokens:
        is_rounded = torch.promote_types(rows.dtype, weights.dtype) == rows.dtype
        grid, is_early = (num_tokens, triton.cdiv(num_columns, block)), follows_early(num_tokens)
        constants = {"H": num_columns, "K": k, "ROUND": is_rounded, "BLOCK": block, "PDL": is_early}
        _weighted_sum_kernel[grid](rows, weights, out, **constants, launch_pdl=is_early)
    return out
