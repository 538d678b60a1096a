"""What the prefix cache saves: `PYTHONPATH=. python bench/prefixes.py --out DIR`.

Time to the first token through `engine.generate`, with a tokenizer, with and without the cache: in every turn of a
chat, and of many samples of one prompt (the last of their first tokens). Texts are compared. The last line is one JSON
object.
"""

import argparse
import json
from pathlib import Path
from statistics import median
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from specdec import attach
from specdec.api import Engine
from specdec.commands.choices import draft_of
from specdec.measure.results import write_results
from specdec.outputs import GenerationOutput
from specdec.targets.pretrained import BUNDLED, load_pretrained
from specdec.text.inputs import prompts_to_ids
from specdec.text.prompts import read_questions

HERE = Path(__file__).parent
Turn = list[dict[str, str]]  # the messages up to a question


def main() -> None:
    """The same calls with and without the cache, one after the other, `repeats` times."""
    args = arguments()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    model, tokenizer = load_pretrained(args.target, dtype=dtype, device=device)
    questions = read_questions(args.prompts, args.turns)
    turns = conversation(model, tokenizer, questions, args)
    prompt = prompts_to_ids(turns[-1], tokenizer)[0]
    found: dict[tuple[Any, ...], list[GenerationOutput]] = {}
    for keeps in (False, True) * args.repeats:
        with engine_for(model, tokenizer, args, prefix_cache=keeps) as engine:
            engine.generate([questions[0]], max_new_tokens=4)  # a first run warms up
            engine.clear_prefix_cache()
            for i, turn in enumerate(turns):
                out = engine.generate(turn, max_new_tokens=args.max_new_tokens, do_sample=False)
                found.setdefault(("turn", i + 1, 1, keeps), []).append(out)
            engine.clear_prefix_cache()
            out = engine.generate([prompt] * args.samples, max_new_tokens=8, do_sample=True, seed=0)
            found.setdefault(("samples", len(turns), args.samples, keeps), []).append(out)
    rows = [row_of(*key, outs, found[*key[:3], False]) for key, outs in found.items()]
    print_rows(rows)
    config = {name: value for name, value in vars(args).items() if name not in ("out", "prompts")}
    if args.out:
        write_results(args.out, "prefixes", "135m" if args.target == BUNDLED else "model", config, rows)
    print(json.dumps({"rows": rows}))


def engine_for(model: Any, tokenizer: Any, args: argparse.Namespace, **options: Any) -> Engine:
    """An engine with the draft that is asked for."""
    return attach(model, *draft_of(args.draft), tokenizer=tokenizer, max_batch=args.samples, **options)


def conversation(model: Any, tokenizer: Any, questions: list[str], args: argparse.Namespace) -> list[Turn]:
    """The messages up to every question, with the target's own greedy answers between them."""
    messages: Turn = []
    turns = []
    with engine_for(model, tokenizer, args) as engine:
        for question in questions:
            messages.append({"role": "user", "content": question})
            turns.append(list(messages))
            out = engine.generate(messages, max_new_tokens=args.max_new_tokens, do_sample=False)
            messages.append({"role": "assistant", "content": out.texts[0]})
    return turns


def row_of(
    prompts: str, turn: int, batch: int, keeps: bool, outs: list[GenerationOutput], fresh: list[GenerationOutput]
) -> dict[str, Any]:
    """One result row; fresh: outputs without the cache."""
    ms = median(1e3 * max(r.first_token_s for r in out.requests) for out in outs)
    row = {"what": "ttft", "tokenizer": True, "prompts": prompts, "turn": turn, "batch": batch, "prefix_cache": keeps}
    row |= {"tokens": len(outs[0].requests[0].prompt_ids), "cached_tokens": outs[-1].stats.num_cached_tokens}
    return {**row, "ms": round(ms, 2), "equal": all(out.tokens == fresh[0].tokens for out in outs)}


def print_rows(rows: list[dict[str, Any]]) -> None:
    """A line a turn: without the cache, and with it."""
    table = Table("", "prompt tokens", "cached", "without, ms", "with, ms", "ratio", "equal text")
    for own in (r for r in rows if r["prefix_cache"]):
        same = ("prompts", "turn", "batch")
        (fresh,) = (r for r in rows if not r["prefix_cache"] and all(r[k] == own[k] for k in same))
        name = f"turn {own['turn']}" if own["prompts"] == "turn" else f"{own['batch']} samples"
        cells = (
            own["tokens"],
            own["cached_tokens"],
            fresh["ms"],
            own["ms"],
            f"{fresh['ms'] / own['ms']:.1f}x",
            own["equal"],
        )
        table.add_row(name, *map(str, cells))
    Console(width=120).print(table)


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=Path, default=HERE / "prompts.jsonl", help="the questions of the chat")
    parser.add_argument("--target", default=BUNDLED)
    parser.add_argument("--draft", default="shipped", help="folder, Hub id, 'shipped', 'lookup' or 'none'")
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--max-new-tokens", type=int, default=96)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path, default=None, help="folder for the result file")
    return parser.parse_args()


if __name__ == "__main__":
    main()
