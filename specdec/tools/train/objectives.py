"""Training objectives, the interface of a student to the training loop: loss and draft tokens of a batch, and AdamW."""

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from specdec.core.draft.head import BlockDraftHead, DraftHead, RecyclingHead
from specdec.reach.targets.shape import LAST
from specdec.tools.train.batches import Batch
from specdec.tools.train.blocks import block_states
from specdec.tools.train.config import TrainConfig
from specdec.tools.train.losses import Goal, OutputHead, RowMath, feature_loss, imitation_loss
from specdec.tools.train.target import Teacher
from specdec.tools.train.ttt import unroll

Rounding = Callable[[str, torch.Tensor], torch.Tensor]  # (name, fp32 weight) to the value in the working copy


class Optimizer:
    """AdamW over an fp32 module, with a working copy of it in the training dtype.

    module: fp32, updated in place; only parameters that require gradients are trained. working: a copy in `dtype`,
    through which losses are backpropagated; the module itself if it is in `dtype` already and there is no rounding.
    """

    def __init__(self, module: nn.Module, dtype: torch.dtype, config: TrainConfig, rounding: Rounding | None = None):
        weight = next(module.parameters())
        self.module = module
        self.working = module if weight.dtype == dtype and rounding is None else _copy_in(module, dtype)
        self.clip = config.clip
        self._rounding = rounding
        self._adamw = _adamw(list(_trained(module).values()), config, fused=weight.is_cuda)
        self.refresh()

    def step(self, lr: float) -> None:
        """Update once from the gradients of `working`, then clear them."""
        for group in self._adamw.param_groups:
            group["lr"] = lr
        self._carry_gradients()
        nn.utils.clip_grad_norm_(_trained(self.module).values(), self.clip)
        self._adamw.step()
        self._adamw.zero_grad(set_to_none=True)
        self.refresh()

    def state_dict(self) -> dict[str, Any]:
        """Return weights and AdamW moments."""
        return {"module": self.module.state_dict(), "adamw": self._adamw.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        self.module.load_state_dict(state["module"])
        self._adamw.load_state_dict(state["adamw"])
        self.refresh()

    @torch.no_grad()
    def refresh(self) -> None:
        """Copy the module's trained weights, rounded if so set, into the working copy."""
        if self.working is self.module:
            return
        exact = _trained(self.module)
        values = [self._rounding(name, p) if self._rounding else p for name, p in exact.items()]
        torch._foreach_copy_(list(_trained(self.working).values()), values)

    @torch.no_grad()
    def _carry_gradients(self) -> None:
        if self.working is self.module:
            return
        exact = _trained(self.module)
        for name, low in _trained(self.working).items():
            assert low.grad is not None, f"{name} is trained and got no gradient"
            exact[name].grad = low.grad.float()
            low.grad = None


def _adamw(trained: list[nn.Parameter], c: TrainConfig, fused: bool) -> torch.optim.AdamW:
    """Make AdamW; matrices get weight decay, norms do not."""
    groups = [
        {"params": [p for p in trained if p.dim() > 1], "weight_decay": c.weight_decay},
        {"params": [p for p in trained if p.dim() <= 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=c.lr, betas=(0.9, 0.95), fused=fused)


def _copy_in(module: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Return a copy with parameters in `dtype`; buffers stay exact (rotary frequencies must not be rounded)."""
    working = copy.deepcopy(module)
    for p in working.parameters():
        p.data = p.data.to(dtype)
    return working


def _trained(module: nn.Module) -> dict[str, nn.Parameter]:
    return {name: p for name, p in module.named_parameters() if p.requires_grad}


@dataclass(frozen=True)
class Outcome:
    """Result of one batch. loss: the value to minimise. goal: at batch.rows [N]. losses: one scalar per draft step, for
    the log. drafted: [N] int64 per draft step, the draft's argmax at batch.rows, in the goal's ids."""

    loss: torch.Tensor
    goal: Goal
    losses: list[torch.Tensor]
    drafted: list[torch.Tensor]

    @property
    def right(self) -> torch.Tensor:
        """[num_steps, N] bool: rows where the draft's argmax is the target's."""
        return torch.stack(self.drafted) == self.goal.best


class Objective(ABC):
    """Base of objectives: an fp32 student module, trained in place to imitate the frozen target `model`."""

    def __init__(
        self,
        model: PreTrainedModel,
        student: nn.Module,
        config: TrainConfig,
        aux_layers: tuple[int, ...],
        rounding: Rounding | None = None,
    ):
        self.config = config
        self.teacher = Teacher(model, aux_layers)
        self.device = self.teacher.weight.device
        is_compiled = self.device.type == "cuda" if config.compile is None else config.compile
        self.math = RowMath(config.chunk_rows, is_compiled)
        self.optimizer = Optimizer(student, self.teacher.weight.dtype, config, rounding)

    @abstractmethod
    def forward(self, batch: Batch, random: torch.Generator | None) -> Outcome:
        """Return the Outcome of a batch. random: this training step's generator; None: an evaluation, without noise."""

    @property
    def num_trained(self) -> int:
        return sum(p.numel() for p in self.optimizer.module.parameters() if p.requires_grad)

    @property
    @abstractmethod
    def shape(self) -> dict[str, Any]:
        """Facts of the student, in plain types, that a checkpoint's student must share."""


class HeadObjective(Objective):
    """Objective of draft heads, unrolled over their own states: soft cross-entropy, and feature loss if weighted.
    ValueError for a head of several MTP modules, or of blocks that are too short for num_steps."""

    def __init__(self, model: PreTrainedModel, head: DraftHead, config: TrainConfig):
        if head.num_modules > 1:
            raise ValueError(f"the head has {head.num_modules} MTP modules: expected one, more cannot be trained yet")
        if isinstance(head, BlockDraftHead):
            head.check_steps(config.num_steps)
        refuse(config, head.algo, "prompt_weight", "a head reads features of the answer's rows only")
        if head.aux_layers != (LAST,):
            refuse(config, head.algo, "feature_weight", "its states are not the target's features")
        if head.lm_head is None:
            refuse(config, head.algo, "train_lm_head", "its output head is the target's")
        head.requires_grad_(True)
        if head.embed_tokens is not None:
            head.embed_tokens.requires_grad_(False)
        if head.lm_head is not None:
            head.lm_head.requires_grad_(config.train_lm_head)
        self.head = head
        super().__init__(model, head, config, head.aux_layers)

    def forward(self, batch: Batch, random: torch.Generator | None) -> Outcome:
        c, draft = self.config, self.draft
        lesson = self.teacher.read(batch)
        hidden = lesson.hidden.flatten(0, 1).index_select(0, batch.rows)
        goal = self.teacher.goal(hidden, self.hot_ids, self.math)
        features = lesson.features if random is None else self._noisy(lesson.features, random)
        losses, drafted = [], []
        for j, state in enumerate(draft_states(draft, self.teacher.embed_tokens, batch.tokens, features, c.num_steps)):
            rows = draft.normed(state.flatten(0, 1).index_select(0, batch.rows - 1 - j))
            scored = scored_rows(draft, rows, batch.tokens[:, : batch.length].flatten()[batch.rows], self.output_head)
            soft, best = imitation_loss(self.math, *scored, goal, goal.weights, c.lk_weight)
            feature = c.feature_weight * feature_loss(rows, hidden) if c.feature_weight else 0.0
            losses.append(c.soft_weight * soft + feature)
            drafted.append(best)
        outcome = Outcome(torch.stack(losses).sum(), goal, losses, drafted)
        weights = survival_weights(outcome.right) if c.survival else outcome.loss.new_tensor(c.step_weights)
        return replace(outcome, loss=(torch.stack(losses) * weights).sum())

    @property
    def draft(self) -> DraftHead:
        """The working copy of the head, in the target's dtype."""
        working = self.optimizer.working
        assert isinstance(working, DraftHead)
        return working

    @property
    def hot_ids(self) -> torch.Tensor | None:
        """[dv] int64: target ids of the tokens that the head scores, or None for all."""
        ids = self.head.hot_ids
        return ids if ids.numel() < self.head.vocab_size else None

    @property
    def output_head(self) -> OutputHead:
        """The draft's own output head or else the target's."""
        own = self.draft.lm_head
        return self.teacher.output_head if own is None else OutputHead(own.get_parameter("weight"))

    @property
    def shape(self) -> dict[str, Any]:
        head = self.head
        reads = {"algo": head.algo, "aux_layers": list(head.aux_layers), **head.traits}
        return {**reads, **{name: list(p.shape) for name, p in head.named_parameters()}}

    def _noisy(self, features: torch.Tensor, random: torch.Generator) -> torch.Tensor:
        if not self.config.feature_noise:
            return features
        noise = torch.empty_like(features).uniform_(-1, 1, generator=random)
        return features + self.config.feature_noise * noise


def survival_weights(right: torch.Tensor) -> torch.Tensor:
    """Return the weights [S] of draft steps, of mean 1, from right [S, N] bool: step j counts as often as chains reach
    it or a later step: sum over m >= j of the product over i <= m of (1 + a_i) / 2, a_i the share that is right at step
    i (the batch form of D-PACE, arXiv 2605.18810)."""
    reached = ((1 + right.float().sum(1) / max(right.shape[1], 1)) / 2).cumprod(0)
    weights = reached.flip(0).cumsum(0).flip(0)
    return weights / weights.mean()


def draft_states(
    head: DraftHead, embed: nn.Module, tokens: torch.Tensor, features: torch.Tensor, num_steps: int
) -> Iterable[torch.Tensor]:
    """Return the states [B, T, h_d] of a head's draft steps, in order; see `unroll` and `block_states`."""
    if isinstance(head, BlockDraftHead):
        return block_states(head, embed, tokens, features, num_steps)
    assert isinstance(head, RecyclingHead)
    return unroll(head, embed, tokens, features, num_steps)


def scored_rows(
    head: DraftHead, states: torch.Tensor, tokens: torch.Tensor, output: OutputHead
) -> tuple[torch.Tensor, OutputHead]:
    """Return the two factors of the logits of normed states [N, h_d], after tokens [N]: a Markov term adds columns."""
    if not isinstance(head, BlockDraftHead) or head.markov is None:
        return states, output
    ids = torch.arange(output.weight.shape[0], device=states.device)
    vectors, rows = head.markov.after(tokens, states), head.markov.rows(ids)
    return torch.cat([states, vectors], 1), OutputHead(torch.cat([output.weight, rows], 1), output.bias)


def refuse(config: TrainConfig, algo: str, name: str, reason: str) -> None:
    """Raise ValueError if `config` sets field `name`, which `algo` does not support."""
    value = getattr(config, name)
    if value:
        raise ValueError(f"{name}={value} for {algo!r}: expected {type(value)()}, {reason}")
