"""Checks, before anything is allocated, that pools and state by row fit the device. Graphs take what is left then."""

import os
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import nn

from specdec.backends.base import LayerSpec
from specdec.backends.recurrent.state_pool import RecurrentSpec, StatePool
from specdec.core.cache.pool import KVPool
from specdec.core.cache.tables import SlotTables
from specdec.core.config import EngineConfig
from specdec.core.draft.head import DraftHead
from specdec.core.errors import CapacityError
from specdec.core.round.state import EngineState
from specdec.reach.targets.hf import HFTarget

GIB = 2**30
BY_SLOT, BY_ROW = "num_slots, max_batch or max_seq_len", "max_batch or max_seq_len"
Draft = DraftHead | HFTarget  # a head that reads the target's features, or a model of its own


class ModelShape(NamedTuple):
    """The layers of a target or a draft. num_state: elements a row of a draft, logits and recycled states."""

    layers: Sequence[LayerSpec]
    sinks: Sequence[torch.Tensor | None]
    dtype: torch.dtype
    num_state: int
    module: nn.Module
    recurrent: Sequence[RecurrentSpec] = ()

    @classmethod
    def of(cls, draft: Draft, num_scored: int | None = None) -> "ModelShape":
        """Read the sizes off a head or a model; num_scored: tokens that a draft scores, if not all it could."""
        if isinstance(draft, HFTarget):
            spec = draft.spec
            return cls(spec.layers, spec.sinks, draft.dtype, num_scored or spec.vocab_size, draft.model, spec.recurrent)
        num_states = 1 if draft.num_modules == 1 else 1 + draft.num_modules
        num_state = (num_scored or draft.hot_ids.numel()) + num_states * draft.hidden_size
        return cls(draft.attention_layers, draft.sinks, draft.weight.dtype, num_state, draft)


def check_memory(target: HFTarget, config: EngineConfig, draft: ModelShape | None) -> None:
    """CapacityError if pools, tables and state by row will not fit beside the weights."""
    rows, width = config.num_rows, config.table_width
    total_slots = SlotTables.slots_for(config.pool_slots, config.page_size)

    def pool(model: ModelShape) -> int:
        return KVPool.bytes_for([s.shape for s in model.layers], total_slots, model.dtype)

    def states(model: ModelShape, max_tail: int) -> int:
        return StatePool.bytes_for(model.recurrent, rows, max_tail, model.dtype)

    def weights(module: nn.Module) -> int:
        return sum(p.numel() * p.element_size() for p in module.parameters())

    model = ModelShape.of(target)
    by_row = 4 * rows * width + EngineState.bytes_for(rows, width)
    needs = {"KV pool": (pool(model), BY_SLOT), "tables and state by row": (by_row, BY_ROW)}
    recurrent, resident = states(model, config.verify_width), {"weights": weights(target.model)}
    if draft is not None:
        tables = 2 * width * max((s.qk_dim for s in draft.layers), default=0)
        needs["the draft's KV pool"] = pool(draft), BY_SLOT
        needs["the draft's state"] = (rows * draft.num_state + tables) * draft.dtype.itemsize, BY_ROW
        resident["draft"] = weights(draft.module)
        recurrent += states(draft, config.draft_tail)
    if recurrent:
        needs["states of recurrent layers"] = recurrent, "max_batch or num_draft_tokens"
    check_fits(needs, resident, free_bytes(target.device))


def check_fits(needs: Mapping[str, tuple[int, str]], resident: Mapping[str, int], free: int | None) -> None:
    """Raise CapacityError, which lists all parts and what to lower, if `needs` exceed `free` bytes, None if unknown.

    needs: bytes of each part, and the settings that lower them; resident: bytes of parts that are on the device.
    """
    wanted = sum(num_bytes for num_bytes, _ in needs.values())
    if free is None or wanted <= free:
        return
    parts = ", ".join(f"{name} {num_bytes / GIB:.2f} GiB" for name, (num_bytes, _) in needs.items())
    there = ", ".join(f"{name} {num_bytes / GIB:.2f} GiB" for name, num_bytes in resident.items())
    raise CapacityError(
        f"the engine needs {wanted / GIB:.2f} GiB ({parts}) and {free / GIB:.2f} GiB can be had "
        f"(on the device already: {there}); lower {max(needs.values())[1]}"
    )


def free_bytes(device: torch.device) -> int | None:
    """Return the device bytes free for new tensors, unused bytes of the allocator included; of a CPU all bytes, since
    what others use may be given back; None where nobody knows."""
    if device.type == "cpu" and hasattr(os, "sysconf"):
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if device.type != "cuda":
        return None
    free, _total = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
