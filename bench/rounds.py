"""Cost of a round, by phase, with and without graphs: `python bench/rounds.py --shape 8b`.

It steps the core, to find causes; `specdec bench latency` measures the latency that users see.

--shape 135m or 8b: random weights of that shape (speed does not depend on them), or --target a real one. Acceptance is
synthetic: position j is accepted with chance 0.8 * 0.75**(j-1). Prompts of 128 tokens; ms are wall clock over rounds
that follow one another, results read by the host. The last line is one JSON object.
"""

import argparse
import json
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

import specdec
from specdec.graphs import FullCapture
from specdec.reach.targets.pretrained import load_pretrained
from specdec.tools.measure.drafts import DraftShape
from specdec.tools.measure.latency.cases import DRAFTS, SAMPLINGS
from specdec.tools.measure.latency.timing import read_trace, traced
from specdec.tools.measure.results import write_results
from specdec.tools.measure.roofline import ShapeFloors
from specdec.tools.measure.shapes import make_head, make_target

PROMPT, NEW_TOKENS = 128, 1800
GROUPS = 5  # timings of which the median counts
MODES: dict[str, dict[str, Any]] = {
    "graph": {"compile": False},
    "compiled": {"compile": True},
    "eager": {"cuda_graph": False},
}
SAMPLED = "3:1:4"  # the one shape that is also timed with sampling


@dataclass(frozen=True)
class Case:
    """One way to speculate at one batch size; kind: of SAMPLINGS."""

    shape: str
    draft: DraftShape
    kind: str
    batch: int

    @property
    def row(self) -> dict[str, Any]:
        """The keys every result row of this case has."""
        drafting = {"steps": self.draft.steps, "topk": self.draft.topk, "draft_tokens": self.draft.width}
        return {"shape": self.shape, "batch": self.batch, **drafting, "tokens": PROMPT, "sampling": self.kind}


def main() -> None:
    """Time every case in every mode; the table comes last."""
    args = _arguments()
    if args.target is None:
        model = make_target(args.shape, "cuda")
    else:
        model = load_pretrained(args.target, dtype=torch.bfloat16, device="cuda")[0]
    head, rows = args.draft or make_head(args.shape, model), []
    kinds = [(text, "greedy") for text in DRAFTS]
    kinds += [] if args.greedy else [(SAMPLED, "sampled"), (SAMPLED, "filtered")]
    for (text, kind), mode in product(kinds, args.modes):
        draft = DraftShape.parse(text)
        settings = {"max_seq_len": 2048, "prefill_graph": "off", "graph_sampling": kind, **draft.settings(imposed=True)}
        settings |= {"max_batch": max(args.batches), "graph_batches": tuple(args.batches), **MODES[mode]}
        engine = specdec.attach(model, head if draft.steps else None, **settings)
        for batch in args.batches:
            rows += time_case(engine, Case(args.shape, draft, kind, batch), mode, args.rounds)
        engine.detach()
        print(json.dumps(rows[-1]), flush=True)
    print_table(rows)
    name = "rounds" if args.modes == list(MODES) else "rounds-" + "-".join(args.modes)
    path = write_results(args.out, name, args.shape, {"target": args.target or "random weights"}, rows)
    print(json.dumps({"file": path.name, "rows": rows}))


def time_case(engine: Any, case: Case, mode: str, num_rounds: int) -> list[dict[str, Any]]:
    """Rows of one case in one mode."""
    ms, tau = round_ms(engine, case, num_rounds)
    what = "round" if case.draft.steps else "plain_step"
    row = {**case.row, "what": what, "mode": mode, "ms": round(ms, 4), "tau": round(tau, 3)}
    row |= {"expected_tau": round(case.draft.imposed_tau, 3)} if case.draft.steps else {}
    if mode == "eager":
        return [row]
    report = engine.report()
    rounds = [r for name, r in report.runners.items() if "prefill" not in name]
    assert all(r["eager"] == 0 and r["replays"] for r in rounds), "rounds must replay"
    row |= {"floor_ms": ShapeFloors(case.shape).round_ms(case.draft.steps)}
    row |= {"graph_mib": round(report.graph_bytes / 2**20, 1), **profile_rounds(engine, case)}
    phases = phase_ms(engine, case).items()
    return [*({**case.row, "what": phase, "mode": mode, "ms": round(t, 4)} for phase, t in phases), row]


@contextmanager
def running(engine: Any, case: Case) -> Iterator[Any]:
    """The engine's core with `case.batch` requests past their prefill."""
    generator = torch.Generator().manual_seed(0)
    vocab = engine._core.target.spec.vocab_size
    prompts = torch.randint(0, vocab, (case.batch, PROMPT), generator=generator).tolist()
    requests = engine.submit(prompts, max_new_tokens=NEW_TOKENS, sampling=SAMPLINGS[case.kind], ignore_eos=True)
    while any(not r.is_prefilled for r in requests):
        engine.step()
    for _ in range(3):
        engine.step()
    torch.cuda.synchronize()
    try:
        yield engine._core
    finally:
        engine.abandon(requests)
        torch.cuda.synchronize()


