"""`specdec bench lossless`: checks that speculation does not change the text, for every algorithm, chains and trees.

Greedy text is compared with `model.generate`: in fp32 every token must be equal; in bf16 each difference must be a
near-tie of the target's own top two logits: how near is measured on the target alone, by how far its own two attention
implementations move the gap between its two best tokens. Sampled text is compared, with the same seeds, with that of
the same engine without graphs and with the torch backend. There a difference occurs where rounding moved a law across a
random number: its rate is estimated in the same way, and the check fails if there are more differences than that rate
makes likely. Rows have `algo` and `check`.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch.nn.functional import pad
from tqdm import tqdm

from specdec.api import attach
from specdec.core.functional.sampling import SamplingParams
from specdec.tools.measure.statistics import most_likely

LEAST_NEAR_TIE = 0.25  # logits; bf16 rounds logits of size 16..32 to steps of 0.125


def compare_texts(
    model: Any,
    prompts: Sequence[list[int]],
    ours: Sequence[list[int]],
    theirs: Sequence[list[int]],
    tie: float,
    digits: int,
) -> dict[str, Any]:
    """Return how many texts are equal, the gaps in the target's logits between both tokens where the others diverge,
    and how many of these gaps are at most `tie`: near-ties."""
    gaps = [tie_gap(model, *texts) for texts in zip(prompts, ours, theirs, strict=True) if texts[1] != texts[2]]
    return {
        "equal": len(prompts) - len(gaps),
        "gaps": [round(g, digits) for g in gaps],
        "near_ties": sum(g <= tie for g in gaps),
        "near_tie": round(tie, 4),
    }


def first_difference(ours: Sequence[int], theirs: Sequence[int]) -> int:
    """Return the index of the first token that differs; the shorter length if one is a prefix of the other."""
    differs = (i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b)
    return next(differs, min(len(ours), len(theirs)))


@torch.inference_mode()
def tie_gap(model: Any, prompt: list[int], ours: list[int], theirs: list[int]) -> float:
    """Return the gap, in logits of the target alone, between the two tokens where the outputs first differ."""
    at = first_difference(ours, theirs)
    if at == min(len(ours), len(theirs)):
        return float("inf")  # one is a prefix of the other: no tie explains that
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


def near_tie(model: Any, prompts: Sequence[list[int]], answers: Sequence[list[int]]) -> float:
    """Return the gap in logits up to which rounding explains a different token: 0 in fp32.

    In 16 bits, the largest change, over the tokens of 32 answers, of the gap between the model's two best tokens from
    its eager attention to its sdpa; at least two steps of bf16.
    """
    if model.dtype == torch.float32:
        return 0.0
    largest = LEAST_NEAR_TIE
    for pair in by_both_attentions(model, prompts, answers, most=32):
        best = pair[0].float().topk(2).indices
        one, other = (law.float().gather(1, best).diff(dim=1) for law in pair)
        largest = max(largest, float((one - other).abs().max()))
    return largest


Row = dict[str, Any]
CONFIGS: tuple[Row, ...] = ({"num_steps": 3, "topk": 1}, {"num_steps": 4, "topk": 4, "num_draft_tokens": 16})
# Settings to compare sampled text with, by device: they change how a round runs, but not its laws.
AGAINST: dict[str, dict[str, Row]] = {
    "cuda": {"eager": {"cuda_graph": False, "strict": False}, "torch": {"backend": "torch", "strict": False}},
    "cpu": {"recorded": {"cuda_graph": True, "prefill_graph": "breakable"}},
}
SAMPLED_BATCH = 4
DECISIONS = 4  # random decisions per token, at most: rounding can flip each
CHANCE = 1e-3  # a number of differing sequences less likely than this is not explained by rounding


@dataclass(frozen=True)
class Check:
    """A comparison: the texts of `prompts` (token ids) by one target, up to `max_new_tokens` tokens each."""

    model: Any
    prompts: list[list[int]]
    max_new_tokens: int

    def texts(self, draft: Any, settings: Row, law: SamplingParams | None = None) -> Row:
        """Return `tokens` of every prompt from one engine, with algo, tau and seconds."""
        with attach(self.model, draft, **{"compile": False, **settings}) as engine:
            start = time.perf_counter()
            out = engine.generate(self.prompts, max_new_tokens=self.max_new_tokens, sampling=law)
            seconds = time.perf_counter() - start
            engine.check_integrity()
            algo = engine.report().draft["algo"]
        return {"algo": algo, "tokens": out.tokens, "tau": round(out.stats.tau, 3), "seconds": round(seconds, 1)}

    def greedy(self, draft: Any, settings: Row, batch: int, references: list[list[int]], tie: float = 0.0) -> Row:
        """Compare greedy text at one batch size; where texts diverge, the target's own logits may be `tie` apart."""
        own, num = self.texts(draft, {**settings, "max_batch": batch, "graph_sampling": "greedy"}), len(self.prompts)
        row: Row = {"check": "greedy", "against": "generate", "batch": batch, "compared": num}
        row |= compare_texts(self.model, self.prompts, own.pop("tokens"), references, tie, 4)
        return {**row, "unexplained": num - row["equal"] - (row["near_ties"] if tie else 0), **own}

    def sampled(self, draft: Any, settings: Row, kinds: Mapping[str, Row], law: SamplingParams) -> Iterator[Row]:
        """Compare sampled text of `settings` with that of every kind, with equal seeds."""
        ours = self.texts(draft, settings, law)["tokens"]
        for kind, changes in kinds.items():
            other = self.texts(draft, {**settings, **changes}, law)
            pairs = list(zip(ours, other.pop("tokens"), strict=True))
            differing = sum(one != two for one, two in pairs)
            flips = flip_rate(self.model, self.prompts, ours, law.temperature) if differing else 0.0
            expected = sum(1 - (1 - flips) ** (DECISIONS * len(own)) for own in ours)
            yield {
                "check": "sampled",
                "against": kind,
                "batch": settings["max_batch"],
                "temperature": law.temperature,
                "compared": len(pairs),
                "equal": len(pairs) - differing,
                "first_difference": sorted(first_difference(a, b) for a, b in pairs if a != b),  # tokens
                "flips_per_token": flips,
                "expected_differing": round(expected, 4),
                "unexplained": max(0, differing - most_likely(expected, CHANCE)),
                **other,
            }


