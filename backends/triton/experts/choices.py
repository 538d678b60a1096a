"""Top-k of routers, one warp per row; weighted sums of the chosen experts' results; and norms of these sums.

Routers choose 8 of 256, for which torch sorts.

Twins: those of `specdec.backends.experts.choices`.
"""

import torch
import triton
import triton.language as tl

from specdec.backends.triton.launch.relaunch import early, early_and_leading, wait_for_others
from specdec.backends.triton.launch.sizes import cdiv, next_power_of_2
from specdec.backends.triton.linear.norms import normalised

LOWEST = tl.constexpr(-(1 << 63))  # below every key
COLUMNS = 1024  # per program of `weighted_sum`, at most
NORM_WARPS = 8


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
    """Find the top k of one row. A key has an order-preserving score, and in its low bits the index, so that the lower
    index wins among equal scores."""
    wait_for_others(PDL, True)
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


@triton.jit
def _sum(rows, weights, token, h, H: tl.constexpr, K: tl.constexpr, ROUND: tl.constexpr, BLOCK: tl.constexpr):
    """Return columns h of a token's weighted sum, fp32. ROUND: round each product to the dtype of rows."""
    total = tl.zeros([BLOCK], tl.float32)
    for j in tl.static_range(K):
        weight = tl.load(weights + token * K + j).to(tl.float32)
        row = tl.load(rows + (token * K + j) * H + h, mask=h < H, other=0.0)
        product = row.to(tl.float32) * weight
        if ROUND:
            product = product.to(row.dtype).to(tl.float32)
        total += product
    return total


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
    """Compute a block of columns of one token; ROUND: see `_sum`."""
    wait_for_others(PDL, True)
    token = tl.program_id(0).to(tl.int64)
    h = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = _sum(rows, weights, token, h, H, K, ROUND, BLOCK)
    tl.store(out + token * H + h, total.to(out.dtype.element_ty), mask=h < H)


@triton.jit(
    do_not_specialize=["gate_stride"], do_not_specialize_on_alignment=["rows", "weights", "shared", "gate", "residual"]
)
def _experts_norm_kernel(
    rows,
    weights,
    shared,
    gate,
    residual,
    scale,
    out,
    total,
    gate_stride,
    eps,
    offset,
    H: tl.constexpr,
    K: tl.constexpr,
    ROUND: tl.constexpr,
    SHARED: tl.constexpr,
    GATED: tl.constexpr,
    LATE: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
    LEADS: tl.constexpr,
):
    """Compute one token. SHARED: add the shared experts' output; GATED: first times the sigmoid of the token's gate."""
    token, h = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    at, inside = token * H + h, h < H
    weight = tl.load(scale + h, mask=inside, other=0.0)
    wait_for_others(PDL, LEADS)
    value = _sum(rows, weights, token, h, H, K, ROUND, BLOCK).to(out.dtype.element_ty)
    if SHARED:
        added = tl.load(shared + at, mask=inside, other=0.0)
        if GATED:
            number = tl.sigmoid(tl.load(gate + token * gate_stride).to(tl.float32)).to(added.dtype).to(tl.float32)
            zero = tl.zeros([BLOCK], tl.float32)  # a product alone would be fused with the sum, and not rounded
            added = tl.fma(added.to(tl.float32), zero + number, zero).to(added.dtype)
        value = (value.to(tl.float32) + added.to(tl.float32)).to(value.dtype)
    value = (value.to(tl.float32) + tl.load(residual + at, mask=inside, other=0.0).to(tl.float32)).to(value.dtype)
    tl.store(total + at, value, mask=inside)
    normed = normalised(value[None, :], weight, eps, offset, H, LATE)
    tl.store(out + at[None, :], normed, mask=inside[None, :])


def top_scores(
    scores: torch.Tensor, k: int, softmax: str = "", dtype: torch.dtype | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `specdec.backends.experts.choices.top_scores`."""
    shape, scores = (*scores.shape[:-1], k), scores.reshape(-1, scores.shape[-1])
    scores = scores if scores.stride(-1) == 1 else scores.contiguous()
    num_rows, num = scores.shape
    values = torch.empty(num_rows, k, dtype=dtype or scores.dtype, device=scores.device)
    indices = torch.empty(num_rows, k, dtype=torch.int64, device=scores.device)
    block = next_power_of_2(num)
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
            BLOCK_K=next_power_of_2(k),
            num_warps=1 if block <= 512 else 4,
            **early(num_rows),
        )
    return values.view(shape), indices.view(shape)


def weighted_sum(rows: torch.Tensor, weights: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """See `specdec.backends.experts.choices.weighted_sum`."""
    rows, weights = rows.contiguous(), weights.contiguous()
    (num_tokens, k), num_columns = weights.shape, rows.shape[1]
    out = torch.empty(num_tokens, num_columns, dtype=dtype, device=rows.device)
    block = min(next_power_of_2(num_columns), COLUMNS)
    if num_tokens:
        is_rounded = torch.promote_types(rows.dtype, weights.dtype) == rows.dtype
        grid = (num_tokens, cdiv(num_columns, block))
        constants = {"H": num_columns, "K": k, "ROUND": is_rounded, "BLOCK": block, **early(num_tokens)}
        _weighted_sum_kernel[grid](rows, weights, out, **constants)
    return out


def experts_rms_norm(
    rows: torch.Tensor,
    weights: torch.Tensor,
    shared: torch.Tensor | None,
    gate: torch.Tensor | None,
    residual: torch.Tensor,
    scale: torch.Tensor,
    eps: float,
    offset: float,
    is_late: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `specdec.backends.experts.choices.experts_rms_norm`."""
    rows, weights, residual = rows.contiguous(), weights.contiguous(), residual.contiguous()
    shared = None if shared is None else shared.contiguous()
    (num_tokens, k), H = weights.shape, rows.shape[1]
    out, total = torch.empty_like(residual), torch.empty_like(residual)
    if num_tokens:
        stride = 0 if gate is None else gate.stride(0)
        constants = {"H": H, "K": k, "ROUND": torch.promote_types(rows.dtype, weights.dtype) == rows.dtype}
        constants |= {"SHARED": shared is not None, "GATED": gate is not None, "LATE": is_late}
        constants |= {"BLOCK": next_power_of_2(H), "num_warps": NORM_WARPS, **early_and_leading(num_tokens)}
        args = rows, weights, shared, gate, residual, scale, out, total, stride, eps, offset
        _experts_norm_kernel[(num_tokens,)](*args, **constants)
    return out, total
