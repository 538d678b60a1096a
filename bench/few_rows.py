"""What products of a few rows cost on a CPU, by torch's `linear` and as specdec chooses: `python bench/few_rows.py`.

The demo, with transformers' own `generate`, both versions in turns; "linear" has no layer go the other way (see
specdec/targets/few_rows.py). The last line is one JSON object.
"""

import argparse
import json
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch

from specdec import attach
from specdec.commands.choices import draft_of, drafting_of, named_draft
from specdec.commands.demo import PROMPTS, Run, run_engine, run_hf
from specdec.measure.results import write_results
from specdec.targets import few_rows
from specdec.targets.pretrained import BUNDLED, load_pretrained
from specdec.text.prompts import chat_ids

LEAST_SIZE = {"linear": 1 << 60, "chosen": few_rows.LEAST_SIZE}


def main() -> None:
    """One row a version and way to generate."""
    args = arguments()
    model, tokenizer = load_pretrained(BUNDLED, dtype=torch.float32, device="cpu")
    ids, draft = chat_ids(list(PROMPTS), tokenizer), named_draft(None, BUNDLED)
    ways: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {
        "plain": ((), {}),
        "speculative": (draft_of(draft), drafting_of(draft, "cpu", None)),
    }
    runs: dict[tuple[str, str], list[Run]] = {}
    for _ in range(args.turns):
        runs.setdefault(("hf", "linear"), []).append(run_hf(model, ids, args.new_tokens))
        for version, least in LEAST_SIZE.items():
            few_rows.LEAST_SIZE = least
            for name, (given, settings) in ways.items():
                make = partial(attach, model, *given, tokenizer=tokenizer, compile=False, **settings)
                runs.setdefault((name, version), []).append(run_engine(name, make, ids, args.new_tokens))
    speeds = {key: [round(run.tokens_per_s, 2) for run in found] for key, found in runs.items()}
    rows = [
        {"what": "few_rows", "mode": name, "label": version, "tokenizer": True, "tokens_per_s": median(found)}
        for (name, version), found in speeds.items()
    ]
    config = {"new_tokens": args.new_tokens, "turns": args.turns, "threads": torch.get_num_threads()}
    config["equal"] = len({json.dumps(run.tokens) for found in runs.values() for run in found}) == 1
    config["each"] = {", ".join(key): found for key, found in speeds.items()}
    if args.out:
        write_results(args.out, "few-rows", "135m", config, rows)
    print(json.dumps({**config, "rows": rows}))


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--out", type=Path, default=None, help="folder for the result file")
    return parser.parse_args()


if __name__ == "__main__":
    main()
