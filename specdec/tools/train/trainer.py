"""The training loop: batches, updates, rates on held-out sequences, and checkpoints that resume bit for bit.

It knows neither heads nor losses; an `Objective` does.
"""

import math
import pickle
import sys
import time
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tqdm import tqdm

from specdec.core.interrupts import deferred
from specdec.core.metrics import AcceptanceStats
from specdec.reach.checkpoints.replacing import replacing
from specdec.tools.train.acceptance import Tally, outcomes, play_rounds
from specdec.tools.train.batches import Batch, Batches
from specdec.tools.train.config import FREE
from specdec.tools.train.data import Corpus
from specdec.tools.train.objectives import Objective


class Trainer:
    """Runs the training loop of an objective, whose student it trains in place, and keeps its place in the data.
    checkpoint: file to save to during the run; None: nothing is saved."""

    def __init__(self, objective: Objective, train: Corpus, held_out: Corpus, checkpoint: str | Path | None = None):
        c = objective.config
        self.config = c
        self.objective = objective
        self.device = objective.device
        self.checkpoint = checkpoint
        self._digest = train.digest
        shape = (c.num_steps, c.tokens_per_batch, c.max_len, self.device, c.prompt_weight > 0)
        self.batches, self.held_out = Batches(train, *shape), Batches(held_out, *shape)
        self.step = self.epoch = self.cursor = self.tokens_seen = 0
        self._watch = LossWatch(c.lr, self.device)
        self.seconds_before = 0.0  # spent by the runs that this one resumes
        self._began = time.monotonic()
        self._plan = self.batches.plan(self._seed(self.epoch))
        limits = [c.max_steps, c.epochs * len(self._plan) if c.epochs else None]
        self.max_steps = min((n for n in limits if n), default=None)

    def fit(self) -> dict[str, Any]:
        """Train to the end of the run; return the final held-out rates (`evaluate`) with steps, tokens, minutes.

        FloatingPointError for a non-finite loss, at the next log, save or end of the run, so that no step syncs.
        KeyboardInterrupt once the step that Ctrl-C came in is done and its checkpoint saved. ValueError if the corpus
        has no rows to train.
        """
        if not self.batches.num_rows:
            raise ValueError(
                f"no answer has a token after the first num_steps={self.config.num_steps} of its text and before "
                f"max_len={self.config.max_len}, so that there is nothing to train on: expected longer answers, or a "
                "larger max_len"
            )
        self._began = time.monotonic()
        tally = Tally(self.config.num_steps, self.device)
        bar = tqdm(total=self.max_steps, initial=self.step, unit="step", dynamic_ncols=True)
        with bar, deferred() as is_interrupted:
            while (share := self.progress) < 1:
                self.train_step(share, tally)
                bar.update()
                if self.step % self.config.log_every == 0:
                    self._check_finite()
                    bar.set_postfix_str(f"{describe(tally.read())} {self.tokens_seen / self.seconds:.0f} tok/s")
                    tally = Tally(self.config.num_steps, self.device)
                if self.step % self.config.eval_every == 0:
                    bar.write(f"step {self.step} held out: {describe(self.evaluate())}")
                if self.checkpoint and self.step % self.config.save_every == 0:
                    self.save(self.checkpoint)
                if is_interrupted():
                    if self.checkpoint:
                        self.save(self.checkpoint)
                        said = f"interrupted after step {self.step}; {str(self.checkpoint)!r} keeps it: go on with "
                        said += "`specdec train fit --resume` and the same settings"
                        print(said, file=sys.stderr)
                    break  # KeyboardInterrupt is raised at the end of `deferred`
        seconds = self.seconds
        self._check_finite()
        result = self.evaluate()
        self._check_finite(result["loss"])
        if self.checkpoint:
            self.save(self.checkpoint)
        pace = {"minutes": seconds / 60, "tokens_per_s": self.tokens_seen / max(seconds, 1e-9)}
        return {"steps": self.step, "tokens": self.tokens_seen, **pace, **result}

    def train_step(self, share: float, tally: Tally) -> None:
        """Update once, at `share` of the run."""
        batch = self._next_batch()
        random = torch.Generator(self.device).manual_seed(self._seed(self.step))
        outcome = self.objective.forward(batch, random)
        self._watch.note(self.step + 1, outcome.loss.detach())
        outcome.loss.backward()
        self.objective.optimizer.step(learning_rate(self.config.lr, share, self.config.warmup))
        tally.add(batch, outcome)
        self.step += 1
        self.tokens_seen += batch.num_tokens

    def evaluate(self) -> dict[str, Any]:
        """Return the rates of `Tally.read` over the held-out sequences, but tau and accept_at from simulated rounds.

        tau_of_starts: tau over chains from every start, as training logs it.
        """
        tally, found = Tally(self.config.num_steps, self.device), []
        for batch, outcome in outcomes(self.objective, self.held_out):
            tally.add(batch, outcome)
            found.append(play_rounds([(batch, outcome)]))
        stats, rates = AcceptanceStats().merge(found), tally.read()
        accept_at = stats.acceptance_at + [0.0] * (self.config.num_steps - len(stats.acceptance_at))
        return {**rates, "tau_of_starts": rates["tau"], "tau": stats.tau, "accept_at": accept_at}

    @property
    def seconds(self) -> float:
        """Seconds of training, earlier runs that were resumed included."""
        return self.seconds_before + time.monotonic() - self._began

    @property
    def progress(self) -> float:
        """Share of the run that is done: the largest of its limits' shares."""
        c = self.config
        done = ((self.step, self.max_steps), (self.tokens_seen, c.max_tokens), (self.seconds / 60, c.minutes))
        return min(max(count / limit for count, limit in done if limit), 1.0)

    def save(self, path: str | Path) -> None:
        """Write a checkpoint from which `resume` continues exactly; a diverged run writes none."""
        self._check_finite()
        state = {
            "identity": self._identity(),
            "optimizer": self.objective.optimizer.state_dict(),
            "place": [self.step, self.epoch, self.cursor, self.tokens_seen],
            "seconds": self.seconds,
        }
        path = Path(path)
        with replacing(path.parent) as partial:  # an error, such as a full disk, leaves only the older file
            torch.save(state, partial / path.name)

    def resume(self, path: str | Path) -> None:
        """Continue where the checkpoint `path` left off; ValueError if it is another run's or cannot be read."""
        try:
            state = torch.load(path, map_location=self.device, weights_only=True)
            saved = _flat(state["identity"])
        except (OSError, EOFError, RuntimeError, KeyError, TypeError, pickle.UnpicklingError) as error:
            cure = "delete it and start again"
            raise ValueError(f"checkpoint {str(path)!r} cannot be read ({error}): {cure}") from error
        own = _flat(self._identity())
        names = [name for name in own | saved if saved.get(name) != own.get(name)]
        differing = [f"{name}: {saved.get(name)!r} there, {own.get(name)!r} here" for name in names]
        if differing:
            raise ValueError(f"checkpoint {str(path)!r} is of another run ({'; '.join(differing)}); use its settings")
        self.objective.optimizer.load_state_dict(state["optimizer"])
        self.step, self.epoch, self.cursor, self.tokens_seen = state["place"]
        self.seconds_before = state["seconds"]
        self._plan = self.batches.plan(self._seed(self.epoch))

    def _check_finite(self, held_out: Iterable[float] = ()) -> None:
        """Raise FloatingPointError if the run diverged; costs a sync."""
        self._watch.check(self.step, self.objective.optimizer.module.parameters(), held_out)

    def _next_batch(self) -> Batch:
        if self.cursor >= len(self._plan):
            self.epoch, self.cursor = self.epoch + 1, 0
            self._plan = self.batches.plan(self._seed(self.epoch))
        self.cursor += 1
        return self.batches.build(self._plan[self.cursor - 1])

    def _seed(self, count: int) -> int:
        return int(np.random.SeedSequence([self.config.seed, count]).generate_state(1)[0])

    def _identity(self) -> dict[str, Any]:
        """Return the facts that a checkpoint and this run must share."""
        recipe = {k: v for k, v in asdict(self.config).items() if k not in FREE}
        return {**recipe, "student": self.objective.shape, "corpus": self._digest}


