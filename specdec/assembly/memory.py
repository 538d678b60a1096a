"""Check that an engine's memory fits the device, made before anything is allocated."""

import os
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from specdec.errors import CapacityError

GIB = 2**30


@dataclass(frozen=True)
class MemoryNeed:
    """One part of an engine's memory; `lower`: the settings that make it smaller."""

    name: str
    num_bytes: int
    lower: str


def free_bytes(device: torch.device) -> int | None:
    """Return the device bytes free for new tensors, unused bytes of the allocator included; of a CPU all bytes, since
    what others use may be given back; None where nobody knows."""
    if device.type == "cpu" and hasattr(os, "sysconf"):
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if device.type != "cuda":
        return None
    free, _total = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


def check_fits(needs: Sequence[MemoryNeed], resident: Sequence[MemoryNeed], free: int | None) -> None:
    """Raise CapacityError if `needs` exceed `free` bytes; it lists all parts, resident ones too, and what to lower."""
    wanted = sum(n.num_bytes for n in needs)
    if free is None or wanted <= free:
        return
    parts = ", ".join(f"{n.name} {n.num_bytes / GIB:.2f} GiB" for n in needs)
    there = ", ".join(f"{n.name} {n.num_bytes / GIB:.2f} GiB" for n in resident)
    largest = max(needs, key=lambda n: n.num_bytes)
    raise CapacityError(
        f"the engine needs {wanted / GIB:.2f} GiB ({parts}) and {free / GIB:.2f} GiB can be had "
        f"(on the device already: {there}); lower {largest.lower}"
    )
