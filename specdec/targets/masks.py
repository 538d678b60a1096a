"""Classifies mask functions of transformers by their values far out: causal, a sliding window, or something else."""

from collections.abc import Callable
from typing import Any

import torch

FAR = 1 << 18  # masks are evaluated around this query position, so that windows up to it are seen


def classify_mask(mask_function: Callable[..., Any], device: torch.device) -> str | int | None:
    """Return None for causal, a window in tokens for a sliding one, else a phrase that says what it is."""
    keys = torch.arange(FAR + 1, device=device)
    zero = torch.zeros((), dtype=torch.int64, device=device)
    windows = set()
    for q in (FAR, FAR - 37, FAR - 4999):
        try:
            visible = torch.as_tensor(mask_function(zero, zero, torch.tensor(q, device=device), keys)).expand(FAR + 1)
        except Exception as error:
            return f"a mask that cannot be evaluated alone ({type(error).__name__})"
        count = int(visible.sum())
        if not bool(visible[q]) or bool(visible[q + 1 :].any()):
            return "a mask that is not causal"
        if count and not bool(visible[q + 1 - count : q + 1].all()):
            return "a mask with holes"
        windows.add(None if count == q + 1 else count)
    if len(windows) > 1:
        return "a chunked mask (its width depends on the position)"
    return windows.pop()
