"""The worker of the EAGLE family: EAGLE-1/2, EAGLE-3 and NextN heads, which read features of the target.

Position p of the draft sees (embedding of token p+1, feature of position p): arXiv 2401.15077, 2503.01840; for NextN
2412.19437. `AlgoSpec` says what the heads read; how they use it is up to each head.
"""

from typing import Any

import torch

from specdec.backends.op import rows_read
from specdec.backends.rope import Rope
from specdec.core.batch import ForwardMode
from specdec.core.draft.drafting import Output, SteppingWorker
from specdec.core.draft.head import RecyclingHead
from specdec.core.draft.model import attend
from specdec.core.draft.worker import DraftParts, RoundBatch


class HeadWorker(SteppingWorker):
    """Drafts with a head for the target, whose embedding and output head it uses unless the head has its own."""

    has_begin = True

    def __init__(self, parts: DraftParts, head: RecyclingHead):
        weight, target, config = head.weight, parts.target, parts.config
        super().__init__(
            parts,
            hot_ids=head.hot_ids,
            vocab_size=head.vocab_size,
            state_size=head.hidden_size,
            dtype=weight.dtype,
        )
        self.head = self.module = head
        self.target = target
        self.own_head = lambda normed: head.project(normed, target.head)
        self.embed_tokens = head.embed_tokens if head.embed_tokens is not None else target.embed_tokens
        self.aux_layers = head.aux_layers
        self.hidden_size = head.hidden_size
        self.num_modules = head.num_modules
        every_position = torch.arange(config.table_width, device=weight.device)
        self.rope_tables = torch.stack(head.rope(every_position), 1)  # [table_width, 2, R]: cos, sin

    def run(
        self,
        mode: ForwardMode,
        ids: torch.Tensor,
        positions: torch.Tensor,
        hidden: torch.Tensor | None,
        module: int = 0,
    ) -> Output:
        assert hidden is not None, "a head reads states"
        if module in self.compiled:
            rows = rows_read() if self.num_modules == 1 else None  # a next module reads all
            made = self.compiled[module](ids.contiguous(), positions, hidden.contiguous(), rows=rows)
        else:
            with self.head.routed():
                made = self.run_live(ids, positions, hidden, module)
        return Output(made[0], made[-1])

    def run_live(
        self, ids: torch.Tensor, positions: torch.Tensor, hidden: torch.Tensor, module: int
    ) -> tuple[torch.Tensor, ...]:
        """`run` by the head's own modules; needs `RecyclingHead.routed`. This is what gets traced.

        ids are -1 past accepted tokens, and after a prompt whose logits are not finite: any id will do.
        """
        rope = Rope(*self.rope_tables[positions].unbind(1))
        states = self.head(self.embed_tokens(ids.clamp(min=0)), hidden, rope, attend, module)
        return (states, self.head.normed(states, module)) if self.head.norms_late(module) else (states,)

    def normed(self, states: torch.Tensor) -> torch.Tensor:
        if "norm" in self.compiled:
            return self.compiled["norm"](states.contiguous())[0]
        return self.head.normed(states)

    def inputs(self, features: torch.Tensor | None) -> torch.Tensor:
        assert features is not None, f"{self.spec.name} needs the target's features"
        return self.head.fuse(features)

    def begin(self, batch: RoundBatch, states: torch.Tensor | None) -> None:
        assert states is not None
        self.keep(batch.rows, states)

    @property
    def facts(self) -> dict[str, Any]:
        return {**super().facts, "recycles": "post_norm" if self.head.recycles_normed else "pre_norm"}
