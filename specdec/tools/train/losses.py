"""Losses of a draft against the target's logits (the goal), with at most a chunk of [rows, V] in fp32 at a time.

The elementwise math over a chunk is one function; compiled, it is one or two kernels that read bf16 logits and write
bf16 gradients, with everything between in fp32 registers.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F


@dataclass(frozen=True)
class Goal:
    """The target's logits at N rows, over the dv tokens that the draft scores.

    logits: [N, dv] in the target's dtype. lse: [N] fp32, their log-sum-exp. best: [N] int64, draft id of the target's
    argmax over its WHOLE vocabulary, -1 if the hot vocabulary lacks it; such rows are not trained and count as misses.
    """

    logits: torch.Tensor
    lse: torch.Tensor
    best: torch.Tensor

    @property
    def is_trained(self) -> torch.Tensor:
        """[N] bool: rows whose target argmax is in the draft's vocabulary."""
        return self.best >= 0

    @property
    def weights(self) -> torch.Tensor:
        """[N] fp32: weights that average over the trained rows."""
        weights = self.is_trained.float()
        return weights / weights.sum().clamp(min=1.0)


class OutputHead(NamedTuple):
    """An output head: weight [dv, h], and bias [dv] or None."""

    weight: torch.Tensor
    bias: torch.Tensor | None = None


class RowMath:
    """Runs `row_losses` and `row_lse` over chunks of `chunk_rows`; compiled, the last chunk is padded to full size,
    so that each is compiled once."""

    def __init__(self, chunk_rows: int, compiled: bool = False):
        self.chunk_rows = chunk_rows
        self.is_compiled = compiled
        compile = partial(torch.compile, dynamic=False, fullgraph=True) if compiled else lambda function: function
        self._losses, self._lse = compile(row_losses), compile(row_lse)

    def spans(self, num_rows: int) -> Iterator[slice]:
        """Return the slices that cut `num_rows` rows into chunks."""
        return (slice(i, min(i + self.chunk_rows, num_rows)) for i in range(0, num_rows, self.chunk_rows))

    def losses(self, *rows: torch.Tensor, lk_weight: float, wants_grad: bool) -> Any:
        """Compute `row_losses` of a chunk; rows: its tensors, [n, ...] each."""
        results = self._losses(*map(self._full, rows), lk_weight, wants_grad)
        return [None if t is None else t[: rows[0].shape[0]] for t in results]

    def goal(
        self,
        score: Callable[[torch.Tensor], torch.Tensor],
        hidden: torch.Tensor,
        vocab_size: int,
        hot_ids: torch.Tensor | None = None,
    ) -> Goal:
        """Return the Goal over hot_ids [dv] int64, ascending, or None for all V; the target's logits [N, V] are
        score(hidden [N, h])."""
        num_rows, device = hidden.shape[0], hidden.device
        ids = torch.arange(vocab_size, device=device) if hot_ids is None else hot_ids
        to_draft = torch.full((vocab_size,), -1, dtype=torch.int64, device=device)
        to_draft[ids] = torch.arange(ids.numel(), device=device)
        logits = hidden.new_empty(num_rows, ids.numel())
        lse = torch.empty(num_rows, device=device)
        best = torch.empty(num_rows, dtype=torch.int64, device=device)
        for span in self.spans(num_rows):
            block = score(hidden[span])
            logits = logits.to(block.dtype)  # some models score in fp32
            logits[span] = block if hot_ids is None else block[:, ids]
            best[span] = to_draft[block.argmax(-1)]
            lse[span] = self._lse(self._full(logits[span]))[: block.shape[0]]
        return Goal(logits, lse, best)

    def _full(self, rows: torch.Tensor) -> torch.Tensor:
        """Pad `rows` [n, ...] with zeros to chunk_rows, if compiled."""
        missing = self.chunk_rows - rows.shape[0]
        return F.pad(rows, (0, 0) * (rows.dim() - 1) + (0, missing)) if self.is_compiled and missing else rows


