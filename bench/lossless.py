"""Greedy speculation against `model.generate`, token for token: `python bench/lossless.py --data DIR`.

DIR holds gsm8k/test.jsonl and prompts/mt_bench.jsonl. In fp32 every token must be equal; in bf16 each difference is
traced: it must be a near-tie of the target's own top two logits. The last line is one JSON object with `compared`
(sequences), `equal` and `configs`.
"""

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from specdec import attach, heads
from specdec.bench import write_results
from specdec.models.pretrained import BUNDLED, load_pretrained
from specdec.prompts import chat_ids, read_questions

CONFIGS: tuple[dict[str, Any], ...] = (
    {"num_steps": 3, "topk": 1},
    {"num_steps": 4, "topk": 4, "num_draft_tokens": 16},
)
NEAR_TIE = 0.25  # logits; bf16 rounds logits of size 16..32 to steps of 0.125


def main() -> None:
    """Compare, print a line a configuration, and exit 1 if anything differs that is no near-tie."""
    args = _arguments()
    dtype = getattr(torch, args.dtype)
    model, tokenizer = load_pretrained(args.target, dtype=dtype, device=args.device)
    questions = read_questions(args.data / "gsm8k/test.jsonl", args.gsm8k)
    questions += read_questions(args.data / "prompts/mt_bench.jsonl", args.mt_bench)
    prompts = chat_ids(questions, tokenizer)
    references = [reference(model, p, args.max_new_tokens) for p in tqdm(prompts, desc="model.generate")]
    rows = []
    for config in CONFIGS:
        for batch in args.batches:
            settings = {**config, "backend": args.backend, "strict": args.device == "cuda"}
            rows.append(
                compare(model, args.draft or heads.path(), settings, batch, prompts, references, args.max_new_tokens)
            )
            print(rows[-1], flush=True)
    result = {
        "compared": sum(r["compared"] for r in rows),
        "equal": sum(r["equal"] for r in rows),
        "near_ties": sum(r["near_ties"] for r in rows),
        "configs": rows,
    }
    if args.out:
        write_results(args.out, f"lossless-{args.backend}-{args.dtype}", "135m", {"device": args.device}, rows)
    print(json.dumps(result))
    unexplained = result["compared"] - result["equal"] - (result["near_ties"] if dtype != torch.float32 else 0)
    raise SystemExit(1 if unexplained else 0)


def reference(model: Any, prompt: list[int], max_new_tokens: int) -> list[int]:
    """Greedy tokens of `model.generate` for one prompt."""
    ids = torch.tensor([prompt], device=model.device)
    mask = torch.ones_like(ids)
    out = model.generate(ids, attention_mask=mask, max_new_tokens=max_new_tokens, do_sample=False)
    return out[0, len(prompt) :].tolist()


def compare(
    model: Any,
    draft: Any,
    config: dict[str, Any],
    batch: int,
    prompts: list[list[int]],
    references: list[list[int]],
    max_new_tokens: int,
) -> dict[str, Any]:
    """One configuration at one batch size; mismatches are held against the target's own logits."""
    engine = attach(model, draft, max_batch=batch, **config)
    start = time.perf_counter()
    out = engine.generate(prompts, max_new_tokens=max_new_tokens)
    seconds = time.perf_counter() - start
    engine.check_integrity()
    engine.detach()
    gaps = [
        tie_gap(model, prompt, ours, theirs)
        for prompt, ours, theirs in zip(prompts, out.tokens, references, strict=True)
        if ours != theirs
    ]
    return {
        **config,
        "batch": batch,
        "compared": len(prompts),
        "equal": len(prompts) - len(gaps),
        "near_ties": sum(g <= NEAR_TIE for g in gaps),
        "gaps": [round(g, 4) for g in gaps],
        "tau": round(out.stats.tau, 3),
        "seconds": round(seconds, 1),
    }


@torch.inference_mode()
def tie_gap(model: Any, prompt: list[int], ours: list[int], theirs: list[int]) -> float:
    """How far apart, in logits of the target alone, the two tokens are where the outputs first differ."""
    at = next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), None)
    if at is None:
        return float("inf")  # one is a beginning of the other: no tie explains that
    ids = torch.tensor([prompt + theirs[:at]], device=model.device)
    logits = model(ids, use_cache=False).logits[0, -1].float()
    return float((logits[ours[at]] - logits[theirs[at]]).abs())


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder with gsm8k/test.jsonl and prompts/")
    parser.add_argument("--target", default=BUNDLED)
    parser.add_argument("--draft", default=None, help="draft folder; default: the shipped head")
    parser.add_argument("--gsm8k", type=int, default=50, help="GSM8K test questions")
    parser.add_argument("--mt-bench", type=int, default=10, help="MT-bench questions")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--backend", default="auto", help="attention backend: auto, triton, torch")
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, default=None, help="folder for the result file")
    return parser.parse_args()


if __name__ == "__main__":
    main()
