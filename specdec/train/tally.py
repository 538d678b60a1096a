"""Counts of a draft's correct tokens, kept on the device until they are read."""

from dataclasses import dataclass, fields
from typing import Any

import torch

from specdec.train.batches import Batch
from specdec.train.losses import Goal


@dataclass
class Tally:
    """Counts over batches; every field a tensor on the device, so that adding costs no sync.

    loss [S]: mean loss of each step, summed over batches. correct [S]: rows where the draft's argmax is the target's.
    accepted [S]: chain starts whose draft tokens 0..j are all right. num_batches, num_rows (imitated rows), num_trained
    (those whose target argmax is in the hot vocabulary), num_starts: scalars.
    """

    loss: torch.Tensor
    correct: torch.Tensor
    accepted: torch.Tensor
    num_batches: torch.Tensor
    num_rows: torch.Tensor
    num_trained: torch.Tensor
    num_starts: torch.Tensor

    @classmethod
    def zero(cls, num_steps: int, device: torch.device) -> "Tally":
        """Return a tally with all counts zero."""
        wide = [torch.zeros(num_steps, device=device, dtype=torch.float64) for _ in range(3)]
        return cls(*wide, *[torch.zeros((), device=device, dtype=torch.float64) for _ in range(4)])

    def add(self, batch: Batch, goal: Goal, losses: list[torch.Tensor], drafted: list[torch.Tensor]) -> None:
        """Count a batch. losses: one scalar per step; drafted: [N] int64 per step, draft argmax at batch.rows."""
        correct = torch.stack([d == goal.best for d in drafted])  # [S, N]
        self.loss += torch.stack(losses)
        self.correct += correct.sum(1)
        self.accepted += accepted_prefixes(batch, correct).sum(1)
        self.num_batches += 1
        self.num_rows += batch.rows.numel()
        self.num_trained += goal.is_trained.sum()
        self.num_starts += batch.starts.numel()

    def read(self) -> dict[str, Any]:
        """Return the rates, on the host (one sync).

        acc: share of rows right at each step, given true tokens before them; a target argmax outside the hot vocabulary
        is a miss. accept_at: a_j of `metrics`, with all chain starts weighted equally. tau = 1 + Σ a_j.
        """
        wide = [getattr(self, f.name).reshape(-1) for f in fields(self)]
        values = torch.cat(wide).tolist()
        steps = self.loss.numel()
        num_batches, num_rows, num_trained, num_starts = (max(v, 1.0) for v in values[-4:])
        accept_at = [v / num_starts for v in values[2 * steps : 3 * steps]]
        return {
            "loss": [v / num_batches for v in values[:steps]],
            "acc": [v / num_rows for v in values[steps : 2 * steps]],
            "accept_at": accept_at,
            "tau": 1.0 + sum(accept_at),
            "argmax_coverage": num_trained / num_rows,
            "rows": int(values[-3]),
        }


def accepted_prefixes(batch: Batch, correct: torch.Tensor) -> torch.Tensor:
    """Return [S, num_starts] bool: entry [j, i] says that the chain from batch.starts[i] has draft tokens 0..j right.

    correct [S, N] bool at batch.rows. A chain counts as rejected past the last generated token, where it is trimmed.
    """
    steps = correct.shape[0]
    size = batch.tokens.shape[0] * batch.length + steps
    right = torch.zeros(steps, size, dtype=torch.bool, device=correct.device)
    right[:, batch.rows] = correct
    # Column i imitates row i+1+j at step j. Past a sequence's end lie rows below num_steps of the next one: never set.
    chain = torch.stack([right[j, batch.starts + 1 + j] for j in range(steps)])
    return chain.long().cumprod(0).bool()
