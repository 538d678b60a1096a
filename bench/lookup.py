"""Compares prompt lookup with that of `transformers`: `PYTHONPATH=. python bench/lookup.py --prompts A.jsonl B.jsonl`.

tau and tokens/s, greedy, one prompt at a time, through `engine.generate` and `model.generate`; texts are compared.
Rows `hf` and `plain` draft nothing. bench/repetitive.jsonl holds questions whose answers repeat the question. The
last line is one JSON object.
"""

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from specdec import AcceptanceStats, attach
from specdec.measure.results import write_results
from specdec.targets.pretrained import BUNDLED, load_pretrained
from specdec.text.prompts import chat_ids, read_questions

HERE = Path(__file__).parent


def main() -> None:
    """One engine or way of `generate` after the other over all files."""
    args = arguments()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model, tokenizer = load_pretrained(args.target, dtype=torch.float32, device=device)
    files = {f.stem: chat_ids(read_questions(f, args.limit), tokenizer) for f in args.prompts}
    longest = max(len(p) for prompts in files.values() for p in prompts) + args.max_new_tokens
    rows: list[dict[str, Any]] = []
    texts: dict[str, list[list[int]]] = {}
    for steps in (0, *args.steps):
        lookup = {"prompt_lookup_num_tokens": steps, "max_matching_ngram_size": 4} if steps else {}
        for name, prompts in files.items():
            tokens, seconds = by_hf(model, prompts, args.max_new_tokens, lookup)
            texts.setdefault(name, tokens)
            what = "hf lookup" if steps else "hf"
            rows.append(row_of(what, name, steps, tokens, seconds, None, tokens == texts[name]))
    for steps in (0, *args.steps):
        settings = {"algo": "lookup", "num_steps": steps} if steps else {}
        engine = attach(model, max_batch=1, max_seq_len=longest, graph_sampling="greedy", **settings)
        for name, prompts in files.items():
            engine.generate(prompts[0], max_new_tokens=4)
            start = time.perf_counter()
            outs = [engine.generate(p, max_new_tokens=args.max_new_tokens, do_sample=False) for p in prompts]
            seconds, tokens = time.perf_counter() - start, [out.tokens[0] for out in outs]
            tau = AcceptanceStats().merge([out.stats.acceptance for out in outs]).tau
            what = "lookup" if steps else "plain"
            rows.append(row_of(what, name, steps, tokens, seconds, tau, tokens == texts[name]))
        engine.detach()
    print_rows(rows)
    config = {"target": args.target, "max_new_tokens": args.max_new_tokens, "limit": args.limit}
    write_results(args.out, "lookup", "135m" if args.target == BUNDLED else "model", config, rows)
    print(json.dumps({"rows": rows}))


def by_hf(model: Any, prompts: list[list[int]], max_new_tokens: int, lookup: dict[str, int]) -> tuple[list[Any], float]:
    """New tokens of every prompt and seconds, by `model.generate`."""
    tokens, start = [], time.perf_counter()
    for prompt in prompts:
        ids = torch.tensor([prompt], device=model.device)
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=max_new_tokens, **lookup
        )
        tokens.append(out[0, len(prompt) :].tolist())
    return tokens, time.perf_counter() - start


def row_of(
    what: str, prompts: str, steps: int, tokens: list[list[int]], seconds: float, tau: float | None, equal: bool
) -> dict[str, Any]:
    """One result row; equal: to the text of `generate` without lookup."""
    tok_s = sum(map(len, tokens)) / seconds
    row = {"what": what, "prompts": prompts, "steps": steps, "num_prompts": len(tokens), "tok_s": round(tok_s, 2)}
    return {**row, "tau": None if tau is None else round(tau, 3), "equal": equal}


def print_rows(rows: list[dict[str, Any]]) -> None:
    """A line a way, a column a file: tokens/s and tau."""
    names = list(dict.fromkeys(r["prompts"] for r in rows))
    table = Table("", *names)
    for what, steps in dict.fromkeys((r["what"], r["steps"]) for r in rows):
        own = [r for r in rows if (r["what"], r["steps"]) == (what, steps)]
        taus = [f" (tau {r['tau']})" if r["tau"] else "" for r in own]
        cells = [f"{r['tok_s']}{tau}{'' if r['equal'] else ' differs'}" for r, tau in zip(own, taus, strict=True)]
        table.add_row(f"{what} S={steps}" if steps else what, *cells)
    Console(width=120).print(table)


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=Path, nargs="+", default=[HERE / "repetitive.jsonl"])
    parser.add_argument("--target", default=BUNDLED)
    parser.add_argument("--steps", type=int, nargs="+", default=[3, 6], help="drafted tokens a round")
    parser.add_argument("--limit", type=int, default=None, help="prompts of each file")
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--out", type=Path, default=HERE / "results")
    return parser.parse_args()


if __name__ == "__main__":
    main()
