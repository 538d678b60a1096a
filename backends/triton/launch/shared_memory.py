"""The shared memory that a program can have, which bounds its tiles and its pipeline stages."""

from functools import cache

import torch

HOPPER = 227 << 10  # bytes


@cache
def shared_memory(device: torch.device) -> int:
    """Return its bytes on `device`; Hopper's if kernels are interpreted, or compiled without a GPU."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return HOPPER
    return int(getattr(torch.cuda.get_device_properties(device), "shared_memory_per_block_optin", HOPPER))
