"""Benches of several ranks, which torchrun starts: each runs the same, and decides by the first one's clock."""

import os
from typing import Any

import torch
import torch.distributed as dist


def num_ranks() -> int:
    """Return how many ranks torchrun has started; 1 without it."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def is_first() -> bool:
    """Return whether this rank is the one that prints and writes."""
    return int(os.environ.get("RANK", "0")) == 0


def device_of_rank(kind: str) -> str:
    """Return this rank's device of `kind`, which becomes the current one: of CUDA the one that torchrun counts."""
    if num_ranks() == 1 or not kind.startswith("cuda"):
        return kind
    torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    return f"cuda:{torch.cuda.current_device()}"


def of_first(value: Any) -> Any:
    """Return what the first rank gave; plain values. All ranks ask at the same points."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return value
    told = [value]
    dist.broadcast_object_list(told, src=0)
    return told[0]
