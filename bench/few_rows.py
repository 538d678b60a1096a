"""What products of a few rows cost on a CPU, by torch's `linear` and as specdec chooses: `python bench/few_rows.py`.

The demo's prompts by plain decoding and by the shipped head, token ids of a chat, prefill included, and transformers'
own `generate` beside them. "linear" has no layer go the other way (see specdec/targets/few_rows.py). Both versions take
turns, in one process. The last line is one JSON object.
"""

import argparse
import json
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch

from specdec import attach
from specdec.commands.choices import draft_of, drafting_of, named_draft
from specdec.commands.demo import PROMPTS
from specdec.measure.results import write_results
from specdec.targets import few_rows
from specdec.targets.pretrained import BUNDLED, load_pretrained
from specdec.text.prompts import chat_ids

LEAST_SIZE = {"linear": 1 << 60, "chosen": few_rows.LEAST_SIZE}


def main() -> None:
    """One row a version and way to draft; "hf" has a row of its own."""
    args = arguments()
    model, tokenizer = load_pretrained(BUNDLED, dtype=torch.float32, device="cpu")
    ids = chat_ids(list(PROMPTS), tokenizer)
    draft = named_draft(None, BUNDLED)
    drafts: dict[str, tuple[Any, ...]] = {"plain": (), "speculative": draft_of(draft)}
    settings = {"plain": {}, "speculative": drafting_of(draft, "cpu", None)}
    texts: dict[str, list[list[int]]] = {}
    speeds: dict[tuple[str, str], list[float]] = {}
    for _ in range(args.turns):
        texts["hf"], seconds = hf(model, ids, args.new_tokens)
        speeds.setdefault(("hf", "linear"), []).append(sum(map(len, texts["hf"])) / seconds)
        for version, least in LEAST_SIZE.items():
            few_rows.LEAST_SIZE = least
            for name, given in drafts.items():
                with attach(model, *given, tokenizer=tokenizer, compile=False, **settings[name]) as engine:
                    engine.generate(ids[:1], max_new_tokens=4)  # warms up
                    start = time.perf_counter()
                    tokens = [engine.generate([one], max_new_tokens=args.new_tokens).tokens[0] for one in ids]
                    seconds = time.perf_counter() - start
                texts[f"{name}, {version}"] = tokens
                speeds.setdefault((name, version), []).append(sum(map(len, tokens)) / seconds)
    rows = [
        {"what": "few_rows", "mode": name, "label": version, "tokenizer": True, "tokens_per_s": round(median(found), 2)}
        for (name, version), found in speeds.items()
    ]
    config = {"new_tokens": args.new_tokens, "turns": args.turns, "threads": torch.get_num_threads()}
    config["equal"] = len({json.dumps(tokens) for tokens in texts.values()}) == 1
    config["each"] = {", ".join(key): [round(speed, 2) for speed in found] for key, found in speeds.items()}
    if args.out:
        write_results(args.out, "few-rows", "135m", config, rows)
    print(json.dumps({**config, "rows": rows}))


def hf(model: Any, ids: list[list[int]], new_tokens: int) -> tuple[list[list[int]], float]:
    """Return what transformers' `generate` emits, and the seconds it takes."""
    start, tokens = time.perf_counter(), []
    for one in ids:
        given = torch.tensor([one])
        out = model.generate(given, attention_mask=torch.ones_like(given), max_new_tokens=new_tokens, do_sample=False)
        tokens.append(out[0, len(one) :].tolist())
    return tokens, time.perf_counter() - start


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--out", type=Path, default=None, help="folder for the result file")
    return parser.parse_args()


if __name__ == "__main__":
    main()
