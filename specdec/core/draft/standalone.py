"""The worker of standalone drafts (arXiv 2211.17192, 2302.01318): any causal LM of the target's vocabulary.

It sees tokens only, unshifted, at their true positions, through attention of its own geometry. Between rounds it has
seen the root too, one token more than the target, so that its logits are there when a round begins.
"""

from dataclasses import replace

import torch

from specdec.core.batch import ForwardMode
from specdec.core.draft.drafting import Output, SteppingWorker
from specdec.core.draft.worker import DraftParts, RoundBatch
from specdec.core.target import Target


class StandaloneWorker(SteppingWorker):
    """Drafts with a live model of its own."""

    has_begin = True
    is_fed_states = False

    def __init__(self, parts: DraftParts, draft: Target):
        super().__init__(
            parts,
            hot_ids=torch.arange(draft.spec.vocab_size, device=draft.device),
            vocab_size=draft.spec.vocab_size,
            state_size=draft.spec.hidden_size,
            dtype=draft.dtype,
        )
        self.model = draft
        self.module, self.own_head = draft.model, draft.head

    def run(
        self,
        mode: ForwardMode,
        ids: torch.Tensor,
        positions: torch.Tensor,
        hidden: torch.Tensor | None,
        module: int = 0,
    ) -> Output:
        states = self.model.layers(mode, ids if mode == ForwardMode.DRAFT else ids.clamp(min=0), positions)[0]
        return Output(states, states)

    def prefill_layers(
        self, ids: torch.Tensor, positions: torch.Tensor, features: torch.Tensor | None, module: int = 0
    ) -> torch.Tensor:
        """Run the draft over a prompt; only K/V is kept: states [T, 0]."""
        return self.run(ForwardMode.EXTEND, ids, positions, None).states[:, :0]

    def begin(self, batch: RoundBatch, states: torch.Tensor | None) -> None:
        """Run the draft on the first root, at position L."""
        at_root = replace(batch, seq_lens=batch.seq_lens - 1, sampling=None, is_processed=False)
        states = self.forward(at_root, ForwardMode.DRAFT_EXTEND, batch.roots, None, q_len=1).states
        self.commit(at_root, 1, torch.ones_like(batch.rows))
        self.keep(batch.rows, states)

    def drop_compiled(self) -> None:
        self.model.drop_compiled()

    def close(self) -> None:
        self.model.detach()