def _flat(identity: dict[str, Any]) -> dict[str, Any]:
    """Return the facts of `Trainer._identity` with each fact of the draft at top level, so that only differing ones are
    named."""
    draft = {f"draft's {name}": value for name, value in identity["student"].items()}
    return {**{name: value for name, value in identity.items() if name != "student"}, **draft}


def describe(rates: dict[str, Any]) -> str:
    """Format rates in one line: first and last step's loss, each step's accuracy, tau."""
    acc = "/".join(f"{100 * a:.0f}" for a in rates["acc"])
    return f"loss {rates['loss'][0]:.3f}..{rates['loss'][-1]:.3f} acc {acc}% tau {rates['tau']:.2f}"


def learning_rate(peak: float, share: float, warmup: float) -> float:
    """Return the learning rate at `share` of the run: linear warm-up over the share `warmup`, then a cosine to zero."""
    if share < warmup:
        return peak * max(share / warmup, 0.01)
    return peak * 0.5 * (1 + math.cos(math.pi * (share - warmup) / (1 - warmup)))


class LossWatch:
    """Ends a diverged run with a reason, without a sync per step: the number, from 1, of the first step whose loss was
    not finite stays on the device until `check`."""

    def __init__(self, lr: float, device: torch.device):
        self.lr = lr
        self._first = torch.zeros((), dtype=torch.int64, device=device)  # 0: none

    def note(self, step: int, loss: torch.Tensor) -> None:
        """Record the loss, a scalar, of step number `step`."""
        self._first += step * (~loss.isfinite() & (self._first == 0))

    def check(self, step: int, weights: Iterable[torch.Tensor], held_out: Iterable[float] = ()) -> None:
        """Raise FloatingPointError if a loss up to `step` was not finite, or one of `weights`, or of the losses on the
        held-out sequences, is not after it."""
        first = int(self._first)
        what = f"loss is not finite at step {first}"
        if not first and not bool(torch.stack([weight.isfinite().all() for weight in weights]).all()):
            first, what = step + 1, f"weights are not finite after step {step}"
        if not first and not all(map(math.isfinite, held_out)):
            first, what = step + 1, f"held-out loss is not finite after step {step}"
        if not first:
            return
        cure = f"lower lr={self.lr:g}, as in `specdec train fit --lr {self.lr / 4:g}`, which takes the corpus as it is"
        if first == 1:  # no update yet
            cure = "no update came before it: look for NaN in the target and in --init, or try --dtype float32"
        kept = "Nothing was exported, and a draft that was there before is still there"
        raise FloatingPointError(f"the {what}, so the training was ended; {cure}. {kept}")
