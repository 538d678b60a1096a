"""Training checkpoints: one file, replaced atomically, refused when it belongs to another run."""

import os
import pickle
from pathlib import Path
from typing import Any

import torch


def save_checkpoint(path: str | Path, state: dict[str, Any]) -> None:
    """Write `state` atomically: an error, such as a full disk, leaves the older file and no other."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    try:
        torch.save(state, partial)
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def load_checkpoint(path: str | Path, identity: dict[str, Any], device: torch.device) -> dict[str, Any]:
    """Read what `save_checkpoint` wrote; ValueError if its "identity" differs from `identity`: it is another run's."""
    if not Path(path).is_file():
        raise ValueError(f"there is no checkpoint {str(path)!r} to resume; start without resume")
    try:
        state = torch.load(path, map_location=device, weights_only=True)
        saved = state["identity"]
    except (OSError, EOFError, RuntimeError, KeyError, TypeError, pickle.UnpicklingError) as error:
        raise ValueError(f"checkpoint {str(path)!r} cannot be read ({error}): take it away, and start anew") from error
    differing = [f"{k}: {saved.get(k)!r} there, {v!r} here" for k, v in identity.items() if saved.get(k) != v]
    if differing:
        raise ValueError(f"checkpoint {str(path)!r} is of another run ({'; '.join(differing)}); use its settings")
    return state
