"""Tokens/s of GSM8K questions by how the shipped EAGLE-3 head drafts: `python bench/drafting.py --prompts FILE`.

A row a drafting: "default" names nothing to `attach`, the others S:K:D. Chats as text in and out through `generate`, in
bf16 on CUDA: one question at a time (`tok_s`; `ttft_ms`: median of calls with one new token), and eight at once
(`tok_s_8`). The last line is one JSON object.
"""

import argparse
import json
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch

from specdec import Engine, attach, shipped
from specdec.measure.latency.cases import Draft
from specdec.measure.results import write_results
from specdec.targets.pretrained import load_pretrained
from specdec.text.prompts import read_questions

WARM = 3  # questions that are not timed
MOST = 256  # tokens of an answer


def main() -> None:
    """One engine a drafting."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=Path, required=True, help="JSON lines, such as gsm8k/test.jsonl")
    parser.add_argument("--limit", type=int, default=16, help="questions timed")
    parser.add_argument("--draftings", nargs="+", default=["default", "plain", "3:1:4", "5:1:6", "5:4:24", "6:8:64"])
    parser.add_argument("--out", type=Path, default=None, help="folder for the result file")
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    target, tokenizer = load_pretrained(dtype=torch.bfloat16 if device == "cuda" else torch.float32)
    chats = [[{"role": "user", "content": q}] for q in read_questions(args.prompts, args.limit + WARM)]
    rows = []
    for name in args.draftings:
        draft = Draft() if name == "default" else Draft.parse(name)
        head = None if name == "plain" else shipped.path()
        start = time.perf_counter()
        engine = attach(target.to(device), head, tokenizer=tokenizer, max_seq_len=1024, **draft.settings(imposed=False))
        row = {"what": name, "attach_s": round(time.perf_counter() - start, 2), **measure(engine, chats)}
        config = engine.config
        row |= {"steps": config.num_steps, "topk": config.topk, "draft_tokens": config.num_draft_tokens}
        rows.append(row)
        print(json.dumps(row), flush=True)
        engine.detach()
    if args.out:
        write_results(args.out, "drafting", "135m", vars(args), rows)
    print(json.dumps({"rows": rows}))


def measure(engine: Engine, chats: list[Any]) -> dict[str, Any]:
    """Speeds of one engine."""
    engine.generate(chats[:WARM], max_new_tokens=64)
    engine.generate(chats[:1], max_new_tokens=64)
    timed = chats[WARM:]
    calls = [timing(engine, [chat], MOST) for chat in timed]
    tokens, seconds, rounds = (sum(part) for part in zip(*calls, strict=True))
    eight, took, _ = timing(engine, timed[:8], MOST)
    first = median(timing(engine, [chat], 1)[1] for chat in timed)
    found = {"tok_s": round(tokens / seconds, 1), "tau": round(tokens / rounds, 3), "tok_s_8": round(eight / took, 1)}
    return found | {"ttft_ms": round(1000 * first, 3)}


def timing(engine: Engine, chats: list[Any], most: int) -> tuple[int, float, int]:
    """Tokens, seconds and rounds of one call."""
    start = time.perf_counter()
    out = engine.generate(chats, max_new_tokens=most)
    return sum(map(len, out.tokens)), time.perf_counter() - start, out.stats.num_rounds


if __name__ == "__main__":
    main()
