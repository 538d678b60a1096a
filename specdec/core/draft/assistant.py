"""The worker of assistants: drafts that attend to the K/V of their target, and keep none of their own (Gemma 4's MTP).

A step takes the embedding of a token beside a state: at the root the target's last hidden state at position L-1, then
what the assistant made of its own. All steps of a round are at the root's position L, and see the target's committed
tokens but none of the drafted ones. So a prompt needs no pass of the draft, and the nodes of a tree are requests apart.
"""

from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import nn

from specdec.backends.op import forward_context
from specdec.core.batch import ForwardMode
from specdec.core.draft.drafting import Output, SteppingWorker
from specdec.core.draft.worker import Draft, DraftParts, RoundBatch
from specdec.core.functional.verify import VerifyOutput


class Assistant(Protocol):
    """A live assistant. aux_layers: of the target, that it reads; num_layers: its own; state_size h_d; vocab_size V."""

    model: nn.Module
    aux_layers: tuple[int, ...]
    num_layers: int

    @property
    def state_size(self) -> int: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def dtype(self) -> torch.dtype: ...

    def routed(self) -> AbstractContextManager[None]:
        """Return the context that `step` runs in."""

    def step(self, embeds: torch.Tensor, states: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Return own states [N, h_d] of embeds and states of the target's width [N, h], at `positions` [N] int64."""

    def widened(self, states: torch.Tensor) -> torch.Tensor:
        """Map own states [N, h_d] to the target's width [N, h]."""

    def head(self, states: torch.Tensor) -> torch.Tensor:
        """Map own states [N, h_d] to logits [N, V]."""


class AssistantWorker(SteppingWorker):
    """Drafts with an assistant. features [num_rows, h]: the target's, of each row's last committed token."""

    has_begin = True
    prefills = False

    def __init__(self, parts: DraftParts, assistant: Assistant):
        device, size = parts.target.device, parts.target.spec.hidden_size
        super().__init__(
            parts,
            hot_ids=torch.arange(assistant.vocab_size, device=device),
            vocab_size=assistant.vocab_size,
            state_size=assistant.state_size,
            dtype=assistant.dtype,
        )
        self.assistant, self.module, self.target = assistant, assistant.model, parts.target
        self.aux_layers, self.own_head = assistant.aux_layers, assistant.head
        self.hidden_size = size
        self.features = torch.zeros(parts.config.num_rows, size, dtype=assistant.dtype, device=device)

    def begin(self, batch: RoundBatch, states: torch.Tensor | None) -> None:
        assert states is not None
        self.features[batch.rows] = states

    def extend(self, batch: RoundBatch, verified: VerifyOutput, aux: torch.Tensor | None) -> None:
        assert aux is not None, "an assistant reads features"
        last = verified.accept_lens.unsqueeze(1) - 1
        of_path = self.ops.gather_rows(aux, verified.accept_index)
        self.features[batch.rows] = self.ops.gather_rows(of_path, last).squeeze(1)

    def draft(self, batch: RoundBatch) -> Draft:
        features = self.of_rows(self.features, batch.rows)
        self.keep(batch.rows, self._at_root(batch, batch.roots.clamp(min=0), features).states)
        return super().draft(batch)

    def forward(
        self,
        batch: RoundBatch,
        mode: ForwardMode,
        ids: torch.Tensor,
        hidden: torch.Tensor | None,
        module: int = 0,
        **shape: Any,
    ) -> Output:
        """Run a step of ids [bs*n] after own states [bs*n, h_d]; whatever their depth, nodes see the same tokens."""
        assert hidden is not None, "an assistant reads states"
        return self._at_root(batch, ids, self.assistant.widened(hidden))

    def run(
        self,
        mode: ForwardMode,
        ids: torch.Tensor,
        positions: torch.Tensor,
        hidden: torch.Tensor | None,
        module: int = 0,
    ) -> Output:
        assert hidden is not None, "an assistant reads states"
        if "step" in self.compiled:
            (states,) = self.compiled["step"](ids.contiguous(), positions, hidden.contiguous())
            return Output(states, states)
        with self.assistant.routed():
            (states,) = self.run_live(ids, positions, hidden)
            return Output(states, states)

    def run_live(self, ids: torch.Tensor, positions: torch.Tensor, states: torch.Tensor) -> tuple[torch.Tensor]:
        """Run `run` by the live modules; needs `Assistant.routed`. This is what gets traced."""
        return (self.assistant.step(self.target.embed_tokens(ids), states, positions),)

    def _at_root(self, batch: RoundBatch, ids: torch.Tensor, states: torch.Tensor) -> Output:
        """Run a step of ids [bs*n] beside states [bs*n, h]: n requests of one query each for one of the batch.

        A query stands in the plan where the last committed token is, whose K/V are there; it is rotated by L.
        """
        num_nodes = ids.shape[0] // batch.rows.shape[0]
        lens = batch.seq_lens.repeat_interleave(num_nodes)
        metadata = self.context.backend.metadata.uniform(
            ForwardMode.DRAFT,
            batch.slot_table,
            batch.rows.repeat_interleave(num_nodes),
            (lens - 1).clamp(min=0),
            q_len=1,
            max_prefix=batch.max_prefix,
        )
        with forward_context(self.context, metadata):
            return self.run(ForwardMode.DRAFT, ids, lens, states)
