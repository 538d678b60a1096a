"""`specdec::top_scores`, `weighted_sum`, `experts_rms_norm`: MoE routing, the sum of experts' outputs, and its norm.

A row's bits depend on that row alone. In traces `top_scores` replaces `torch.topk`, which takes two launches or more,
and the softmax before or after it.
"""

import torch

from specdec.backends.library import KERNEL_DTYPES, op
from specdec.backends.linear import add_rms_norm

MOST_SCORES, MOST_CHOSEN = 1024, 32  # of a row
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@op(
    "top_scores(Tensor scores, int k, str softmax='', ScalarType? dtype=None) -> (Tensor, Tensor)",
    lambda scores, k, softmax="", dtype=None: tuple(
        scores.new_empty(*scores.shape[:-1], k, dtype=own) for own in (dtype or scores.dtype, torch.int64)
    ),
    "experts.choices",
    lambda *_: True,
)
def top_scores(
    scores: torch.Tensor, k: int, softmax: str = "", dtype: torch.dtype | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose the k largest of each row of scores [..., E]: values [..., k], descending, and indices [..., k] int64.

    Among equal scores the lower index is chosen, where `torch.topk` may choose any. softmax: "all": values are those of
    the softmax over all scores; "chosen": of the softmax over the chosen ones; "": the scores themselves. dtype: of the
    values, by default that of scores.
    """
    values, indices = scores.sort(dim=-1, descending=True, stable=True)
    values, indices = values[..., :k], indices[..., :k].contiguous()
    if softmax == "all":
        values = scores.softmax(-1, dtype=torch.float32).gather(-1, indices)
    elif softmax == "chosen":
        values = values.softmax(-1, dtype=torch.float32)
    return values.to(dtype or scores.dtype).contiguous(), indices


def takes(scores: torch.Tensor, k: int) -> bool:
    """Return whether `top_scores` supports dtype and last dim of `scores`; the number of rows may be symbolic."""
    num = int(scores.shape[-1])
    return scores.dtype in DTYPES and num <= MOST_SCORES and 0 < k <= min(num, MOST_CHOSEN)


@op(
    "weighted_sum(Tensor rows, Tensor weights, ScalarType dtype) -> Tensor",
    lambda rows, weights, dtype: rows.new_empty(weights.shape[0], rows.shape[1], dtype=dtype),
    "experts.choices",
    lambda rows, *_: rows.dtype in DTYPES,
)
def weighted_sum(rows: torch.Tensor, weights: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the sums of a token's k expert outputs, [T, h] in `dtype`: over j of rows[t*k+j] * weights[t, j].

    rows: [T*k, h]; weights: [T, k]. Products are rounded to the dtype that torch promotes both to, and added in fp32 in
    the order of j; sums are rounded once.
    """
    products = rows.view(*weights.shape, -1) * weights.unsqueeze(-1)
    total = products[:, 0].float()
    for j in range(1, weights.shape[1]):
        total = total + products[:, j].float()
    return total.to(dtype)


@op(
    "experts_rms_norm(Tensor rows, Tensor weights, Tensor? shared, Tensor? gate, Tensor residual, Tensor scale, "
    "float eps, float offset, bool is_late) -> (Tensor, Tensor)",
    lambda rows, weights, shared, gate, residual, *_: (
        residual.new_empty(residual.shape),
        residual.new_empty(residual.shape),
    ),
    "experts.choices",
    lambda rows, weights, shared, gate, residual, *_: rows.dtype == residual.dtype and rows.dtype in KERNEL_DTYPES,
)
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
    """Return `add_rms_norm` of the experts' output and `residual`: (norm, total), both in the shape of residual.

    The experts' output is `weighted_sum(rows, weights)` plus sigmoid(gate) * shared. shared: [T, h], output of shared
    experts, or None; gate: [T, 1], None for a factor of 1. residual: [..., h] of T tokens. Rounded after every step, as
    the ops that it replaces.
    """
    total = weighted_sum.twin(rows, weights, residual.dtype)
    if shared is not None:
        total = total + (shared if gate is None else gate.sigmoid() * shared)
    return add_rms_norm.twin(total.view(residual.shape), residual, scale, eps, offset, is_late)
