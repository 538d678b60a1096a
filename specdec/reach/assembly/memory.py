"""Checks, before anything is allocated, that pools and recurrent states fit the device. Graphs use the remaining
memory."""

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
from specdec.reach.targets.assistant import Assistant
from specdec.reach.targets.hf import HFTarget
from specdec.reach.targets.weight_bytes import num_bytes

GIB = 2**30
BY_SLOT = "num_slots, max_batch or max_seq_len"
Draft = DraftHead | HFTarget | Assistant  # a head that reads the target's features, or a model of its own


class ModelShape(NamedTuple):
    """The layers of a target or a draft. has_pool: whether it has K/V of its own."""

    layers: Sequence[LayerSpec]
    sinks: Sequence[torch.Tensor | None]
    dtype: torch.dtype
    module: nn.Module
    recurrent: Sequence[RecurrentSpec] = ()
    has_pool: bool = True

    @classmethod
    def of(cls, model: Draft) -> "ModelShape":
        """Read the sizes off a head or a model."""
        if isinstance(model, HFTarget):
            return cls(model.spec.layers, model.spec.sinks, model.dtype, model.model, model.spec.recurrent)
        if isinstance(model, Assistant):
            return cls(model.layers, model.sinks, model.dtype, model.model, has_pool=False)
        return cls(model.attention_layers, model.sinks, model.weight.dtype, model)


def check_memory(target: HFTarget, config: EngineConfig, draft: ModelShape | None) -> None:
    """Raise CapacityError if pools and recurrent states, the largest allocations, will not fit beside the weights."""
    total_slots = SlotTables.slots_for(config.pool_slots, config.page_size)
    models = [("", ModelShape.of(target), config.verify_width)]
    models += [] if draft is None else [("the draft's ", draft, config.draft_tail)]
    needs: dict[str, tuple[int, str]] = {}
    resident: dict[str, int] = {}
    for owner, model, max_tail in models:
        resident[f"{owner}weights"] = num_bytes(model.module)
        pool = KVPool.bytes_for([s.shape for s in model.layers if model.has_pool], total_slots, model.dtype)
        needs[f"{owner}KV pool"] = pool, BY_SLOT
        states = StatePool.bytes_for(model.recurrent, config.num_rows, max_tail, model.dtype, config.num_kept_states)
        if states:
            needs[f"{owner}states of recurrent layers"] = states, "max_batch or num_draft_tokens"
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
        f"the engine needs {wanted / GIB:.2f} GiB ({parts}) and {free / GIB:.2f} GiB are available "
        f"(on the device already: {there}); lower {max(needs.values())[1]}"
    )


def free_bytes(device: torch.device) -> int | None:
    """Return the device bytes free for new tensors, including unused bytes of the allocator. On a CPU all bytes, since
    other processes may free theirs; None if unknown."""
    if device.type == "cpu" and hasattr(os, "sysconf"):
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if device.type != "cuda":
        return None
    free, _total = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
