"""Prompt lookup: drafts are what followed the last tokens where they stood before, in prompt or text. No model needed.

Of all earlier places the one with the longest match (up to MAX_NGRAM tokens) is taken, of several the latest. Sources:
Saxena 2023, "Prompt Lookup Decoding" (`prompt_lookup_num_tokens` in transformers); arXiv 2304.04487.
"""

from typing import Any

import torch

from specdec.draft.worker import Draft, DraftParts, DraftWorker, PrefillChunk, RoundBatch, RunPrefill
from specdec.functional.tree import chain
from specdec.functional.verify import Verdict

MAX_NGRAM = 4  # tokens


class LookupWorker(DraftWorker):
    """Drafts chains from each request's own tokens.

    State by row: `history` [num_rows, width] int32, tokens by position: the prompt's, emitted ones, and the root at L.
    What lies past L is left over.
    """

    has_begin = True

    def __init__(self, parts: DraftParts, draft: None):
        if parts.config.topk > 1:
            raise ValueError(f"topk={parts.config.topk}: algo='lookup' drafts chains; leave topk out")
        self.spec = parts.spec
        self.id_shift = parts.spec.id_shift
        self.config = parts.config
        self.ops = parts.ops
        shape = (parts.config.num_rows, parts.config.table_width + parts.config.verify_width)
        self.history = torch.zeros(shape, dtype=torch.int32, device=parts.target.device)

    def finish_prefill(self, chunk: PrefillChunk, hidden: torch.Tensor | None, run: RunPrefill) -> None:
        q_lens, num_tokens = chunk.metadata.qo_indptr.diff(), chunk.ids.shape[0]
        rows = torch.repeat_interleave(chunk.rows, q_lens, output_size=num_tokens)
        self.history[rows, chunk.metadata.positions] = chunk.ids.int()

    def begin(self, batch: RoundBatch, states: torch.Tensor | None) -> None:
        self.history[batch.rows, batch.seq_lens] = batch.roots.int()

    def draft(self, batch: RoundBatch) -> Draft:
        tokens = self.ops.look_up(self.history, batch.rows, batch.seq_lens, self.config.num_steps, MAX_NGRAM)
        return Draft(chain(batch.roots, tokens), None)

    def extend(self, batch: RoundBatch, verdict: Verdict, aux: torch.Tensor | None) -> None:
        width = verdict.tokens.shape[1]
        positions = batch.seq_lens.unsqueeze(1) + torch.arange(1, width + 1, device=batch.rows.device)
        self.history[batch.rows.unsqueeze(1), positions] = verdict.tokens.int()

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        return {"history": self.history}

    @property
    def facts(self) -> dict[str, Any]:
        return {"algo": self.spec.name, "max_ngram": MAX_NGRAM}
