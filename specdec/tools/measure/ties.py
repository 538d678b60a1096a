"""Where two texts part, and whether rounding explains it: a near-tie of the target's own logits.

How near is measured on the target alone: how far its own two attention implementations move the gap between its two
best tokens. Two right engines can disagree wherever the gap is no larger than that.
"""

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

import torch

LEAST_NEAR_TIE = 0.25  # logits; bf16 rounds logits of size 16..32 to steps of 0.125


def compare_texts(
    model: Any,
    prompts: Sequence[list[int]],
    ours: Sequence[list[int]],
    theirs: Sequence[list[int]],
    tie: float,
    digits: int,
) -> dict[str, Any]:
    """Return how many texts are equal, by how much the target's logits of both tokens differ where others part, and at
    how many of those no more than `tie`: near-ties."""
    gaps = [tie_gap(model, *texts) for texts in zip(prompts, ours, theirs, strict=True) if texts[1] != texts[2]]
    return {
        "equal": len(prompts) - len(gaps),
        "gaps": [round(g, digits) for g in gaps],
        "near_ties": sum(g <= tie for g in gaps),
        "near_tie": round(tie, 4),
    }


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


@torch.inference_mode()
def by_both_attentions(
    model: Any, prompts: Sequence[list[int]], answers: Sequence[list[int]], most: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield the target's logits [n, V] before each token of `most` answers, under its eager and its sdpa attention."""
    before = model.config._attn_implementation
    try:
        for prompt, answer in islice(zip(prompts, answers, strict=True), most):
            ids, laws = torch.tensor([prompt + answer], device=model.device), []
            for kind in ("eager", "sdpa"):
                model.set_attn_implementation(kind)
                laws.append(model(ids, use_cache=False).logits[0, len(prompt) - 1 : -1])
            yield laws[0], laws[1]
    finally:
        model.set_attn_implementation(before)


def near_tie(model: Any, prompts: Sequence[list[int]], answers: Sequence[list[int]], most: int = 32) -> float:
    """Return the gap in logits up to which rounding explains another token: 0 in fp32.

    In 16 bits, the largest change, over the tokens of `most` answers, of the gap between the model's two best tokens
    from its eager attention to its sdpa; at least two steps of bf16.
    """
    if model.dtype == torch.float32:
        return 0.0
    largest = LEAST_NEAR_TIE
    for pair in by_both_attentions(model, prompts, answers, most):
        best = pair[0].float().topk(2).indices
        one, other = (law.float().gather(1, best).diff(dim=1) for law in pair)
        largest = max(largest, float((one - other).abs().max()))
    return largest