def imitation_loss(
    math: RowMath, states: torch.Tensor, head: OutputHead, goal: Goal, weights: torch.Tensor, lk_weight: float = 0.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (Σ weights * loss, draft argmax [N] int64) of normed `states` [N, h_d] under `head`; weights [N] fp32.

    The loss is the soft cross-entropy -Σ p log q, where p is the target's softmax over the goal's tokens and q the
    draft's; lk_weight weighs -log Σ min(p, q), the negative log of the acceptance probability (the "LK" loss).
    """
    wants_grad = torch.is_grad_enabled()
    return _Imitation.apply(states, head.weight, head.bias, goal, weights, lk_weight, math, wants_grad)


def feature_loss(states: torch.Tensor, features: torch.Tensor) -> torch.Tensor:
    """Return SmoothL1 of states [N, h] to target features [N, h], the mean over both (EAGLE-1's regression loss)."""
    return F.smooth_l1_loss(states.float(), features.float(), reduction="sum") / max(states.numel(), 1)


class _Imitation(torch.autograd.Function):
    """Loss and gradient in one pass over chunks of rows: d loss / d logits is known in closed form (below), so no
    [N, dv] tensor is kept for the backward pass."""

    @staticmethod
    def forward(
        ctx: Any,
        states: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        goal: Goal,
        weights: torch.Tensor,
        lk_weight: float,
        math: RowMath,
        wants_grad: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        loss = torch.zeros((), device=states.device)
        best = torch.empty(states.shape[0], dtype=torch.int64, device=states.device)
        wants_head = wants_grad and weight.requires_grad
        grad_states = torch.empty_like(states) if wants_grad else None
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if wants_head else None
        for span in math.spans(states.shape[0]):
            logits = F.linear(states[span], weight, bias)
            rows = (logits, goal.logits[span], goal.lse[span], weights[span])
            row_loss, best[span], grad = math.losses(*rows, lk_weight=lk_weight, wants_grad=wants_grad)
            loss += row_loss.sum()
            if grad_states is not None and grad is not None:
                grad_states[span] = grad @ weight
                if grad_weight is not None:
                    grad_weight += (grad.T @ states[span]).float()
        ctx.mark_non_differentiable(best)
        ctx.save_for_backward(grad_states, grad_weight)
        ctx.weight_dtype = weight.dtype
        return loss, best

    @staticmethod
    def backward(ctx: Any, grad_loss: torch.Tensor, _: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        grad_states, grad_weight = ctx.saved_tensors
        for_weight = None if grad_weight is None else (grad_weight * grad_loss).to(ctx.weight_dtype)
        return grad_states * grad_loss.to(grad_states.dtype), for_weight, *[None] * 6


def row_losses(
    logits: torch.Tensor,
    goal_logits: torch.Tensor,
    goal_lse: torch.Tensor,
    weights: torch.Tensor,
    lk_weight: float,
    wants_grad: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Return (weighted loss [n] fp32, argmax [n] int64, the loss's gradient [n, dv] in the logits' dtype or None).

    Cross-entropy: d/dz = q - p. Acceptance α = Σ min(p, q): dα/dz_k = q_k ([q_k < p_k] - Σ_v [q_v < p_v] q_v).
    """
    z = logits.float()
    log_q = z.log_softmax(-1)
    p = (goal_logits.float() - goal_lse.unsqueeze(-1)).exp()
    loss = -(p * log_q).sum(-1)
    if not wants_grad and not lk_weight:
        return loss * weights, z.argmax(-1), None
    q = log_q.exp()
    grad = q - p
    if lk_weight:
        alpha = torch.minimum(p, q).sum(-1).clamp(min=1e-6)
        below = torch.where(q < p, q, 0.0)
        d_alpha = below - q * below.sum(-1, keepdim=True)
        loss = loss - lk_weight * alpha.log()
        grad = grad - d_alpha * (lk_weight / alpha).unsqueeze(-1)
    return loss * weights, z.argmax(-1), (grad * weights.unsqueeze(-1)).to(logits.dtype) if wants_grad else None


def row_lse(logits: torch.Tensor) -> torch.Tensor:
    """Return the log-sum-exp [n] fp32 of logits [n, V]."""
    return logits.float().logsumexp(-1)