def round_ms(engine: Any, case: Case, num_rounds: int) -> tuple[float, float]:
    """Median wall-clock ms of a round, the host reading results as it does in `generate`, and tau meanwhile."""
    times = []
    with running(engine, case) as core:
        requests = list(core.scheduler.running)
        for _ in range(GROUPS):
            start = time.perf_counter()
            for _ in range(num_rounds):
                core.step()
            torch.cuda.synchronize()
            times.append(1e3 * (time.perf_counter() - start) / num_rounds)
        assert all(r.is_running for r in requests), "a request ended while it was timed"
        tau = sum(r.acceptance.num_emitted for r in requests) / sum(r.acceptance.num_rounds for r in requests)
    return median(times), tau


@torch.inference_mode()
def phase_ms(engine: Any, case: Case, num_rounds: int = 30) -> dict[str, float]:
    """Median ms of each phase: the round cut into graphs that read one another's outputs where they lie."""
    if not case.draft.steps:
        return {}
    with running(engine, case) as core:
        program, kind, capture = core.round, case.kind, FullCapture(core.device)
        requests = core.scheduler.decoding()
        assert core.scheduler.grow(requests, core.config.tail_reserve * 2 * num_rounds), "num_slots is too small"
        rows = core.launcher.batch_of(requests).rows
        draft = capture.capture(lambda: program.draft(program.batch(kind, rows)))
        verify = capture.capture(lambda: program.verify(program.batch(kind, rows), draft.outputs.tree))
        accept = capture.capture(lambda: program.accept(program.batch(kind, rows), draft.outputs, verify.outputs[0]))
        extend = capture.capture(lambda: program.extend(program.batch(kind, rows), accept.outputs, verify.outputs[1]))
        graphs = {"draft": draft, "verify": verify, "accept": accept, "extend": extend}
        times: dict[str, list[float]] = defaultdict(list)
        for _ in range(num_rounds):
            events = [torch.cuda.Event(enable_timing=True) for _ in range(len(graphs) + 1)]
            torch.cuda._sleep(2_000_000)  # the host gets ahead, so that no launch is waited for
            events[0].record()
            for graph, event in zip(graphs.values(), events[1:], strict=True):
                graph.replay()
                event.record()
            torch.cuda.synchronize()
            for name, a, b in zip(graphs, events, events[1:], strict=False):
                times[name].append(a.elapsed_time(b))
    return {name: median(values) for name, values in times.items()}


def profile_rounds(engine: Any, case: Case, num_rounds: int = 20) -> dict[str, Any]:
    """From a profiler trace of `num_rounds` rounds: graph and kernel launches a round, and the GPU's idle share
    between the graphs of successive rounds, in per cent of the time from one to the next."""

    def rounds() -> None:
        for _ in range(num_rounds):
            core.step()
        torch.cuda.synchronize()

    with running(engine, case) as core:
        events, _ = traced(rounds)
    return read_trace(events, num_rounds)


def print_table(rows: list[dict[str, Any]]) -> None:
    """A line a case: ms by mode, then by phase."""
    modes = list(dict.fromkeys(r["mode"] for r in rows))
    phases = ("draft", "verify", "accept", "extend")
    names = ("batch", "steps", "topk", "draft_tokens", "sampling")
    table = Table("batch", "S", "K", "D", "sampling", *modes, "floor", *phases, "idle %", "launches")
    for key in dict.fromkeys(tuple(r[n] for n in names) for r in rows):
        own = [r for r in rows if tuple(r[n] for n in names) == key]
        whole = {r["mode"]: r for r in own if r["what"] in ("round", "plain_step")}
        graph = whole.get("compiled", whole.get("graph", {}))
        parts = {r["what"]: r["ms"] for r in own if r["mode"] == graph.get("mode")}
        cells = [whole.get(m, {}).get("ms", "-") for m in modes] + [graph.get("floor_ms", "-")]
        cells += [parts.get(p, "-") for p in phases] + [graph.get("idle_percent", "-"), graph.get("launches", "-")]
        table.add_row(*map(str, (*key, *cells)))
    Console(width=170).print(table)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=("135m", "8b"), default="135m")
    parser.add_argument("--target", default=None, help="a real target of that shape; default: random weights")
    parser.add_argument("--draft", default=None, help="its head; default: random weights")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--modes", nargs="+", choices=list(MODES), default=list(MODES))
    parser.add_argument("--greedy", action="store_true", help="leave out sampled rounds")
    parser.add_argument("--rounds", type=int, default=20, help="rounds of one timing; the median of five counts")
    parser.add_argument("--out", type=Path, default=Path("bench/results"))
    return parser.parse_args()


if __name__ == "__main__":
    main()
