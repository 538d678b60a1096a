"""GSM8K with and without prefill graphs: `python bench/gsm8k.py --data DIR`, DIR/gsm8k/test.jsonl.

Two checks, each for prefill_graph off, breakable and piecewise. (1) Mean negative log-likelihood (nats per token) of
the gold solutions of all test items, several packed in a prefill: it must change by less than 1e-3. (2) Greedy answers
to the first items: equal in fp32; in bf16 each difference must begin at a near-tie of the target's own top two logits.
Draft heads are attached, so that prefills produce their features. The last line is one JSON object.
"""

import argparse
import json
import re
import time
from pathlib import Path
from random import Random
from typing import Any

import torch
from lossless import NEAR_TIE, tie_gap
from rich.console import Console
from rich.table import Table
from tqdm import tqdm

from specdec import attach, shipped
from specdec.measure.results import write_results
from specdec.targets.pretrained import BUNDLED, load_pretrained
from specdec.text.prompts import chat_ids

MODES: dict[str, dict[str, Any]] = {
    "off": {"prefill_graph": "off"},
    "breakable": {"prefill_graph": "breakable"},
    "piecewise": {"prefill_graph": "piecewise"},
    "piecewise, compiled rounds": {"prefill_graph": "piecewise", "compile": True},
}
MOST_PACKED = 8  # requests of one prefill


def main() -> None:
    """Score and answer in every mode; exit 1 if a check fails."""
    args = _arguments()
    items = [json.loads(line) for line in (args.data / "gsm8k/test.jsonl").read_text("utf-8").splitlines()]
    rows: list[dict[str, Any]] = []
    for name in args.dtypes:
        model, tokenizer = load_pretrained(args.target, dtype=getattr(torch, name), device=args.device)
        gold = gold_ids(items[: args.items], tokenizer)
        prompts = chat_ids([item["question"] for item in items[: args.answers]], tokenizer)
        answers: list[list[int]] | None = None
        for mode in args.modes:
            settings = {"num_steps": 3, "max_batch": 32, "max_seq_len": 1024, "graph_sampling": "greedy"}
            settings["backend"] = args.backend
            engine = attach(model, args.draft or shipped.path(), tokenizer=tokenizer, **settings, **MODES[mode])
            row = {"what": "gsm8k", "dtype": name, "mode": mode, **score(engine, gold, args.seed)}
            start = time.perf_counter()
            out = engine.generate(prompts, max_new_tokens=args.max_new_tokens)
            row["answer_s"] = round(time.perf_counter() - start, 1)
            answers = answers or out.tokens
            gaps = [tie_gap(model, *t) for t in zip(prompts, out.tokens, answers, strict=True) if t[1] != t[2]]
            golden = [item["answer"].split("####")[1].strip() for item in items[: args.answers]]
            correct = sum(last_number(text) == g for text, g in zip(out.texts, golden, strict=True))
            row |= {"answers": len(prompts), "equal": len(prompts) - len(gaps), "gaps": [round(g, 3) for g in gaps]}
            row |= {"near_ties": sum(g <= NEAR_TIE for g in gaps), "correct": correct}
            row["runners"] = engine.report().runners
            rows.append(row)
            print(json.dumps(row), flush=True)
            engine.detach()
    print_table(rows)
    if args.out:
        write_results(args.out, "gsm8k", "135m", {"device": args.device}, rows)
    failed = [problem for row in rows for problem in problems(row, rows)]
    print(json.dumps({"failed": failed, "rows": rows}))
    raise SystemExit(1 if failed else 0)


def problems(row: dict[str, Any], rows: list[dict[str, Any]]) -> list[str]:
    """What is wrong with `row`, held against the one without graphs."""
    base = next(r for r in rows if r["dtype"] == row["dtype"])
    name, found = f"{row['dtype']} {row['mode']}", []
    if abs(row["nll"] - base["nll"]) >= 1e-3:
        found.append(f"{name}: nll {row['nll']} against {base['nll']}")
    explained = row["near_ties"] if row["dtype"] != "float32" else 0
    if row["equal"] + explained < row["answers"]:
        found.append(f"{name}: {row['answers'] - row['equal'] - explained} answers differ")
    replayed = row["runners"]["target_prefill"]["replays"] > 0
    if replayed != (row["mode"] != "off"):
        found.append(f"{name}: prefills replayed: {replayed}")
    return found


