"""Times transformers' own `generate`, greedy and with its cache, on a model that no engine is attached to; of models
with experts, counts those that the text's neighbouring tokens use."""

import time
from collections.abc import Collection, Iterator, Sequence
from statistics import median
from typing import Any

import torch
from transformers import PreTrainedModel

from specdec.measure.experts import distinct_experts
from specdec.measure.latency.timing import wait
from specdec.targets.weight_bytes import expert_modules

LEAST_TOKENS = 4  # of the calls that give the time of a token
REPEATS = 3


@torch.no_grad()
def hf_rows(
    model: PreTrainedModel, prompt: Sequence[int], new_tokens: int, seconds: float, widths: Collection[int] = ()
) -> Iterator[dict[str, Any]]:
    """Yield a row of the time to the first token of `prompt`, and one of the time a token; ms.

    widths: of a model with experts, the second row has the distinct experts of a layer that so many neighbouring tokens
    use (`experts_in_use`).

    seconds: what calls may take, as far as it is known before them; so fewer tokens than new_tokens may be timed
    (`hf_new_tokens`), and after a first token that takes too long none. A call that warms up is not timed, unless it
    took too long itself: then it is the only one.
    """
    first, _ = _call(model, prompt, 1)
    if first * (REPEATS + 1) < seconds:
        first = median(_call(model, prompt, 1)[0] for _ in range(REPEATS))
    yield {"what": "hf_ttft", "ms": round(1e3 * first, 3)}
    if 2 * first >= seconds or _call(model, prompt, LEAST_TOKENS)[0] >= seconds:
        return
    tried, _ = _call(model, prompt, LEAST_TOKENS)
    a_token = max((tried - first) / (LEAST_TOKENS - 1), 1e-6)
    num = max(LEAST_TOKENS, min(new_tokens, 1 + int((seconds - first) / a_token)))
    last, answer = _call(model, prompt, num)
    row: dict[str, Any] = {"what": "hf_token", "ms": round(1e3 * (last - first) / (num - 1), 4), "hf_new_tokens": num}
    if expert_modules(model) and widths:
        found = {width: distinct_experts(model, [(prompt, answer)], width) for width in widths}
        row["experts_in_use"] = {width: round(mean, 2) for width, mean in found.items() if mean is not None}
    yield row


def _call(model: PreTrainedModel, prompt: Sequence[int], new_tokens: int) -> tuple[float, list[int]]:
    """Return the seconds of one call that emits `new_tokens` tokens, and the tokens."""
    ids = torch.tensor([list(prompt)], device=model.device)
    wait(model.device.type)
    start = time.perf_counter()
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        min_new_tokens=new_tokens,
        max_new_tokens=new_tokens,
        pad_token_id=0,
    )
    wait(model.device.type)
    seconds = time.perf_counter() - start
    assert out.shape[1] == len(prompt) + new_tokens, "generate ended early"
    return seconds, out[0, len(prompt) :].tolist()
