"""Lets a draft catch up with rounds that have drafted nothing.

A plain round costs the same as without a draft, except for a copy: the target's features of its token are kept. Later
one forward of the draft takes up to `CATCH_UP` tokens at once, as a draft-extend takes those of a round. Tokens for
which that is too late have lost their features: their draft K/V is zero, and gets little attention.
"""

from dataclasses import replace

import torch

from specdec.core.config import CATCH_UP, EngineConfig
from specdec.core.draft.worker import DraftWorker, RoundBatch
from specdec.core.functional.verify import VerifyOutput
from specdec.core.target import Target


class CatchUp:
    """Tracks how far a draft has read each row, and keeps the target's features of what it has not read.

    seen [num_rows] int64: L, as it was when the draft was abreast of the target. features [num_rows, CATCH_UP,
    num_aux*h], of the token at position p in place p % CATCH_UP; None for a draft that reads tokens only.
    """

    def __init__(self, worker: DraftWorker, target: Target, config: EngineConfig):
        device, size = target.device, len(worker.aux_layers) * target.spec.hidden_size
        self._dummy_row = config.dummy_row
        self._nodes = torch.arange(CATCH_UP, device=device)
        self.seen = torch.zeros(config.num_rows, dtype=torch.int64, device=device)
        shape = (config.num_rows, CATCH_UP, size)
        self.features = torch.zeros(shape, dtype=target.dtype, device=device) if size else None

    def begin(self, batch: RoundBatch) -> None:
        """Record prompts that the draft has been prefilled with."""
        self.seen[batch.rows] = batch.seq_lens

    def extend(self, worker: DraftWorker, batch: RoundBatch, verified: VerifyOutput, aux: torch.Tensor | None) -> None:
        """Do `DraftWorker.extend` after a round that drafted; after a plain one only keep its features."""
        if batch.shape.num_steps:
            worker.extend(batch, verified, aux)
            self.seen[batch.rows] = batch.seq_lens + verified.accept_lens
        elif self.features is not None and aux is not None:
            self.features[batch.rows, batch.seq_lens % CATCH_UP] = aux[:, 0]
            assert worker.context is not None
            for plane in worker.context.pool.planes:
                plane.index_fill_(0, batch.slot_table[batch.rows, batch.seq_lens].long(), 0)

    def run(self, worker: DraftWorker, batch: RoundBatch) -> None:
        """Run the draft over up to `CATCH_UP` tokens of each row of `batch` that it has not seen: the next ones, or the
        last ones if it needs features."""
        seen = self.seen[batch.rows]
        if self.features is not None:
            seen = seen.maximum(batch.seq_lens - CATCH_UP)
        nums = (batch.seq_lens - seen).clamp(0, CATCH_UP)
        is_behind = nums > 0
        rows = torch.where(is_behind, batch.rows, self._dummy_row)  # the others stay as they are
        first = torch.where(is_behind, seen, 0)
        positions = first.unsqueeze(1) + self._nodes  # [bs, CATCH_UP]
        tokens = batch.history[rows.unsqueeze(1), (positions + 1).clamp(max=batch.history.shape[1] - 1)].long()
        path = VerifyOutput(self._nodes.expand_as(tokens), nums.clamp(min=1), tokens, torch.zeros_like(is_behind))
        features = None if self.features is None else self.features[rows.unsqueeze(1), positions % CATCH_UP]
        worker.extend(replace(batch, rows=rows, seq_lens=first), path, features)
        self.seen[batch.rows] = seen + nums