def gold_ids(items: list[dict[str, str]], tokenizer: Any) -> list[tuple[list[int], int]]:
    """Ids of every question with its gold solution, and how many of them are the question's."""
    pairs = []
    for item in items:
        question = tokenizer(f"Question: {item['question']}\nAnswer:", add_special_tokens=False)["input_ids"]
        solution = tokenizer(f" {item['answer']}", add_special_tokens=False)["input_ids"]
        pairs.append((question + solution, len(question)))
    return pairs


@torch.inference_mode()
def score(engine: Any, gold: list[tuple[list[int], int]], seed: int) -> dict[str, Any]:
    """Mean NLL of the solutions' tokens, through the engine's own prefill path, and the prefills it took."""
    core, random = engine._core, Random(seed)
    total, num_tokens, rest = 0.0, 0, list(gold)
    progress = tqdm(total=len(rest), desc="nll", leave=False)
    while rest:
        size = random.randint(1, MOST_PACKED)
        batch, rest = rest[:size], rest[size:]
        lens = [len(ids) for ids, _ in batch]
        rows = [core.slot_tables.reserve(n) for n in lens]
        there = torch.tensor(rows, device=core.device)
        core.slot_tables.write(there, torch.from_numpy(core.slot_tables.pages_of(rows)).to(core.device))
        metadata = core.context.backend.metadata.prefill(core.slot_tables.table, there, [0] * len(lens), lens)
        ids = torch.tensor([t for own, _ in batch for t in own], device=core.device)
        hidden, _aux = core.prefill.target(metadata, ids)
        starts = [sum(lens[:i]) for i in range(len(lens))]
        at = [s + i for s, n, (_, asked) in zip(starts, lens, batch, strict=True) for i in range(asked - 1, n - 1)]
        places = torch.tensor(at, device=core.device)
        log_probs = core.target.head(hidden[places]).float().log_softmax(-1)
        total -= float(log_probs.gather(1, ids[places + 1].unsqueeze(1)).double().sum())
        num_tokens += len(at)
        for row in rows:
            core.slot_tables.release(row)
        progress.update(len(batch))
    return {"items": len(gold), "tokens": num_tokens, "nll": round(total / num_tokens, 6)}


def last_number(text: str) -> str | None:
    """The last number of an answer, as GSM8K's gold answers write it."""
    numbers = re.findall(r"-?\d[\d,]*(?:\.\d+)?", text)
    return numbers[-1].rstrip(".") if numbers else None


def print_table(rows: list[dict[str, Any]]) -> None:
    """A line a mode."""
    table = Table(
        "dtype", "mode", "nll", "difference", "prefill replays", "eager", "equal answers", "near-ties", "correct"
    )
    for r in rows:
        base = next(b for b in rows if b["dtype"] == r["dtype"])
        paths = r["runners"]["target_prefill"]
        equal = f"{r['equal']} of {r['answers']}"
        cells = (f"{r['nll']:.6f}", f"{r['nll'] - base['nll']:+.6f}", paths["replays"], paths["eager"], equal)
        table.add_row(r["dtype"], r["mode"], *map(str, (*cells, r["near_ties"], r["correct"])))
    Console(width=150).print(table)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder with gsm8k/test.jsonl")
    parser.add_argument("--target", default=BUNDLED)
    parser.add_argument("--draft", default=None, help="draft folder; default: the shipped head")
    parser.add_argument("--items", type=int, default=1319, help="items whose gold solutions are scored")
    parser.add_argument("--answers", type=int, default=200, help="items that are answered greedily")
    parser.add_argument("--max-new-tokens", type=int, default=256)
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"], choices=("float32", "bfloat16"))
    parser.add_argument("--modes", nargs="+", default=list(MODES), choices=list(MODES))
    parser.add_argument("--backend", default="auto", help="attention backend")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seed", type=int, default=0, help="how many items a prefill packs")
    parser.add_argument("--out", type=Path, default=None, help="folder for the result file")
    return parser.parse_args()


if __name__ == "__main__":
    main()
