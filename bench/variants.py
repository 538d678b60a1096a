"""Times engines with one thing changed at a time: `python bench/variants.py --shape 8b --out DIR`.

A row a draft and a variant, in one process: seconds of attach, ms of first tokens and of rounds. "base" is as it is;
"nopdl" launches every kernel after the one before has ended; "undivided" launches a whole prefill at once; "chunk128"
and the like split keys in pieces of at least as many. Through `generate`, acceptance imposed. For finding causes. The
last line is one JSON object.
"""

import argparse
import json
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch

from specdec import Engine, attach
from specdec.backends.triton import relaunch
from specdec.backends.triton.backend import TritonBackend
from specdec.measure.latency.cases import Draft
from specdec.measure.results import write_results
from specdec.measure.shapes import make_head, make_target
from specdec.prefill import whole

CONTEXTS = {"round_ms": 128, "round_2k_ms": 2040}  # prompt tokens
FIRST_TOKENS = (128, 512, 2048)
NEW_TOKENS = 257
NAMED = ("base", "nopdl", "undivided")
PARTS = whole.PARTS


def main() -> None:
    """One engine a draft and a variant."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="135m", help="random weights of 135m, 8b or tiny")
    parser.add_argument("--drafts", nargs="+", default=["3:1:4", "5:8:32"], help="S:K:D")
    parser.add_argument("--variants", nargs="+", default=[*NAMED, "chunk64", "chunk128", "chunk256"])
    parser.add_argument("--out", type=Path, default=None, help="folder for the result file")
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    target, rows = make_target(args.shape, device), []
    head = make_head(args.shape, target)
    for text in args.drafts:
        draft = Draft.parse(text)
        for variant in args.variants:
            apply(variant)
            settings = {**draft.settings(imposed=True), "graph_sampling": ("greedy",), "max_batch": 1}
            start = time.perf_counter()
            engine = attach(target, head, max_seq_len=2560, prefill_buckets=FIRST_TOKENS, **settings)
            row = {"shape": args.shape, "steps": draft.steps, "topk": draft.topk, "draft_tokens": draft.width}
            row |= {"variant": variant, "attach_s": round(time.perf_counter() - start, 2)}
            rows.append({**row, **measure(engine)})
            print(json.dumps(rows[-1]), flush=True)
            engine.detach()
    if args.out:
        write_results(args.out, "variants", args.shape, vars(args), rows)
    print(json.dumps({"rows": rows}))


def apply(variant: str) -> None:
    """Change what engines that follow are made of."""
    if variant not in NAMED and not variant.removeprefix("chunk").isdecimal():
        raise SystemExit(f"--variants {variant!r}: expected {', '.join(NAMED)} or chunkN")
    relaunch.PDL = variant != "nopdl"
    whole.PARTS = () if variant == "undivided" else PARTS
    TritonBackend.min_chunk = int(variant.removeprefix("chunk")) if variant.startswith("chunk") else None


def measure(engine: Engine) -> dict[str, Any]:
    """ms of first tokens, and of a round after prompts of each of CONTEXTS."""
    found: dict[str, Any] = {}
    for num_tokens in FIRST_TOKENS:
        call(engine, num_tokens, 1)
        found[f"ttft_{num_tokens}_ms"] = round(median(call(engine, num_tokens, 1)[0] for _ in range(15)), 3)
    for name, num_tokens in CONTEXTS.items():
        call(engine, num_tokens, NEW_TOKENS)
        first = median(call(engine, num_tokens, 1)[0] for _ in range(7))
        ms, tau = sorted(call(engine, num_tokens, NEW_TOKENS) for _ in range(5))[2]
        found[name] = round((ms - first) / (NEW_TOKENS - 1) * tau, 4)
    return found


def call(engine: Engine, num_tokens: int, new_tokens: int) -> tuple[float, float]:
    """ms of a call with a prompt never seen before, and its tau."""
    prompt = torch.randint(5, 90, (num_tokens,)).tolist()
    start = time.perf_counter()
    out = engine.generate([prompt], max_new_tokens=new_tokens, ignore_eos=True)
    return 1000 * (time.perf_counter() - start), out.stats.tau


if __name__ == "__main__":
    main()
