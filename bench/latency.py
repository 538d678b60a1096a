"""Latency that users see, through `engine.generate`: `PYTHONPATH=. python bench/latency.py --shape 8b --tokenizer DIR`.

ttft: wall clock of a call with one new token. tpot: (time of 257 new tokens - time of one) / 256, ms per token of each
request; tpot times tau is `round_ms`. Every call has new prompts; EOS is ignored. Medians of three, of seven where the
first token comes soon; single calls where it takes seconds. Weights are random (speed does not depend on them),
acceptance is imposed: position j is accepted with chance 0.8 * 0.75**(j-1). With a tokenizer prompts are still token
ids, but text is decoded. `--modes` names compiled layers or an attention backend.
`host_ms`: the host's own work per call or per token, without waiting for the device or replaying graphs.
`idle_percent`: idle share of the GPU between rounds at batch 1. `skipped` lists what does not fit the device or the
--budget. Results are written after every engine; the last line is one JSON object.

Before and after: run the other checkout's own bench/latency.py with --label before, this one with --label after; then
`python bench/latency.py --compare FILES`.
"""

import argparse
import gc
import json
import sys
import time
import traceback
import warnings
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

import torch
from latency_cases import (
    MODES,
    Cell,
    Draft,
    arguments,
    capacity,
    cells_of,
    first_floor_ms,
    groups_of,
    split_by_memory,
    token_floor_ms,
)
from latency_tables import print_comparison, print_rows
from latency_timing import QUICK_S, Prompts, generate, host_probe_ms, idle_share, silence_others, text_ids
from round_cases import DEVICE, make_head, make_target
from transformers import AutoTokenizer

import specdec
from specdec.measure.results import write_results

SLOW_S = 3.0  # prompts that take longer are timed once
ALLOWANCE_S = 15.0  # what must be left of the budget before something of unknown length begins


def main() -> None:
    """Time every engine that the arguments ask for; exit 1 if one of them failed."""
    args = arguments(__doc__)
    if args.compare:
        print_comparison(args.compare)
        return
    warnings.filterwarnings("ignore", message="synthetic_acceptance is on")
    bench = Bench(args)
    bench.run()
    print_rows(bench.rows)
    print(json.dumps({"file": str(bench.path), "skipped": bench.skipped, "rows": bench.rows}))
    sys.exit(1 if bench.failed else 0)


