"""Helpers of engine benches: device and drafts, the command line, ms of a launch, and the end of a run."""

import argparse
import json
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch

from specdec.api import Engine
from specdec.tools.measure.results import write_results
from specdec.tools.measure.shapes import acceptance_rates

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DRAFTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "3:1:4": {"num_steps": 3, "synthetic_acceptance": acceptance_rates(3)},
}


def make_parser(doc: str | None) -> argparse.ArgumentParser:
    """Return a command line with the description `doc` and an option for the folder of result files."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=None, help="folder for the result file")
    return parser


def finish(args: argparse.Namespace, what: str, shape: str, rows: list[dict[str, Any]]) -> None:
    """Write `rows` if requested, and print them as one JSON object."""
    if args.out:
        write_results(args.out, what, shape, {**vars(args), "out": None}, rows)
    print(json.dumps({"rows": rows}))


def launch_ms(engine: Engine, prompts: Any, new_tokens: int, **options: Any) -> float:
    """Return the ms of a launch, for the request with the most rounds, without the first token: the median of five
    pairs of calls, since a host's prefills of many requests vary by milliseconds. options: of `generate`."""

    def call(count: int) -> tuple[float, int]:
        start = time.perf_counter()
        out = engine.generate(prompts, max_new_tokens=count, ignore_eos=True, do_sample=False, **options)
        return 1e3 * (time.perf_counter() - start), max(r.acceptance.num_rounds for r in out.requests)

    def pair() -> float:
        first, (ms, rounds) = call(1)[0], call(new_tokens)
        return (ms - first) / rounds

    call(new_tokens)
    return round(median(pair() for _ in range(5)), 4)
