"""The device work of a prefill: the layers of one model over packed prompts, run live or captured.

A captured forward breaks at attention, and writes its results to static rows that graphs of all sizes share.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from specdec.backends.bridge import AttentionBridge
from specdec.backends.op import ForwardContext, forward_context
from specdec.core.batch import AttentionMetadata, ForwardMode
from specdec.core.round.parts import Parts

Results = tuple[torch.Tensor | None, ...]
# (mode, ids [T], positions [T], features [T, ...] or None) -> results, [T, ...] each
Layers = Callable[[ForwardMode, torch.Tensor, torch.Tensor, torch.Tensor | None], Results]


@dataclass(frozen=True)
class PrefillProgram:
    """The prefill of one model, or of one MTP module.

    results: static rows [largest, ...] to which captured layers write their results. `run` and `capture` take the
    inputs of a graph runner; features: what a draft reads besides ids.
    """

    layers: Layers
    context: ForwardContext
    bridge: AttentionBridge
    results: tuple[torch.Tensor, ...]

    def run(
        self,
        variant: str,
        ids: torch.Tensor,
        positions: torch.Tensor,
        slots: torch.Tensor,
        features: torch.Tensor | None = None,
        *,
        metadata: AttentionMetadata,
    ) -> Results:
        """Run a live forward of the batch that `metadata` describes."""
        with forward_context(self.context, metadata):
            return self.layers(metadata.mode, ids, positions, features)

    def capture(
        self,
        variant: str,
        ids: torch.Tensor,
        positions: torch.Tensor,
        slots: torch.Tensor,
        features: torch.Tensor | None = None,
    ) -> Results:
        """Run a forward to be captured; a replay attends in the batch that was planned last."""
        with self.bridge.capturing(slots):
            results = self.layers(ForwardMode.EXTEND, ids, positions, features)
        pairs = zip(self.results, results, strict=True)
        return tuple(None if own is None else rows[: ids.shape[0]].copy_(own) for rows, own in pairs)

    def plan(self, size: int, metadata: AttentionMetadata) -> None:
        """Plan the live batch, as the breaks of a replay of `size` tokens need."""
        self.bridge.plan(metadata, size)


class Programs:
    """The prefill programs of an engine: its target's, and one for each module of its draft, if that has layers.

    largest: tokens of the largest graph, 0 if there are none; interrupt: see `AttentionBridge`. features: rows from
    which drafts read the target's hidden states; states: rows that later MTP modules read.
    """

    def __init__(self, parts: Parts, largest: int, interrupt: Callable[[Callable[[], None]], None]):
        target, worker, device = parts.target, parts.worker, parts.tables.table.device
        draft_dtype = worker.dtype or target.dtype

        def rows(width: int, dtype: torch.dtype) -> torch.Tensor:
            return torch.zeros(largest, width, dtype=dtype, device=device)

        self._parts = parts
        self.features = rows(len(target.aux_layers) * target.spec.hidden_size, target.dtype)
        self.states = rows(worker.hidden_size if worker.num_modules > 1 else 0, draft_dtype)
        bridge = AttentionBridge(parts.context, largest, target.dtype, device, interrupt)
        hidden = rows(target.spec.hidden_size, target.dtype)
        self.target = PrefillProgram(
            lambda *given: target.layers(*given[:3]), parts.context, bridge, (hidden, self.features)
        )
        self.draft: list[PrefillProgram] = []
        if worker.prefills:
            assert worker.context is not None, "a model has attention layers"
            own = AttentionBridge(worker.context, largest, draft_dtype, device, interrupt)
            states = (rows(worker.hidden_size, draft_dtype),)  # shared by all modules: no two of them run at once
            layers = [partial(worker.prefill_layers, module=module) for module in range(worker.num_modules)]
            self.draft = [
                PrefillProgram(lambda _, *given, run=run: (run(*given),), worker.context, own, states) for run in layers
            ]
