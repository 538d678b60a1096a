"""Calls in which the host must not wait for the device."""

from typing import Any

import torch


def forbid_waits(owner: Any, name: str) -> None:
    """Make the method `name` of `owner` raise where the host would wait for the GPU."""
    live = getattr(owner, name)

    def guarded(*args: Any) -> Any:
        torch.cuda.set_sync_debug_mode("error")
        try:
            return live(*args)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    setattr(owner, name, guarded)
