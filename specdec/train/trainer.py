"""The training loop: batches in, updates, rates on held-out sequences, checkpoints that resume bit for bit.

It knows neither heads nor losses; an `Objective` does.
"""

import sys
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tqdm import tqdm

from specdec.interrupts import deferred
from specdec.train.batches import Batch, Batches
from specdec.train.checkpoint import load_checkpoint, save_checkpoint
from specdec.train.config import FREE
from specdec.train.data import Corpus
from specdec.train.divergence import Watch
from specdec.train.losses import Goal
from specdec.train.objectives import Objective
from specdec.train.rounds import play_rounds
from specdec.train.schedule import learning_rate, progress
from specdec.train.tally import Tally


class Trainer:
    """Runs the training loop and keeps its place in the data. The objective's student is trained in place."""

    def __init__(self, objective: Objective, train: Corpus, held_out: Corpus, checkpoint: str | Path | None = None):
        c = objective.config
        self.config = c
        self.objective = objective
        self.device = objective.device
        self.checkpoint = checkpoint
        self._digest = train.digest
        self.batches = Batches(train, c.num_steps, c.tokens_per_batch, c.max_len, self.device)
        self.held_out = Batches(held_out, c.num_steps, c.tokens_per_batch, c.max_len, self.device)
        self.step = self.epoch = self.cursor = self.tokens_seen = 0
        self._watch = Watch(c.lr, self.device)
        self.seconds_before = 0.0  # spent by the runs that this one resumes
        self._began = time.monotonic()
        self._plan = self.batches.plan(self._seed(self.epoch))
        limits = [c.max_steps, c.epochs * len(self._plan) if c.epochs else None]
        self.max_steps = min((n for n in limits if n), default=None)

    def fit(self) -> dict[str, Any]:
        """Train to the end of the run; return the held-out rates there (`evaluate`) with steps, tokens, minutes.

        FloatingPointError for a loss that is not finite, when it is logged, saved or over: no step waits for that.
        KeyboardInterrupt after the step at which Ctrl-C came, when a checkpoint is saved.
        """
        self._began = time.monotonic()
        tally = Tally.zero(self.config.num_steps, self.device)
        bar = tqdm(total=self.max_steps, initial=self.step, unit="step", dynamic_ncols=True)
        with bar, deferred() as is_interrupted:
            while (share := self.progress) < 1:
                self.train_step(share, tally)
                bar.update()
                if self.step % self.config.log_every == 0:
                    self._check_finite()
                    bar.set_postfix_str(self._postfix(tally.read()))
                    tally = Tally.zero(self.config.num_steps, self.device)
                if self.step % self.config.eval_every == 0:
                    bar.write(f"step {self.step} held out: {describe(self.evaluate())}")
                if self.checkpoint and self.step % self.config.save_every == 0:
                    self.save(self.checkpoint)
                if is_interrupted():
                    self._break_off()
                    break  # KeyboardInterrupt comes at the end of `deferred`
        seconds = self.seconds
        self._check_finite()
        result = self.evaluate()
        self._watch.check_held_out(self.step, result["loss"])
        if self.checkpoint:
            self.save(self.checkpoint)
        pace = {"minutes": seconds / 60, "tokens_per_s": self.tokens_seen / max(seconds, 1e-9)}
        return {"steps": self.step, "tokens": self.tokens_seen, **pace, **result}

    def _break_off(self) -> None:
        if self.checkpoint:
            self.save(self.checkpoint)
            print(f"interrupted after step {self.step}; --resume goes on from {self.checkpoint}", file=sys.stderr)

    def train_step(self, share: float, tally: Tally) -> None:
        """Update once, at `share` of the run."""
        batch = self._next_batch()
        random = torch.Generator(self.device).manual_seed(self._seed(self.step))
        outcome = self.objective.forward(batch, random)
        self._watch.note(self.step + 1, outcome.loss.detach())
        outcome.loss.backward()
        self.objective.optimizer.step(learning_rate(self.config.lr, share, self.config.warmup))
        tally.add(batch, outcome.goal, [loss.detach() for loss in outcome.losses], outcome.drafted)
        self.step += 1
        self.tokens_seen += batch.num_tokens

    @torch.no_grad()
    def evaluate(self) -> dict[str, Any]:
        """Return the rates of `Tally.read` over the held-out sequences, but tau and accept_at from simulated rounds.

        tau_of_starts: tau over chains from every start, as training logs it.
        """
        tally = Tally.zero(self.config.num_steps, self.device)
        stats = play_rounds(self._outcomes(tally))
        rates = tally.read()
        accept_at = stats.acceptance_at + [0.0] * (self.config.num_steps - len(stats.acceptance_at))
        return {**rates, "tau_of_starts": rates["tau"], "tau": stats.tau, "accept_at": accept_at}

    def _outcomes(self, tally: Tally) -> Iterator[tuple[Batch, Goal, list[torch.Tensor]]]:
        """Yield batch, goal and drafted tokens of every held-out batch, counted in `tally`."""
        for indices in self.held_out.plan(None):
            batch = self.held_out.build(indices)
            outcome = self.objective.forward(batch, None)
            tally.add(batch, outcome.goal, outcome.losses, outcome.drafted)
            yield batch, outcome.goal, outcome.drafted

    @property
    def seconds(self) -> float:
        """Seconds of training, earlier runs that were resumed included."""
        return self.seconds_before + time.monotonic() - self._began

    @property
    def progress(self) -> float:
        """Share of the run that is done."""
        c = self.config
        return progress(
            (self.step, self.max_steps),
            (self.tokens_seen, c.max_tokens),
            (self.seconds, c.minutes * 60 if c.minutes else None),
        )

    def save(self, path: str | Path) -> None:
        """Write a checkpoint from which `resume` continues as if nothing had happened; none of a run that diverged."""
        self._check_finite()
        state = {
            "identity": self._identity(),
            "optimizer": self.objective.optimizer.state_dict(),
            "place": [self.step, self.epoch, self.cursor, self.tokens_seen],
            "seconds": self.seconds,
        }
        save_checkpoint(path, state)

    def resume(self, path: str | Path) -> None:
        """Continue where the checkpoint `path` left off."""
        state = load_checkpoint(path, self._identity(), self.device)
        self.objective.optimizer.load_state_dict(state["optimizer"])
        self.step, self.epoch, self.cursor, self.tokens_seen = state["place"]
        self.seconds_before = state["seconds"]
        self._plan = self.batches.plan(self._seed(self.epoch))

    def _check_finite(self) -> None:
        """Raise FloatingPointError if the run diverged; costs a sync."""
        self._watch.check(self.step, self.objective.optimizer.module.parameters())

    def _next_batch(self) -> Batch:
        if self.cursor == len(self._plan):
            self.epoch, self.cursor = self.epoch + 1, 0
            self._plan = self.batches.plan(self._seed(self.epoch))
        self.cursor += 1
        return self.batches.build(self._plan[self.cursor - 1])

    def _seed(self, count: int) -> int:
        """Return a seed for epoch or step number `count`."""
        return int(np.random.SeedSequence([self.config.seed, count]).generate_state(1)[0])

    def _identity(self) -> dict[str, Any]:
        """Return the facts that a checkpoint must share to be this run's."""
        recipe = {k: v for k, v in asdict(self.config).items() if k not in FREE}
        return {**recipe, "student": self.objective.shape, "corpus": self._digest}

    def _postfix(self, rates: dict[str, Any]) -> str:
        return f"{describe(rates)} {self.tokens_seen / self.seconds:.0f} tok/s"


def describe(rates: dict[str, Any]) -> str:
    """Format rates in one line: first and last step's loss, each step's accuracy, tau."""
    acc = "/".join(f"{100 * a:.0f}" for a in rates["acc"])
    return f"loss {rates['loss'][0]:.3f}..{rates['loss'][-1]:.3f} acc {acc}% tau {rates['tau']:.2f}"
