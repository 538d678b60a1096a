"""A prefill as device work: the layers of the target and of the draft over packed prompts, live or to be captured.

What is captured breaks at attention, and leaves its results in static rows that graphs of all sizes share.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch

from specdec.backends import AttentionBridge, ForwardContext, forward_context
from specdec.batch import AttentionMetadata, ForwardMode
from specdec.round.parts import Parts


class Prefill:
    """Runs layers for batches of tokens. `largest`: tokens of the largest graph, 0 if there are none.

    interrupt: see `AttentionBridge`. The methods called *_layers are bodies of graph runners: with metadata they run a
    live forward; without, one to be captured.
    """

    def __init__(self, parts: Parts, largest: int, interrupt: Callable[[Callable[[], None]], None]):
        target, worker, context, device = parts.target, parts.worker, parts.context, parts.tables.table.device

        def rows(width: int, dtype: torch.dtype = target.dtype) -> torch.Tensor:
            return torch.zeros(largest, width, dtype=dtype, device=device)

        def bridge(own: ForwardContext, dtype: torch.dtype = target.dtype) -> AttentionBridge:
            return AttentionBridge(own, largest, dtype, device, interrupt)

        draft_dtype = worker.dtype or target.dtype

        self.target = target
        self.worker = worker
        self.context = context
        self.hidden = rows(target.spec.hidden_size)
        self.aux = rows(len(target.aux_layers) * target.spec.hidden_size)
        self.draft_hidden = rows(worker.hidden_size, draft_dtype)
        # What MTP modules after the first read; no two of them run at once.
        self.draft_states = rows(worker.hidden_size if worker.num_modules > 1 else 0, draft_dtype)
        self.bridge = bridge(context)
        self.draft_bridge = None if worker.context is None else bridge(worker.context, draft_dtype)

    def target_layers(
        self,
        variant: str,
        ids: torch.Tensor,
        positions: torch.Tensor,
        slots: torch.Tensor,
        metadata: AttentionMetadata | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Last hidden states [T, h] and aux [T, num_aux*h] of ids [T]."""
        if metadata is not None:
            with forward_context(self.context, metadata):
                return self.target.layers(metadata.mode, ids, positions)
        with self.bridge.capturing(slots):
            hidden, aux = self.target.layers(ForwardMode.EXTEND, ids, positions)
        num_tokens = ids.shape[0]
        return self.hidden[:num_tokens].copy_(hidden), None if aux is None else self.aux[:num_tokens].copy_(aux)

    def draft_layers(
        self,
        variant: str,
        ids: torch.Tensor,
        positions: torch.Tensor,
        slots: torch.Tensor,
        aux: torch.Tensor | None = None,
        states: torch.Tensor | None = None,
        metadata: AttentionMetadata | None = None,
        module: int = 0,
    ) -> torch.Tensor:
        """The states [T, h_d] of the draft, or of its MTP module `module`; see `DraftWorker.prefill_layers`."""
        assert self.worker.context is not None and self.draft_bridge is not None
        features = states if module else aux
        if metadata is not None:
            with forward_context(self.worker.context, metadata):
                return self.worker.prefill_layers(ids, positions, features, module)
        with self.draft_bridge.capturing(slots):
            hidden = self.worker.prefill_layers(ids, positions, features, module)
        return self.draft_hidden[: ids.shape[0]].copy_(hidden)

    def plan_target(self, size: int, metadata: AttentionMetadata) -> None:
        """What the breaks of a replay of `size` tokens need: the live batch planned."""
        self.bridge.plan(metadata, size)

    def plan_draft(self, size: int, metadata: AttentionMetadata) -> None:
        """As `plan_target`."""
        assert self.draft_bridge is not None
        self.draft_bridge.plan(metadata, size)

    def tensors(self) -> Mapping[str, torch.Tensor]:
        """By name, what graphs read besides their inputs; it stays where it is."""
        model = self.target.model
        own: dict[str, Any] = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        own |= {**self.context.pool.tensors("target"), **self.bridge.tensors, "hidden": self.hidden, "aux": self.aux}
        draft = {**self.worker.tensors, **(self.draft_bridge.tensors if self.draft_bridge is not None else {})}
        return {**own, **{f"draft {name}": t for name, t in draft.items()}}
