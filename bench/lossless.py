"""Checks that speculation does not change the text, for every algorithm: `python bench/lossless.py --data DIR`.

DIR holds gsm8k/test.jsonl and prompts/mt_bench.jsonl. Drafts: all that ship, or `--drafts`; chains and trees of each.
Greedy text is compared with `model.generate`: in fp32 every token must be equal; in bf16 each difference is traced and
must be a near-tie of the target's own top two logits. Sampled text, of the same seeds, is compared with the same engine
without graphs and with the torch backend. There a difference begins where rounding moved a law across a random number:
how often that happens is estimated from the target alone, run with two attention implementations, and the check fails
if there are more differences than that makes likely. The last line is one JSON object; rows have `algo` and `check`.
"""

import argparse
import json
import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from specdec import SamplingParams, attach, shipped
from specdec.measure.results import write_results
from specdec.targets.pretrained import BUNDLED, load_pretrained
from specdec.text.prompts import chat_ids, read_questions

CONFIGS: tuple[dict[str, Any], ...] = (
    {"num_steps": 3, "topk": 1},
    {"num_steps": 4, "topk": 4, "num_draft_tokens": 16},
)
# What sampled text is held against, by device: settings that change how a round runs, and nothing of what it says.
AGAINST: dict[str, dict[str, dict[str, Any]]] = {
    "cuda": {"eager": {"cuda_graph": False, "strict": False}, "torch": {"backend": "torch", "strict": False}},
    "cpu": {"recorded": {"cuda_graph": True, "prefill_graph": "breakable"}},
}
NEAR_TIE = 0.25  # logits; bf16 rounds logits of size 16..32 to steps of 0.125
DECISIONS = 4  # random decisions that a token takes, at most: each can be flipped by rounding
CHANCE = 1e-3  # more differing sequences than happen with this probability are not explained by rounding


def main() -> None:
    """Compare, print a line a configuration, and exit 1 if anything differs that rounding does not explain."""
    args = _arguments()
    model, tokenizer = load_pretrained(args.target, dtype=getattr(torch, args.dtype), device=args.device)
    questions = read_questions(args.data / "gsm8k/test.jsonl", args.gsm8k)
    questions += read_questions(args.data / "prompts/mt_bench.jsonl", args.mt_bench)
    prompts = chat_ids(questions, tokenizer)
    references = [reference(model, p, args.max_new_tokens) for p in tqdm(prompts, desc="model.generate")]
    common = {"backend": args.backend, "strict": args.device == "cuda", "tokenizer": tokenizer}
    common["max_seq_len"] = max(map(len, prompts)) + args.max_new_tokens
    rows = []
    file: Path | None = None
    for name in args.drafts:
        draft = shipped.path(name) if name in shipped.available() else name
        for config in CONFIGS:
            found = [
                compare(model, draft, {**common, **config}, batch, prompts, references, args.max_new_tokens)
                for batch in args.batches
            ]
            if args.temperature:
                law = SamplingParams(args.temperature, seed=0)
                settings = {**common, **config, "max_batch": args.sampled_batch, "graph_sampling": "sampled"}
                kinds = AGAINST[torch.device(args.device).type]
                found += compare_sampled(model, draft, settings, kinds, prompts, law, args.max_new_tokens)
            rows += [{"draft": Path(name).name, **config, "backend": args.backend, **row} for row in found]
            for row in rows[-len(found) :]:
                print(row, flush=True)
            if args.out:
                what = f"lossless-{args.backend}-{args.dtype}"
                file = write_results(args.out, what, "135m", {"device": args.device}, rows, file)
    result = {key: sum(r[key] for r in rows) for key in ("compared", "equal", "unexplained")}
    print(json.dumps({**result, "configs": rows}))
    raise SystemExit(1 if result["unexplained"] else 0)


def reference(model: Any, prompt: list[int], max_new_tokens: int) -> list[int]:
    """Greedy tokens of `model.generate` for one prompt."""
    ids = torch.tensor([prompt], device=model.device)
    mask = torch.ones_like(ids)
    out = model.generate(ids, attention_mask=mask, max_new_tokens=max_new_tokens, do_sample=False)
    return out[0, len(prompt) :].tolist()


def compare(
    model: Any,
    draft: Any,
    settings: dict[str, Any],
    batch: int,
    prompts: list[list[int]],
    references: list[list[int]],
    max_new_tokens: int,
) -> dict[str, Any]:
    """Greedy text at one batch size; mismatches are held against the target's own logits."""
    run = texts(model, draft, {**settings, "max_batch": batch, "graph_sampling": "greedy"}, prompts, max_new_tokens)
    gaps = [
        tie_gap(model, prompt, ours, theirs)
        for prompt, ours, theirs in zip(prompts, run.pop("tokens"), references, strict=True)
        if ours != theirs
    ]
    near_ties = sum(g <= NEAR_TIE for g in gaps)
    return {
        "check": "greedy",
        "against": "generate",
        "batch": batch,
        "compared": len(prompts),
        "equal": len(prompts) - len(gaps),
        "near_ties": near_ties,
        "unexplained": len(gaps) - (near_ties if model.dtype != torch.float32 else 0),
        "gaps": [round(g, 4) for g in gaps],
        **run,
    }


