"""Cost of a round, by phase, compared with the same engine without graphs and with HF: `python bench/rounds.py`.

It steps the core, to find causes; `specdec bench latency` measures the latency that users see.

--shape 135m or 8b: random weights of that shape (speed does not depend on them), or --target a real one. Acceptance is
synthetic: position j is accepted with chance 0.8 * 0.75**(j-1). Prompts of 128 tokens; ms are wall clock over rounds
that follow one another, results read by the host. The last line is one JSON object.
"""

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from round_cases import CONFIGS, Case, target_and_head
from round_timing import hf_step_ms, phase_ms, profile_rounds, round_ms

import specdec
from specdec.measure.results import write_results
from specdec.round.graphs import estimate_bytes

MODES: dict[str, dict[str, Any]] = {
    "graph": {"compile": False},
    "compiled": {"compile": True},
    "eager": {"cuda_graph": False},
}
SAMPLED = (3, 1, 4)  # the one shape that is also timed with sampling


def main() -> None:
    """Time every case in every mode; the table comes last."""
    args = _arguments()
    model, head = target_and_head(args.shape, args.target, args.draft)
    rows = (
        [] if args.greedy else [capture_row(model, head, args.shape, c, a) for c in CONFIGS for a in ("cold", "warm")]
    )
    kinds = [(config, "greedy") for config in CONFIGS]
    kinds += [] if args.greedy else [(SAMPLED, kind) for kind in ("sampled", "filtered")]
    for config, kind in kinds:
        rows += time_cases(model, head, [Case(args.shape, batch, *config, kind) for batch in args.batches], args)
        print(json.dumps(rows[-1]), flush=True)
    for batch in args.batches if "eager" in args.modes else ():
        ms = hf_step_ms(model, batch)
        rows.append({**Case(args.shape, batch).row, "what": "plain_step", "mode": "hf generate", "ms": round(ms, 4)})
    print_table(rows)
    name = "rounds" if args.modes == list(MODES) else "rounds-" + "-".join(m.replace(" ", "_") for m in args.modes)
    path = write_results(args.out, name, args.shape, {"target": args.target or "random weights"}, rows)
    print(json.dumps({"file": path.name, "rows": rows}))


def time_cases(model: Any, head: Any, cases: list[Case], args: argparse.Namespace) -> list[dict[str, Any]]:
    """Rows of one way to speculate at several batch sizes, an engine a mode: ms a round, and a phase of graphs."""
    rows = []
    first = cases[0]
    for mode in args.modes:
        batches = {"max_batch": max(args.batches), "graph_batches": tuple(args.batches)}
        engine = specdec.attach(model, head if first.steps else None, **first.settings, **batches, **MODES[mode])
        for case in cases:
            rows += time_case(engine, case, mode, args.rounds)
        engine.detach()
    return rows


def time_case(engine: Any, case: Case, mode: str, num_rounds: int) -> list[dict[str, Any]]:
    """Rows of one case in one mode."""
    ms, tau = round_ms(engine, case, num_rounds)
    what = "plain_step" if case.steps == 0 else "round"
    row = {**case.row, "what": what, "mode": mode, "ms": round(ms, 4), "tau": round(tau, 3)}
    if mode not in ("graph", "compiled"):
        return [row]
    report = engine.report()
    rounds = [r for name, r in report.runners.items() if "prefill" not in name]
    assert all(r["eager"] == 0 and r["replays"] for r in rounds), "rounds must replay"
    row |= {
        "floor_ms": case.floor_ms,
        "graph_mib": round(report.graph_bytes / 2**20, 1),
        **profile_rounds(engine, case),
    }
    phases = phase_ms(engine, case).items()
    return [*({**case.row, "what": phase, "mode": mode, "ms": round(t, 4)} for phase, t in phases), row]


def capture_row(model: Any, head: Any, shape: str, config: tuple[int, int, int], attempt: str) -> dict[str, Any]:
    """What attaching costs with all batches up to 32 and all kinds of sampling captured; cold: kernels are compiled."""
    case = Case(shape, 32, *config)
    settings = {k: v for k, v in case.settings.items() if k != "graph_sampling"}
    torch.cuda.empty_cache()
    start = time.perf_counter()
    engine = specdec.attach(model, head if case.steps else None, max_batch=case.batch, strict=True, **settings)
    seconds = time.perf_counter() - start
    report = engine.report()
    spec = engine._core.target.spec
    guess = estimate_bytes(engine.config, spec.hidden_size, spec.vocab_size, len(spec.layers), 2)
    engine.detach()
    row = {
        **case.row,
        "what": "capture",
        "mode": attempt,
        "num_graphs": len(report.graphs),
        "attach_s": round(seconds, 2),
        "capture_s": round(report.graph_seconds, 2),
        "graph_mib": round(report.graph_bytes / 2**20),
        "estimated_mib": round(guess / 2**20),
    }
    print(json.dumps(row), flush=True)
    return row


def print_table(rows: list[dict[str, Any]]) -> None:
    """A line a case: ms by mode, then by phase."""
    modes = list(dict.fromkeys(r["mode"] for r in rows if r["what"] in ("round", "plain_step")))
    phases = ("draft", "verify", "accept", "extend")
    names = ("steps", "topk", "draft_tokens", "sampling", "batch")
    table = Table("batch", "S", "K", "D", "sampling", *modes, "floor", *phases, "idle %", "launches")
    rows = [r for r in rows if r["what"] != "capture"]
    for key in dict.fromkeys(tuple(r[n] for n in names) for r in rows):
        own = [r for r in rows if tuple(r[n] for n in names) == key]
        whole = {r["mode"]: r for r in own if r["what"] in ("round", "plain_step")}
        graph = whole.get("compiled", whole.get("graph", {}))
        parts = {r["what"]: r["ms"] for r in own if r["mode"] == graph.get("mode")}
        cells = [whole.get(m, {}).get("ms", "-") for m in modes] + [graph.get("floor_ms", "-")]
        cells += [parts.get(p, "-") for p in phases] + [graph.get("idle_percent", "-"), graph.get("launches", "-")]
        steps, topk, width, kind, batch = key
        table.add_row(*map(str, (batch, steps, topk, width, kind, *cells)))
    Console(width=170).print(table)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=("135m", "8b"), default="135m")
    parser.add_argument("--target", default=None, help="a real target of that shape; default: random weights")
    parser.add_argument("--draft", default=None, help="its head; default: random weights")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--modes", nargs="+", choices=list(MODES), default=list(MODES))
    parser.add_argument("--greedy", action="store_true", help="leave out sampled rounds and what captures cost")
    parser.add_argument("--rounds", type=int, default=20, help="rounds of one timing; the median of five counts")
    parser.add_argument("--out", type=Path, default=Path("bench/results"))
    return parser.parse_args()


if __name__ == "__main__":
    main()
