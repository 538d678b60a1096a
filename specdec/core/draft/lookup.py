"""Prompt lookup: drafts the tokens that followed an earlier occurrence of the last tokens, in prompt or text. No model.

The longest match (up to MAX_NGRAM tokens) is taken, of equally long ones the latest. Sources:
Saxena 2023, "Prompt Lookup Decoding" (`prompt_lookup_num_tokens` in transformers); arXiv 2304.04487.
"""

from typing import Any

from specdec.core.draft.worker import Draft, DraftParts, DraftWorker, RoundBatch

MAX_NGRAM = 4  # tokens


class LookupWorker(DraftWorker):
    """Drafts chains from each request's own tokens."""

    reads_history = True

    def __init__(self, parts: DraftParts, draft: None):
        if parts.config.topk > 1:
            raise ValueError(f"topk={parts.config.topk}: algo='lookup' drafts chains; leave topk out")
        self.spec = parts.spec
        self.id_shift = parts.spec.id_shift
        self.ops = parts.ops

    def draft(self, batch: RoundBatch) -> Draft:
        tokens, _ = self.ops.look_up(batch.history, batch.rows, batch.seq_lens, batch.shape.num_steps, MAX_NGRAM)
        return Draft(self.ops.chain(batch.roots, tokens), None)

    @property
    def facts(self) -> dict[str, Any]:
        return {"algo": self.spec.name, "max_ngram": MAX_NGRAM}
