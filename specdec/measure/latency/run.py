"""A run of `specdec bench latency`: engine by engine, cell by cell, until all is measured or the budget is spent.

ttft: wall clock of a call with one new token. tpot: (time of N new tokens - time of one) / (N - 1), ms per token of
each request; tpot times tau is `round_ms`. Every call has new prompts; EOS is ignored. Medians of three, of `repeats`
where the first token comes soon; single calls where it takes seconds. With random weights (speed does not depend on
them) acceptance is imposed: position j is accepted with chance 0.8 * 0.75**(j-1). With a tokenizer prompts are still
token ids, but text is decoded. `host_ms`: the host's own work per call or per token, without waiting for the device or
replaying graphs. `idle_percent`: idle share of the GPU between rounds at batch 1. `eager`, `why_eager`: how often a
path ran without a graph, and why. `skipped` lists what does not fit the device or the budget. `hf_ttft`, `hf_token`:
transformers' own `generate`, which is measured first, before the model is attached.
"""

import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import product
from statistics import median
from typing import Any

from specdec.api import Engine, attach
from specdec.errors import CapacityError
from specdec.measure.latency.cases import MODES, Cell, Draft, Plan, capacity, split_by_memory
from specdec.measure.latency.hf import hf_rows
from specdec.measure.latency.subject import Subject, free
from specdec.measure.latency.timing import QUICK_S, Call, generate, idle_share
from specdec.measure.roofline import first_floor_ms, token_floor_ms
from specdec.measure.together import of_first

SLOW_S = 3.0  # prompts that take longer are timed once
HF_S = 5.0  # of transformers' own generate, a prompt length: its scans in torch are slow
ALLOWANCE_S = 15.0  # what must be left of the budget before something of unknown length begins

Row = dict[str, Any]


