"""What the draft imitates and how far it is off, without ever holding more than a chunk of [rows, dv] in fp32."""

from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Goal:
    """What the target says at N rows, restricted to the hot vocabulary.

    logits: [N, dv] in the target's dtype. best: [N] int64, draft id of the target's argmax over its WHOLE vocabulary,
    -1 where the hot vocabulary lacks it; such rows are not trained and count as misses.
    """

    logits: torch.Tensor
    best: torch.Tensor

    @property
    def is_trained(self) -> torch.Tensor:
        """[N] bool: rows whose argmax the draft can say."""
        return self.best >= 0


def goal_of(logits: torch.Tensor, rows: torch.Tensor, hot_ids: torch.Tensor, chunk_rows: int) -> Goal:
    """The Goal at `rows` [N] int64 of the target's `logits` [M, V]; hot_ids [dv] int64, ascending."""
    to_draft = torch.full((logits.shape[1],), -1, dtype=torch.int64, device=logits.device)
    to_draft[hot_ids] = torch.arange(hot_ids.numel(), device=logits.device)
    hot = torch.empty(rows.numel(), hot_ids.numel(), dtype=logits.dtype, device=logits.device)
    best = torch.empty_like(rows)
    for start in range(0, rows.numel(), chunk_rows):
        span = slice(start, start + chunk_rows)
        block = logits.index_select(0, rows[span])
        torch.index_select(block, 1, hot_ids, out=hot[span])
        best[span] = to_draft[block.argmax(-1)]
    return Goal(hot, best)


def imitation_loss(
    states: torch.Tensor, lm_head: torch.Tensor, goal: Goal, lk_weight: float, chunk_rows: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """(mean loss over trained rows, draft argmax [N] int64) of normed `states` [N, h_d] under lm_head [dv, h_d].

    Soft cross-entropy -Σ p log q against p, the target's softmax renormalised over the hot vocabulary; lk_weight adds
    -log Σ min(p, q), the log of the acceptance probability (the "LK" loss).
    """
    weights = goal.is_trained.float()
    weights = weights / weights.sum().clamp(min=1.0)
    return _Imitation.apply(states, lm_head, goal.logits, weights, lk_weight, chunk_rows, torch.is_grad_enabled())


class _Imitation(torch.autograd.Function):
    """Loss and gradient in one pass over chunks of rows: d loss / d logits is known in closed form (below), so no
    [N, dv] tensor is kept for the backward pass."""

    @staticmethod
    def forward(
        ctx: Any,
        states: torch.Tensor,
        lm_head: torch.Tensor,
        goal_logits: torch.Tensor,
        weights: torch.Tensor,
        lk_weight: float,
        chunk_rows: int,
        wants_grad: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        loss = torch.zeros((), device=states.device)
        best = torch.empty(states.shape[0], dtype=torch.int64, device=states.device)
        wants_head = wants_grad and lm_head.requires_grad
        grad_states = torch.empty_like(states) if wants_grad else None
        grad_head = torch.zeros_like(lm_head, dtype=torch.float32) if wants_head else None
        for start in range(0, states.shape[0], chunk_rows):
            span = slice(start, start + chunk_rows)
            logits = states[span] @ lm_head.T
            best[span] = logits.argmax(-1)
            row_loss, grad = _rows(logits.float(), goal_logits[span].float(), lk_weight, wants_grad)
            loss += (row_loss * weights[span]).sum()
            if grad_states is not None:
                grad = grad.mul_(weights[span, None]).to(states.dtype)
                grad_states[span] = grad @ lm_head
                if grad_head is not None:
                    grad_head += (grad.T @ states[span]).float()
        ctx.mark_non_differentiable(best)
        ctx.save_for_backward(grad_states, grad_head)
        ctx.head_dtype = lm_head.dtype
        return loss, best

    @staticmethod
    def backward(ctx: Any, grad_loss: torch.Tensor, _: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        grad_states, grad_head = ctx.saved_tensors
        for_head = None if grad_head is None else (grad_head * grad_loss).to(ctx.head_dtype)
        return grad_states * grad_loss.to(grad_states.dtype), for_head, None, None, None, None, None


def _rows(
    logits: torch.Tensor, goal_logits: torch.Tensor, lk_weight: float, wants_grad: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """(loss [n], d loss / d logits [n, dv]) of fp32 logits [n, dv]; the gradient is only valid if asked for.

    Cross-entropy: d/dz = q - p. Acceptance α = Σ min(p, q): dα/dz_k = q_k ([q_k < p_k] - Σ_v [q_v < p_v] q_v).
    """
    log_q = logits.log_softmax(-1)
    p = goal_logits.softmax(-1)
    loss = -(p * log_q).sum(-1)
    q = log_q.exp_() if wants_grad or lk_weight else log_q
    if not lk_weight:
        return loss, q.sub_(p) if wants_grad else q
    alpha = torch.minimum(p, q).sum(-1).clamp(min=1e-6)
    below = torch.where(q < p, q, 0.0)
    d_alpha = below - q * below.sum(-1, keepdim=True)
    return loss - lk_weight * alpha.log(), q - p - d_alpha * (lk_weight / alpha).unsqueeze(-1)
