"""What an engine needs of a device's memory, by the sizes of its models."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import nn

from specdec.assembly.memory import MemoryNeed, check_fits, free_bytes
from specdec.assembly.models import resolve_prefill_mode
from specdec.backends.base import LayerSpec
from specdec.backends.state_pool import RecurrentSpec, StatePool
from specdec.cache.pool import KVPool
from specdec.cache.tables import SlotTables
from specdec.config import EngineConfig
from specdec.draft.head import DraftHead
from specdec.prefill.graphs import LOWER as PREFILL_LOWER
from specdec.prefill.graphs import estimate_prefill_bytes
from specdec.round.graphs import LOWER, estimate_bytes
from specdec.round.state import EngineState
from specdec.targets.hf import HFTarget

Draft = DraftHead | HFTarget  # a head that reads the target's features, or a model of its own


class ModelShape(NamedTuple):
    """The layers of a target or a draft, and the sizes that an engine makes room for.

    num_state: elements a row of a draft, logits and recycled states; num_aux: hidden states it reads of the target.
    """

    layers: Sequence[LayerSpec]
    sinks: Sequence[torch.Tensor | None]
    dtype: torch.dtype
    num_state: int
    module: nn.Module
    num_aux: int
    recurrent: Sequence[RecurrentSpec] = ()

    @classmethod
    def of(cls, draft: Draft, num_scored: int | None = None) -> "ModelShape":
        """Read the sizes off a head or a model; num_scored: tokens that a draft scores, if not all it could."""
        if isinstance(draft, HFTarget):
            spec = draft.spec
            scored = num_scored or spec.vocab_size
            return cls(spec.layers, spec.sinks, draft.dtype, scored, draft.model, 0, spec.recurrent)
        num_states = 1 if draft.num_modules == 1 else 1 + draft.num_modules
        num_state = (num_scored or draft.hot_ids.numel()) + num_states * draft.hidden_size
        return cls(draft.attention_layers, draft.sinks, draft.weight.dtype, num_state, draft, len(draft.aux_layers))


def check_memory(target: HFTarget, config: EngineConfig, draft: ModelShape | None) -> None:
    """CapacityError if pools, tables and graphs will not fit beside the weights."""
    total_slots = SlotTables.slots_for(config.pool_slots, config.page_size)

    def size(module: nn.Module) -> int:
        return sum(p.numel() * p.element_size() for p in module.parameters())

    def pool(layers: Sequence[LayerSpec], dtype: torch.dtype) -> int:
        return KVPool.bytes_for([s.shape for s in layers], total_slots, dtype)

    num_draft_layers = 1 if draft is None else len(draft.layers) + len(draft.recurrent)
    lower = "num_slots, max_batch or max_seq_len"
    needs = [MemoryNeed("KV pool", pool(target.spec.layers, target.dtype), lower)]
    recurrent = StatePool.bytes_for(target.spec.recurrent, config.num_rows, config.verify_width, target.dtype)
    if draft is not None:
        recurrent += StatePool.bytes_for(draft.recurrent, config.num_rows, config.draft_tail, draft.dtype)
    if recurrent:
        needs.append(MemoryNeed("states of recurrent layers", recurrent, "max_batch or num_draft_tokens"))
    needs.append(MemoryNeed("slot tables", 4 * config.num_rows * config.table_width, "max_batch or max_seq_len"))
    by_row = EngineState.bytes_for(config.num_rows, config.table_width, target.spec.vocab_size)
    needs.append(MemoryNeed("the state of penalties and tokens", by_row, "max_batch or max_seq_len"))
    resident = [MemoryNeed("weights", size(target.model), "")]
    if draft is not None:
        tables = 2 * config.table_width * max((s.qk_dim for s in draft.layers), default=0)
        state = (config.num_rows * draft.num_state + tables) * draft.dtype.itemsize
        needs.append(MemoryNeed("the draft's KV pool", pool(draft.layers, draft.dtype), lower))
        needs.append(MemoryNeed("the draft's state", state, "max_batch or max_seq_len"))
        resident.append(MemoryNeed("draft", size(draft.module), ""))
    if config.cuda_graph is not False:
        spec = target.spec
        shape = (spec.hidden_size, spec.vocab_size, spec.num_layers, target.dtype.itemsize)
        needs.append(MemoryNeed("graphs", estimate_bytes(config, *shape, num_draft_layers), LOWER))
    if resolve_prefill_mode(config, target.device) != "off":
        num_aux = 0 if draft is None else draft.num_aux
        num_bytes = estimate_prefill_bytes(config, target.spec, num_aux, target.dtype.itemsize, num_draft_layers)
        needs.append(MemoryNeed("prefill graphs", num_bytes, PREFILL_LOWER))
    check_fits(needs, resident, free_bytes(target.device))