def compare_sampled(
    model: Any,
    draft: Any,
    settings: dict[str, Any],
    kinds: dict[str, dict[str, Any]],
    prompts: list[list[int]],
    law: SamplingParams,
    max_new_tokens: int,
) -> list[dict[str, Any]]:
    """Sampled text of `settings` against that of every kind, with equal seeds: request i has seed i."""
    first = texts(model, draft, settings, prompts, max_new_tokens, law)
    rows = []
    for kind, changes in kinds.items():
        run = texts(model, draft, {**settings, **changes}, prompts, max_new_tokens, law)
        pairs = list(zip(first["tokens"], run.pop("tokens"), strict=True))
        differing = sum(ours != theirs for ours, theirs in pairs)
        flips = flip_rate(model, prompts, first["tokens"], law.temperature) if differing else 0.0
        expected = sum(1 - (1 - flips) ** (DECISIONS * len(ours)) for ours, _ in pairs)
        row = {
            "check": "sampled",
            "against": kind,
            "batch": settings["max_batch"],
            "temperature": law.temperature,
            "compared": len(prompts),
            "equal": len(prompts) - differing,
            "first_difference": sorted(_first_difference(a, b) for a, b in pairs if a != b),  # tokens
            "flips_per_token": flips,
            "expected_differing": round(expected, 4),
            "unexplained": max(0, differing - most_likely(expected)),
            **run,
        }
        rows.append(row)
    return rows


def texts(
    model: Any,
    draft: Any,
    settings: dict[str, Any],
    prompts: list[list[int]],
    max_new_tokens: int,
    law: SamplingParams | None = None,
) -> dict[str, Any]:
    """`tokens` of every prompt from one engine, with algo, tau and seconds."""
    engine = attach(model, draft, **settings)
    try:
        start = time.perf_counter()
        out = engine.generate(prompts, max_new_tokens=max_new_tokens, sampling=law)
        seconds = time.perf_counter() - start
        engine.check_integrity()
        algo = engine.report().draft["algo"]
    finally:
        engine.detach()
    return {"algo": algo, "tokens": out.tokens, "tau": round(out.stats.tau, 3), "seconds": round(seconds, 1)}


def most_likely(mean: float) -> int:
    """The count that a Poisson variable of this mean exceeds with a probability below `CHANCE`."""
    count, term = 0, math.exp(-mean)
    below = term
    while 1 - below >= CHANCE and count < 10 * mean + 10:
        count += 1
        term *= mean / count
        below += term
    return count


def _first_difference(ours: Sequence[int], theirs: Sequence[int]) -> int:
    """Index of the first token that differs; the shorter length where one is a beginning of the other."""
    differs = (i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b)
    return next(differs, min(len(ours), len(theirs)))


@torch.inference_mode()
def tie_gap(model: Any, prompt: list[int], ours: list[int], theirs: list[int]) -> float:
    """How far apart, in logits of the target alone, the two tokens are where the outputs first differ."""
    at = _first_difference(ours, theirs)
    if at == min(len(ours), len(theirs)):
        return float("inf")  # one is a beginning of the other: no tie explains that
    ids = torch.tensor([prompt + theirs[:at]], device=model.device)
    logits = model(ids, use_cache=False).logits[0, -1].float()
    return float((logits[ours[at]] - logits[theirs[at]]).abs())


@torch.inference_mode()
def flip_rate(
    model: Any, prompts: list[list[int]], answers: list[list[int]], temperature: float, most: int = 8
) -> float:
    """Share of sampled tokens that rounding changes: the distance (total variation) between the target's laws under two
    attention implementations of its own, mean over the tokens of `most` answers."""
    before, distances = model.config._attn_implementation, []
    for prompt, answer in list(zip(prompts, answers, strict=True))[:most]:
        ids, laws = torch.tensor([prompt + answer], device=model.device), []
        for kind in ("eager", "sdpa"):
            model.set_attn_implementation(kind)
            logits = model(ids, use_cache=False).logits[0, len(prompt) - 1 : -1]
            laws.append((logits.double() / temperature).softmax(-1))
        distances.append((laws[0] - laws[1]).abs().sum(-1) / 2)
    model.set_attn_implementation(before)
    return float(torch.cat(distances).mean())


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder with gsm8k/test.jsonl and prompts/")
    parser.add_argument("--target", default=BUNDLED)
    parser.add_argument("--drafts", nargs="+", default=shipped.available(), help="folders or names")
    parser.add_argument("--gsm8k", type=int, default=50, help="GSM8K test questions")
    parser.add_argument("--mt-bench", type=int, default=10, help="MT-bench questions")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 4], help="batch sizes of the greedy check")
    parser.add_argument("--temperature", type=float, default=1.0, help="of the sampled check; 0 leaves it out")
    parser.add_argument("--sampled-batch", type=int, default=4, help="batch size of the sampled check")
    parser.add_argument("--backend", default="auto", help="attention backend, such as triton or flashinfer")
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, default=None, help="folder for the result file")
    return parser.parse_args()


if __name__ == "__main__":
    main()