@dataclass
class Run:
    """Rows so far, and what was left out or failed. on_row: is told of each row as it comes."""

    subject: Subject
    plan: Plan
    on_row: Callable[[Row], None]
    rows: list[Row] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    longest_attach: float = 0.0

    def __post_init__(self) -> None:
        self.deadline = time.monotonic() + self.plan.budget

    @property
    def left(self) -> float:
        """Seconds of the budget."""
        return of_first(self.deadline - time.monotonic())

    def time_hf(self) -> None:
        """Add rows of transformers' own `generate` at batch 1, before an engine attaches."""
        lengths = sorted({cell.tokens for group in self.plan.groups for cell in group})
        for tokens in lengths:
            cell = Cell(1, tokens)
            prompt = self.subject.prompts(cell)[0]
            widths = {Draft.parse(text).width for text in self.plan.drafts}
            rows = hf_rows(self.subject.model, prompt, self.plan.new_tokens, min(HF_S, self.left), sorted(widths))
            for row in rows:
                self._add({**self._key("hf", Draft(), cell), **row})
        free(self.subject.device)

    def engines(self) -> Iterator[None]:
        """Measure engine by engine, those of short contexts first; yields after each, so that rows can be written."""
        for group in self.plan.groups:
            for mode in self.plan.modes:
                for draft in map(Draft.parse, self.plan.drafts):
                    self._serve(mode, draft, group)
                    yield

    def _serve(self, mode: str, draft: Draft, group: list[Cell]) -> None:
        """Measure all cells of a group by one engine. One that fails is told of, and the next ones still run."""
        name, subject = f"{mode} {draft}", self.subject
        cells, too_large = of_first(
            split_by_memory(subject.shape, group, self.plan.new_tokens, subject.device, subject.ranks)
        )
        self.skipped += [f"{name}, {cell}: does not fit" for cell in too_large]
        if self.left < self.longest_attach + ALLOWANCE_S:
            self.skipped += [f"{name}, {cell}: budget" for cell in cells]
            return
        engine = None
        try:
            engine = self._attach(mode, draft, cells)
            for cell in cells:
                assert engine is not None
                self._measure(engine, mode, draft, cell)
        except Exception as error:  # whatever it is, it must not cost the rows of the engines that follow
            traceback.print_exc()
            self.failed.append(f"{name}: {type(error).__name__}: {error}")
        finally:
            if engine is not None:
                engine.detach()
            del engine
            free(subject.device)

    def _attach(self, mode: str, draft: Draft, cells: list[Cell]) -> Engine | None:
        """Return an engine for `cells`, the largest of which are dropped until it fits; None where none does."""
        while cells:
            try:
                return self._attached(mode, draft, cells)
            except CapacityError:
                cells.sort(key=lambda c: c.batch * c.tokens)
                self.skipped.append(f"{mode} {draft}, {cells.pop()}: does not fit")
        return None

    def _attached(self, mode: str, draft: Draft, cells: list[Cell]) -> Engine:
        """Attach an engine for `cells`, and add a row of what it took."""
        subject = self.subject
        settings = {**capacity(cells, self.plan.new_tokens), **draft.settings(subject.is_random), **MODES[mode]}
        if not self.plan.every_kind:
            settings["graph_sampling"] = self.plan.samplings
        start = time.perf_counter()
        source, algo = (subject.draft, subject.algo) if draft.steps else (None, None)
        engine = attach(subject.model, source, algo, tokenizer=subject.tokenizer, **settings)
        seconds = time.perf_counter() - start
        self.longest_attach = max(self.longest_attach, of_first(seconds))
        report = engine.report()
        mode = _mode_of(mode, engine)
        row = {**self._key(mode, draft, Cell(engine.config.max_batch, engine.config.max_seq_len)), "what": "attach"}
        row |= {"ms": round(1e3 * seconds), "compile_s": round(report.compile_seconds, 2)}
        row |= {"capture_s": round(report.graph_seconds, 2), "num_graphs": len(report.graphs)}
        row |= {"graph_mib": round(report.graph_bytes / 2**20, 1), "capture": report.capture}
        row["graph_mib_of"] = {name: round(n / 2**20, 1) for name, n in report.graph_bytes_of.items()}
        self._add(row | {"prefill_graph": report.prefill_graph, "backend": report.backend})
        return engine

    def _key(self, mode: str, draft: Draft, cell: Cell) -> Row:
        """Return the keys that every row has."""
        shared: Row = {"tp": self.subject.ranks} if self.subject.ranks > 1 else {}
        if draft.steps and self.subject.is_random and self.subject.algo != "eagle3":
            shared["algo"] = self.subject.algo
        if draft.vocab is not None:
            shared["draft_vocab"] = draft.vocab
        return {
            **shared,
            "label": self.plan.label,
            "shape": self.subject.shape,
            "mode": mode,
            "steps": draft.steps,
            "topk": draft.topk,
            "draft_tokens": draft.width,
            "batch": cell.batch,
            "tokens": cell.tokens,
        }

    def _measure(self, engine: Engine, mode: str, draft: Draft, cell: Cell) -> None:
        """Add the rows of one cell, by how tokens are drawn, with and without the tokenizer."""
        own = self.subject.tokenizer
        for sampling, tokenizer in product(self.plan.samplings, (None,) if own is None else (own, None)):
            engine.tokenizer = tokenizer
            key = {**self._key(_mode_of(mode, engine), draft, cell), "tokenizer": tokenizer is not None}
            key |= {} if sampling == "greedy" else {"sampling": sampling}
            before = _eager_runs(engine)
            for row in self._times(engine, draft, cell, sampling, f"{mode} {draft}, {cell}"):
                why = dict(_eager_runs(engine) - before)
                self._add({**key, **row, "eager": sum(why.values()), "why_eager": why})

    def _times(self, engine: Engine, draft: Draft, cell: Cell, sampling: str, name: str) -> Iterator[Row]:
        """Yield the ttft row and the tpot row, as far as the budget lets them."""
        shape, prompts, most = self.subject.shape, self.subject.prompts, self.plan.repeats
        if self.left < ALLOWANCE_S:
            self.skipped.append(f"{name}: budget")
            return
        one = generate(engine, prompts(cell), 1, sampling).seconds  # not counted: kernels may still have to be loaded
        repeats = most if one < QUICK_S else min(most, 3 if one < SLOW_S else 1)
        if self.left < (repeats + 2) * one:
            self.skipped.append(f"{name}: budget")
            return
        first = [generate(engine, prompts(cell), 1, sampling) for _ in range(repeats)]
        ms, host_ms = _medians(first)
        floor = first_floor_ms(shape, cell.batch, cell.tokens, self.subject.ranks) if self._has_floor else None
        yield {"what": "ttft", "ms": round(ms, 3), "host_ms": self._host(host_ms), "floor_ms": floor}
        num = self.plan.new_tokens
        if not cell.has_tpot:
            return
        if self.left < ALLOWANCE_S + one or self.left < 4 * generate(engine, prompts(cell), num, sampling).seconds:
            self.skipped.append(f"{name}, tpot: budget")
            return
        calls = [generate(engine, prompts(cell), num, sampling) for _ in range(3 if one < SLOW_S else 1)]
        yield self._token_row(calls, draft, cell, ms, host_ms) | (
            self._idle(engine, cell) if sampling == "greedy" else {}
        )

    def _token_row(self, calls: list[Call], draft: Draft, cell: Cell, first_ms: float, first_host_ms: float) -> Row:
        """Return the tpot row of long calls, given the medians of the short ones."""
        (ms, host_ms), tau, num = _medians(calls), median(c.tau for c in calls), self.plan.new_tokens
        a_token, host = (ms - first_ms) / (num - 1), (host_ms - first_host_ms) / (num - 1)
        floor = None
        if self._has_floor:
            context = cell.tokens + num / 2
            case = (self.subject.shape, draft.steps, draft.width, cell.batch, context, tau, self.subject.ranks)
            floor = token_floor_ms(*case, algo=self.subject.algo or "eagle3", vocab=draft.vocab)
        row = {"what": "tpot", "ms": round(a_token, 4), "round_ms": round(a_token * tau, 4), "tau": round(tau, 3)}
        return row | {"host_ms": self._host(host), "floor_ms": floor}

    def _idle(self, engine: Engine, cell: Cell) -> Row:
        """Return the GPU's idle share for the shortest context at batch 1, where the host can be the slower one."""
        is_short = cell.batch == 1 and cell.tokens == min(self.plan.tokens)
        if self.subject.device != "cuda" or not is_short or self.left < ALLOWANCE_S:
            return {}
        try:
            return idle_share(engine, self.subject.prompts(cell)[0])
        except (RuntimeError, OSError, KeyError, ValueError) as error:  # a profiler that fails costs one column
            return {"idle_error": f"{type(error).__name__}: {error}"}

    @property
    def _has_floor(self) -> bool:
        """Whether the bounds on times, those of a GPU and of named shapes, mean something here."""
        return self.subject.device == "cuda" and self.subject.is_random

    def _host(self, ms: float) -> float | None:
        """On a CPU the host is the device."""
        return round(ms, 4) if self.subject.device == "cuda" else None

    def _add(self, row: Row) -> None:
        self.rows.append(row)
        self.on_row(row)


def _medians(calls: list[Call]) -> tuple[float, float]:
    """ms of a call, and of the host's share of it."""
    return 1e3 * median(c.seconds for c in calls), 1e3 * median(c.host_seconds for c in calls)


def _mode_of(mode: str, engine: Engine) -> str:
    """Return a mode's name in rows: "eager" for "graph" where the engine has none, as on a CPU."""
    return "eager" if mode == "graph" and engine.report().capture == "eager" else mode


def _eager_runs(engine: Engine) -> Counter[str]:
    """How often each path has run without its graph, by "path: reason"."""
    runners = engine.report().runners
    return Counter(
        {f"{name}: {why}": n for name, c in runners.items() if c["eager"] for why, n in c["rejects"].items()}
    )
