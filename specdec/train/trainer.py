"""Trains an EAGLE-3 head against its frozen target: training-time test, soft cross-entropy, weights that decay a step.

The head is kept in fp32; where the target runs in lower precision a copy in its dtype does the work, with the very
arithmetic of inference, and gradients are carried over before each update.
"""

import copy
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from tqdm import tqdm
from transformers import PreTrainedModel

from specdec.models.eagle3 import Eagle3Head
from specdec.train.batches import Batch, Batches
from specdec.train.checkpoint import load_checkpoint, save_checkpoint
from specdec.train.data import Corpus
from specdec.train.losses import Goal, imitation_loss
from specdec.train.schedule import learning_rate, progress
from specdec.train.tally import Tally
from specdec.train.teacher import Teacher
from specdec.train.ttt import unroll


@dataclass(frozen=True)
class TrainConfig:
    """The recipe. A run ends at the first of epochs, max_steps and minutes; give one at least.

    num_steps: draft steps unrolled (TTT). step_decay: weight of step j is step_decay**j. lk_weight: of -log acceptance.
    tokens_per_batch: padded tokens. max_len: longer sequences are cut. warmup: share of the run. clip: gradient norm.
    chunk_rows: rows whose logits exist at a time in fp32. *_every: in steps; a log reads the device, so is a sync.
    """

    num_steps: int = 5
    step_decay: float = 0.8
    lk_weight: float = 0.0
    lr: float = 2e-3
    weight_decay: float = 0.01
    warmup: float = 0.015
    clip: float = 0.5
    tokens_per_batch: int = 32768
    max_len: int = 2048
    epochs: int | None = None
    max_steps: int | None = None
    minutes: float | None = None
    chunk_rows: int = 4096
    train_lm_head: bool = False
    log_every: int = 20
    eval_every: int = 500
    save_every: int = 500
    seed: int = 0

    def __post_init__(self) -> None:
        limits = {"epochs": self.epochs, "max_steps": self.max_steps, "minutes": self.minutes}
        if not any(limits.values()):
            raise ValueError(f"{limits}: expected one at least that ends the run; pass minutes=10, say")
        for name in ("num_steps", "tokens_per_batch", "max_len", "chunk_rows", "log_every", "eval_every", "save_every"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}: expected 1 or more")
        if not 0 <= self.warmup < 1:
            raise ValueError(f"warmup={self.warmup}: expected a share of the run in [0, 1)")