def run(
    check: Check,
    drafts: Mapping[str, tuple[Any, str | None]],
    *,
    batches: Sequence[int] = (1, 4),
    temperature: float = 1.0,
    backend: str = "auto",
    **settings: Any,
) -> Iterator[Row]:
    """Yield the rows of every draft and shape: greedy text at each of `batches`, then sampled text unless temperature
    is 0. drafts: by name, draft and algo as `attach` takes them. settings: of every engine."""
    model, prompts, length = check.model, check.prompts, check.max_new_tokens
    references = [reference(model, p, length) for p in tqdm(prompts, desc="model.generate")]
    tie = near_tie(model, prompts, references)
    common = {"backend": backend, "strict": model.device.type == "cuda", **settings}
    common["max_seq_len"] = max(map(len, prompts)) + length
    for name, (draft, algo) in drafts.items():
        for config in CONFIGS:
            if algo == "lookup" and config["topk"] > 1:
                continue  # it drafts chains only
            given = {**common, **config, "algo": algo}
            found = [check.greedy(draft, given, batch, references, tie) for batch in batches]
            if temperature:
                law, kinds = SamplingParams(temperature, seed=0), AGAINST[model.device.type]
                given |= {"max_batch": SAMPLED_BATCH, "graph_sampling": "sampled"}
                found += check.sampled(draft, given, kinds, law)
            yield from ({"draft": name, **config, "backend": backend, **row} for row in found)


def reference(model: Any, prompt: list[int], max_new_tokens: int) -> list[int]:
    """Return the greedy tokens of `model.generate` for one prompt."""
    ids = torch.tensor([prompt], device=model.device)
    mask = torch.ones_like(ids)
    out = model.generate(ids, attention_mask=mask, max_new_tokens=max_new_tokens, do_sample=False)
    return out[0, len(prompt) :].tolist()


def flip_rate(model: Any, prompts: list[list[int]], answers: list[list[int]], temperature: float) -> float:
    """Return the share of sampled tokens that rounding changes: how often one random number draws another token from
    the target's laws under its own two attention implementations, mean over the tokens of 8 answers.

    Tokens are drawn in order of their ids, so a shift of the cumulative law moves every later boundary: among rare
    tokens, whose boundaries are close together, it changes many more draws than the laws differ by.
    """
    shares = []
    for pair in by_both_attentions(model, prompts, answers, most=8):
        one, other = ((logits.double() / temperature).softmax(-1).cumsum(-1) for logits in pair)
        begins = torch.maximum(*(pad(c[..., :-1], (1, 0)) for c in (one, other)))
        alike = (torch.minimum(one, other) - begins).clamp(min=0).sum(-1)
        shares.append((1 - alike).clamp(min=0))
    return float(torch.cat(shares).mean())
