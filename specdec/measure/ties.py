"""Where two texts part, and whether rounding explains it: a near-tie of the target's own logits."""

from collections.abc import Sequence
from typing import Any

import torch

NEAR_TIE = 0.25  # logits; bf16 rounds logits of size 16..32 to steps of 0.125


def first_difference(ours: Sequence[int], theirs: Sequence[int]) -> int:
    """Return the index of the first token that differs; the shorter length where one is a beginning of the other."""
    differs = (i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b)
    return next(differs, min(len(ours), len(theirs)))


@torch.inference_mode()
def tie_gap(model: Any, prompt: list[int], ours: list[int], theirs: list[int]) -> float:
    """Return how far apart, in logits of the target alone, the two tokens are where the outputs first differ."""
    at = first_difference(ours, theirs)
    if at == min(len(ours), len(theirs)):
        return float("inf")  # one is a beginning of the other: no tie explains that
    ids = torch.tensor([prompt + theirs[:at]], device=model.device)
    logits = model(ids, use_cache=False).logits[0, -1].float()
    return float((logits[ours[at]] - logits[theirs[at]]).abs())