class Bench:
    """One run: its model and head, its rows so far, and the file they are written to."""

    def __init__(self, args: argparse.Namespace):
        self.args = args
        self.deadline = time.monotonic() + args.budget
        self.rows: list[dict[str, Any]] = []
        self.skipped: list[str] = []
        self.failed: list[str] = []
        self.path: Path | None = None
        self.longest_attach = 0.0
        self.tokenizer = _tokenizer(args.tokenizer)
        self.model = make_target(args.shape, None)
        vocab_size = self.model.get_output_embeddings().weight.shape[0]
        ids = torch.arange(vocab_size) if self.tokenizer is None else text_ids(self.tokenizer, vocab_size)
        if len(ids) < vocab_size:
            silence_others(self.model, ids)
        self.prompts = Prompts(ids)
        self.head = make_head(args.shape, self.model, None, ids)
        self.config = {
            "label": args.label,
            "version": specdec.__version__,
            "host_probe_ms": host_probe_ms(),
            "tokenizer": args.tokenizer,
            "new_tokens": args.new_tokens,
            "every_kind": args.every_kind,
        }
        print(json.dumps(self.config), flush=True)

    @property
    def left(self) -> float:
        """Seconds of the budget."""
        return self.deadline - time.monotonic()

    def run(self) -> None:
        """Engine by engine, those of short contexts first."""
        args = self.args
        for group in groups_of(cells_of(args.batches, args.tokens, args.ttft_tokens)):
            for mode in args.modes:
                for draft in map(Draft.parse, args.drafts):
                    self.serve(mode, draft, group)
                    self.write()

    def serve(self, mode: str, draft: Draft, group: list[Cell]) -> None:
        """All cells of a group by one engine. One that fails is told of, and the next ones still run."""
        name = f"{mode} {draft}"
        cells, too_large = split_by_memory(self.args.shape, group, self.args.new_tokens)
        self.skipped += [f"{name}, {cell}: does not fit" for cell in too_large]
        if not cells:
            return
        if self.left < self.longest_attach + ALLOWANCE_S:
            self.skipped += [f"{name}, {cell}: budget" for cell in cells]
            return
        engine = None
        try:
            while engine is None and cells:
                try:
                    engine = self.attach(mode, draft, cells)
                except specdec.CapacityError:
                    cells.sort(key=lambda c: c.batch * c.tokens)
                    self.skipped.append(f"{name}, {cells.pop()}: does not fit")
            for cell in cells:
                self.rows_of(engine, mode, draft, cell)
        except Exception as error:  # whatever it is, it must not cost the rows of the engines that follow
            traceback.print_exc()
            self.failed.append(f"{name}: {type(error).__name__}: {error}")
        finally:
            if engine is not None:
                engine.detach()
            del engine
            gc.collect()
            if DEVICE == "cuda":
                torch.cuda.empty_cache()

    def attach(self, mode: str, draft: Draft, cells: list[Cell]) -> Any:
        """An engine for `cells`, and a row of what attaching it took."""
        settings = {**capacity(cells, self.args.new_tokens), **draft.settings, **MODES[mode]}
        start = time.perf_counter()
        head = self.head if draft.steps else None
        if not self.args.every_kind:
            settings["graph_sampling"] = "greedy"
        engine = specdec.attach(self.model, head, tokenizer=self.tokenizer, **settings)
        seconds = time.perf_counter() - start
        self.longest_attach = max(self.longest_attach, seconds)
        report = engine.report()
        row = {**self.common(mode, draft, Cell(settings["max_batch"], settings["max_seq_len"])), "what": "attach"}
        row |= {"ms": round(1e3 * seconds), "compile_s": round(report.compile_seconds, 2)}
        self.add({**row, "capture_s": round(report.graph_seconds, 2), "num_graphs": len(report.graphs)})
        return engine

    def common(self, mode: str, draft: Draft, cell: Cell) -> dict[str, Any]:
        """The keys that every row has."""
        return {
            "label": self.args.label,
            "shape": self.args.shape,
            "mode": mode,
            "steps": draft.steps,
            "topk": draft.topk,
            "draft_tokens": draft.width,
            "batch": cell.batch,
            "tokens": cell.tokens,
        }

    def rows_of(self, engine: Any, mode: str, draft: Draft, cell: Cell) -> None:
        """Rows of one cell, without and with the tokenizer."""
        for tokenizer in (None,) if self.tokenizer is None else (None, self.tokenizer):
            engine.tokenizer = tokenizer
            key = {**self.common(mode, draft, cell), "tokenizer": tokenizer is not None}
            before = _eager_runs(engine)
            for row in self.time_cell(engine, draft, cell):
                self.add({**key, **row, "eager": _eager_runs(engine) - before})

    def time_cell(self, engine: Any, draft: Draft, cell: Cell) -> Iterator[dict[str, Any]]:
        """The ttft row and the tpot row, as far as the budget lets them."""
        name = f"{self.rows[-1]['mode']} {draft}, {cell}"
        args, num = self.args, self.args.new_tokens
        if self.left < ALLOWANCE_S:
            self.skipped.append(f"{name}: budget")
            return
        one = generate(engine, self.prompts(cell), 1).seconds  # not counted: kernels may still have to be loaded
        repeats = args.repeats if one < QUICK_S else min(args.repeats, 3 if one < SLOW_S else 1)
        if self.left < (repeats + 2) * one:
            self.skipped.append(f"{name}: budget")
            return
        first = [generate(engine, self.prompts(cell), 1) for _ in range(repeats)]
        ms, host_ms = _medians(first)
        floor = first_floor_ms(args.shape, cell)
        yield {"what": "ttft", "ms": round(ms, 3), "host_ms": _host(host_ms), "floor_ms": floor}
        if not cell.has_tpot:
            return
        if self.left < ALLOWANCE_S + one or self.left < 4 * generate(engine, self.prompts(cell), num).seconds:
            self.skipped.append(f"{name}, tpot: budget")
            return
        calls = [generate(engine, self.prompts(cell), num) for _ in range(3 if one < SLOW_S else 1)]
        (long_ms, long_host_ms), tau = _medians(calls), median(c.tau for c in calls)
        a_token, host = (long_ms - ms) / (num - 1), (long_host_ms - host_ms) / (num - 1)
        row = {"what": "tpot", "ms": round(a_token, 4), "round_ms": round(a_token * tau, 4), "tau": round(tau, 3)}
        row |= {"host_ms": _host(host), "floor_ms": token_floor_ms(args.shape, draft, cell, num, tau)}
        yield row | self.idle(engine, cell)

    def idle(self, engine: Any, cell: Cell) -> dict[str, Any]:
        """Of the shortest context at batch 1, where the host can be the slower one."""
        if DEVICE != "cuda" or cell.batch > 1 or cell.tokens > min(self.args.tokens) or self.left < ALLOWANCE_S:
            return {}
        try:
            return idle_share(engine, self.prompts(cell)[0])
        except (RuntimeError, OSError, KeyError, ValueError) as error:  # a profiler that fails costs one column
            return {"idle_error": f"{type(error).__name__}: {error}"}

    def add(self, row: dict[str, Any]) -> None:
        """Keep a row, and print it for whoever watches."""
        self.rows.append(row)
        print(json.dumps(row), flush=True)

    def write(self) -> None:
        """All rows so far to this run's one file."""
        config = {**self.config, "skipped": self.skipped, "failed": self.failed}
        what = f"latency-{self.args.label}"
        self.path = write_results(self.args.out, what, self.args.shape, config, self.rows, self.path)


def _medians(calls: list[Any]) -> tuple[float, float]:
    """ms of a call, and of the host's share of it."""
    return 1e3 * median(c.seconds for c in calls), 1e3 * median(c.host_seconds for c in calls)


def _host(ms: float) -> float | None:
    """On a CPU the host is the device."""
    return round(ms, 4) if DEVICE == "cuda" else None


def _eager_runs(engine: Any) -> int:
    """How often a path has run without its graph."""
    return sum(runner["eager"] for runner in engine.report().runners.values())


def _tokenizer(source: str | None) -> Any:
    if source is None:
        return None
    if source == "bundled":
        from specdec.targets.pretrained import load_pretrained  # reads the model too: it takes seconds

        return load_pretrained()[1]
    if not Path(source).is_dir():
        raise SystemExit(f"--tokenizer {source!r}: expected 'bundled' or a folder that save_pretrained wrote")
    return AutoTokenizer.from_pretrained(source)


if __name__ == "__main__":
    main()