class Trainer:
    """Owns the optimizer and the place in the data. `head` (fp32) is trained in place; the target is only read."""

    def __init__(
        self,
        model: PreTrainedModel,
        head: Eagle3Head,
        train: Corpus,
        held_out: Corpus,
        config: TrainConfig,
        checkpoint: str | Path | None = None,
    ):
        c = config
        self.config = c
        self.head = head
        self.teacher = Teacher(model, head.config.aux_layers)
        self.device = self.teacher.weight.device
        self.checkpoint = checkpoint
        head.requires_grad_(True).lm_head.requires_grad_(c.train_lm_head)
        self.draft = working_copy(head, self.teacher.weight.dtype)
        self.hot_ids = head.hot_ids
        self.batches = Batches(train, c.num_steps, c.tokens_per_batch, c.max_len, self.device)
        self.held_out = Batches(held_out, c.num_steps, c.tokens_per_batch, c.max_len, self.device)
        self.optimizer = adamw(head, c, fused=self.device.type == "cuda")
        self.step = self.epoch = self.cursor = self.tokens_seen = 0
        self.seconds_before = 0.0  # spent by the runs that this one resumes
        self._plan = self.batches.plan(self._epoch_seed())
        limits = [c.max_steps, c.epochs * len(self._plan) if c.epochs else None]
        self.max_steps = min((n for n in limits if n), default=None)

    def fit(self) -> dict[str, Any]:
        """Train to the end of the run; returns the held-out rates there (`Tally.read`) with steps, tokens, minutes."""
        self._began = time.monotonic()
        tally = Tally.zero(self.config.num_steps, self.device)
        with tqdm(total=self.max_steps, initial=self.step, unit="step", dynamic_ncols=True) as bar:
            while (share := self.progress) < 1:
                self.train_step(share, tally)
                bar.update()
                if self.step % self.config.log_every == 0:
                    bar.set_postfix_str(self._postfix(tally.read()))
                    tally = Tally.zero(self.config.num_steps, self.device)
                if self.step % self.config.eval_every == 0:
                    bar.write(f"step {self.step} held out: {describe(self.evaluate())}")
                if self.checkpoint and self.step % self.config.save_every == 0:
                    self.save(self.checkpoint)
        result = self.evaluate()
        if self.checkpoint:
            self.save(self.checkpoint)
        return {"steps": self.step, "tokens": self.tokens_seen, "minutes": self.seconds / 60, **result}

    def train_step(self, share: float, tally: Tally) -> None:
        """One update, at `share` of the run."""
        c = self.config
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(c.lr, share, c.warmup)
        batch = self._next_batch()
        goal, losses, drafted = self.forward(batch)
        sum(c.step_decay**j * loss for j, loss in enumerate(losses)).backward()  # type: ignore[union-attr]
        self._update()
        tally.add(batch, goal, [loss.detach() for loss in losses], drafted)
        self.step += 1
        self.tokens_seen += batch.num_tokens

    def forward(self, batch: Batch) -> tuple[Goal, list[torch.Tensor], list[torch.Tensor]]:
        """(what the target says, loss of each step, draft argmax [N] at batch.rows of each step)."""
        c = self.config
        aux, goal = self.teacher.read(batch, self.hot_ids, c.chunk_rows)
        losses, drafted = [], []
        states = unroll(self.draft, self.teacher.embed_tokens, batch.tokens, aux, c.num_steps)
        for j, state in enumerate(states):
            rows = self.draft.norm(state.flatten(0, 1).index_select(0, batch.rows - 1 - j))
            loss, best = imitation_loss(rows, self.draft.lm_head.weight, goal, c.lk_weight, c.chunk_rows)
            losses.append(loss)
            drafted.append(best)
        return goal, losses, drafted

    @torch.no_grad()
    def evaluate(self) -> dict[str, Any]:
        """Rates over the held-out sequences; see `Tally.read`."""
        tally = Tally.zero(self.config.num_steps, self.device)
        for indices in self.held_out.plan(None):
            batch = self.held_out.build(indices)
            tally.add(batch, *self.forward(batch))
        return tally.read()

    @property
    def seconds(self) -> float:
        """Wall clock of training, earlier runs that were resumed included."""
        return self.seconds_before + time.monotonic() - self._began

    @property
    def progress(self) -> float:
        """Share of the run that is done."""
        c = self.config
        return progress(self.step, self.max_steps, self.seconds, c.minutes * 60 if c.minutes else None)

    def save(self, path: str | Path) -> None:
        """Write a checkpoint from which `resume` continues as if nothing had happened."""
        state = {
            "identity": self._identity(),
            "head": self.head.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "place": [self.step, self.epoch, self.cursor, self.tokens_seen],
            "seconds": self.seconds,
            "rng": torch.get_rng_state(),
        }
        save_checkpoint(path, state)

    def resume(self, path: str | Path) -> None:
        """Continue where the checkpoint `path` left off."""
        state = load_checkpoint(path, self._identity(), self.device)
        self.head.load_state_dict(state["head"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.step, self.epoch, self.cursor, self.tokens_seen = state["place"]
        self.seconds_before = state["seconds"]
        torch.set_rng_state(state["rng"].cpu())
        self._plan = self.batches.plan(self._epoch_seed())
        copy_weights(self.head, self.draft)

    def _next_batch(self) -> Batch:
        if self.cursor == len(self._plan):
            self.epoch, self.cursor = self.epoch + 1, 0
            self._plan = self.batches.plan(self._epoch_seed())
        self.cursor += 1
        return self.batches.build(self._plan[self.cursor - 1])

    def _update(self) -> None:
        if self.draft is not self.head:
            carry_gradients(self.draft, self.head)
        nn.utils.clip_grad_norm_(self.head.parameters(), self.config.clip)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        copy_weights(self.head, self.draft)

    def _epoch_seed(self) -> int:
        return int(np.random.SeedSequence([self.config.seed, self.epoch]).generate_state(1)[0])

    def _identity(self) -> dict[str, Any]:
        """What must be equal for a checkpoint to be this run's; where it ends and how it reports may change."""
        free = {"epochs", "max_steps", "minutes", "log_every", "eval_every", "save_every", "chunk_rows"}
        recipe = {k: v for k, v in asdict(self.config).items() if k not in free}
        head = {k: list(v) if isinstance(v, tuple) else v for k, v in asdict(self.head.config).items()}
        return {**recipe, "head": head, "num_batches": len(self._plan)}

    def _postfix(self, rates: dict[str, Any]) -> str:
        if not all(np.isfinite(rates["loss"])):
            raise FloatingPointError(f"the loss is {rates['loss']} at step {self.step}; lower lr={self.config.lr}")
        return f"{describe(rates)} {self.tokens_seen / self.seconds:.0f} tok/s"


def describe(rates: dict[str, Any]) -> str:
    """Rates in one line: losses and accuracies of each step, tau."""
    acc = "/".join(f"{100 * a:.0f}" for a in rates["acc"])
    return f"loss {rates['loss'][0]:.3f}..{rates['loss'][-1]:.3f} acc {acc}% tau {rates['tau']:.2f}"


def adamw(head: Eagle3Head, c: TrainConfig, fused: bool) -> torch.optim.AdamW:
    """AdamW over what is trained; matrices decay, norms do not."""
    trained = [p for p in head.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trained if p.dim() > 1], "weight_decay": c.weight_decay},
        {"params": [p for p in trained if p.dim() <= 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=c.lr, betas=(0.9, 0.95), fused=fused)


def working_copy(head: Eagle3Head, dtype: torch.dtype) -> Eagle3Head:
    """The head itself if it is in `dtype`, else a copy in `dtype`."""
    return head if head.fc.weight.dtype == dtype else copy.deepcopy(head).to(dtype)


def _trained(head: Eagle3Head) -> Sequence[nn.Parameter]:
    return [p for p in head.parameters() if p.requires_grad]


@torch.no_grad()
def copy_weights(source: Eagle3Head, target: Eagle3Head) -> None:
    """What is trained, from `source` to its working copy."""
    if target is not source:
        torch._foreach_copy_(list(_trained(target)), list(_trained(source)))


@torch.no_grad()
def carry_gradients(source: Eagle3Head, target: Eagle3Head) -> None:
    """Move gradients of a working copy to the head in fp32."""
    for low, full in zip(_trained(source), _trained(target), strict=True):
        assert low.grad is not None, "a trained weight got no gradient"
        full.grad = low.grad.float()
        low.grad = None
