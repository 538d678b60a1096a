"""The best of a few hundred scores a row, by one warp: routers of experts ask for eight of 256, and torch sorts.

Twin: `specdec.backends.experts.choices.top_scores_twin`.
"""

import torch
import triton
import triton.language as tl

LOWEST = tl.constexpr(-(1 << 63))  # below every key


@triton.jit(do_not_specialize_on_alignment=["scores", "values", "indices"])
def _top_kernel(scores, values, indices, row_stride, NUM: tl.constexpr, K: tl.constexpr, BLOCK: tl.constexpr):
    """One row. Keys hold what orders scores, and below it what puts the lower of two equal ones' indices first."""
    row = tl.program_id(0).to(tl.int64)
    index = tl.arange(0, BLOCK)
    score = tl.load(scores + row * row_stride + index, mask=index < NUM, other=float("-inf")).to(tl.float32)
    bits = (score + 0.0).to(tl.int32, bitcast=True)  # -0.0 and 0.0 are equal
    ordered = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    keys = (ordered.to(tl.int64) << 32) | (BLOCK - 1 - index).to(tl.int64)
    keys = tl.where(index < NUM, keys, LOWEST)
    for i in tl.static_range(K):
        best = tl.max(keys, 0)
        keys = tl.where(keys == best, LOWEST, keys)
        found = BLOCK - 1 - (best & 0xFFFFFFFF)
        tl.store(indices + row * K + i, found)
        tl.store(values + row * K + i, tl.load(scores + row * row_stride + found))


def top_scores(scores: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """See `specdec.backends.experts.choices.top_scores`."""
    num_rows, num = scores.shape
    values = torch.empty(num_rows, k, dtype=scores.dtype, device=scores.device)
    indices = torch.empty(num_rows, k, dtype=torch.int64, device=scores.device)
    block = triton.next_power_of_2(num)
    if num_rows:
        _top_kernel[(num_rows,)](
            scores, values, indices, scores.stride(0), NUM=num, K=k, BLOCK=block, num_warps=1 if block <= 512 else 4
        )
    return values, indices
