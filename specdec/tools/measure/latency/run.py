"""A run of `specdec bench latency`: engine by engine, cell by cell, until all is measured or the budget is spent.

ttft: wall clock of a call with one new token; ttft_hit: of prompts whose K/V the prefix cache has. tpot: (time of N new
tokens - time of one) / (N - 1), ms per token of each request; a call's tpot times its tau is `round_ms`, which at batch
sizes above one includes the wait for the request that takes the most rounds; `launch_ms` is the same time divided by
the rounds of that request. Every call has new prompts; EOS is ignored. Medians of three, of `repeats` if the first
token is fast; single calls if it takes seconds. With random weights (speed does not depend on them) acceptance is
imposed: position j is accepted with chance 0.8 * 0.75**(j-1), drawn anew in every call; `expected_tau` is the mean over
many rounds. With a tokenizer prompts are still token ids, but text is decoded. `host_ms`: the host's own work per call
or per token, without waiting for the device or replaying graphs. `idle_percent`: idle share of the GPU between rounds
at batch 1. `eager`, `why_eager`: how often a path ran without a graph, and why. `skipped` lists cells that do not fit
the device or the budget. `hf_ttft`, `hf_token`: transformers' own `generate`, measured first, before the model is
attached.
"""

import time
import traceback
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count, product
from statistics import median
from typing import Any

from specdec.api import Engine, attach
from specdec.core.errors import CapacityError
from specdec.tools.measure.drafts import DraftShape
from specdec.tools.measure.latency.cases import MODES, Cell, Plan, Timed, capacity, free
from specdec.tools.measure.latency.timing import TimedCall, generate, hf_rows, idle_share, of_first
from specdec.tools.measure.roofline import ShapeFloors

QUICK_S = 0.5  # faster first tokens are timed `repeats` times, slower ones three times
SLOW_S = 3.0  # slower prompts are timed once
HF_S = 5.0  # of transformers' own generate, per prompt length: its scans in torch are slow
ALLOWANCE_S = 15.0  # spare time of the budget, besides the known part, for starting something

Row = dict[str, Any]


@dataclass
class Run:
    """A run so far: its cases, and what was skipped or failed."""

    subject: Timed
    plan: Plan
    skipped: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    longest_attach: float = 0.0

    def __post_init__(self) -> None:
        self.deadline = time.monotonic() + self.plan.budget

    def rows(self, has_hf: bool = False) -> Iterator[Row]:
        """Yield rows as they are measured, engine by engine, short contexts first. has_hf: before an engine attaches,
        also those of transformers' own `generate` at batch 1."""
        drafts = [DraftShape.parse(text) for text in self.plan.drafts]
        for tokens in sorted({cell.tokens for group in self.plan.groups for cell in group}) if has_hf else ():
            prompt, seconds = self.subject.prompts(Cell(1, tokens))[0], min(HF_S, self._left)
            widths = sorted({draft.width for draft in drafts})
            for row in hf_rows(self.subject.model, prompt, self.plan.new_tokens, seconds, widths):
                yield {**self._key("hf", DraftShape(), Cell(1, tokens)), **row}
        free(self.subject.device)
        for group, mode, draft in product(self.plan.groups, self.plan.modes, drafts):
            if draft.steps or "draft_weights" not in MODES[mode]:
                yield from self._serve(mode, draft, list(group))

    @property
    def _left(self) -> float:
        """The seconds left of the budget."""
        return of_first(self.deadline - time.monotonic())

    def _has_time(self, seconds: float, *names: str) -> bool:
        """Return whether the budget has `seconds` left; else record `names` as skipped."""
        has_time = self._left >= seconds + ALLOWANCE_S
        self.skipped += [] if has_time else [f"{name}: budget" for name in names]
        return has_time

    def _serve(self, mode: str, draft: DraftShape, cells: list[Cell]) -> Iterator[Row]:
        """Yield the rows of cells that one engine serves. A failure is recorded, and the next engines still run."""
        name, engine = f"{mode} {draft}", None
        if not self._has_time(self.longest_attach, *(f"{name}, {cell}" for cell in cells)):
            return
        try:
            engine, seconds = self._attach(mode, draft, cells)
            if engine is not None:
                yield self._attach_row(engine, mode, draft, seconds)
                for cell in cells:
                    yield from self._measure(engine, mode, draft, cell)
        except Exception as error:  # no error may cost the rows of the engines that follow
            traceback.print_exc()
            self.failed.append(f"{name}: {type(error).__name__}: {error}")
        finally:
            if engine is not None:
                engine.detach()
            del engine
            free(self.subject.device)

    def _attach(self, mode: str, draft: DraftShape, cells: list[Cell]) -> tuple[Engine | None, float]:
        """Return an engine for `cells`, the largest of which are dropped until it fits, and the seconds of attaching;
        None if none fits."""
        subject, plan = self.subject, self.plan
        source, algo = (subject.draft, subject.algo and subject.algo.partition(":")[0]) if draft.steps else (None, None)
        settings: Row = {**draft.settings(subject.is_random), **MODES[mode], "graph_sampling": plan.samplings}
        settings["tokenizer"] = subject.tokenizer
        while cells:
            start = time.perf_counter()
            try:
                engine = attach(subject.model, source, algo, **settings, **capacity(cells, plan.new_tokens))
            except CapacityError:
                cells.sort(key=lambda c: c.batch * c.tokens)
                self.skipped.append(f"{mode} {draft}, {cells.pop()}: does not fit")
                continue
            seconds = time.perf_counter() - start
            self.longest_attach = max(self.longest_attach, of_first(seconds))
            return engine, seconds
        return None, 0.0

    def _attach_row(self, engine: Engine, mode: str, draft: DraftShape, seconds: float) -> Row:
        report = engine.report()
        key = self._key(_mode_of(mode, engine), draft, Cell(engine.config.max_batch, engine.config.max_seq_len))
        return {
            **key,
            "what": "attach",
            "ms": round(1e3 * seconds),
            "compile_s": round(report.compile_seconds, 2),
            "capture_s": round(report.graph_seconds, 2),
            "num_graphs": len(report.graphs),
            "graph_mib": round(report.graph_bytes / 2**20, 1),
            "capture": report.capture,
            "graph_mib_of": {name: round(n / 2**20, 1) for name, n in report.graph_bytes_of.items()},
            "prefill_graph": report.prefill_graph,
            "backend": report.backend,
        }

    def _key(self, mode: str, draft: DraftShape, cell: Cell) -> Row:
        shared: Row = {"tp": self.subject.ranks} if self.subject.ranks > 1 else {}
        if draft.steps and self.subject.is_random and self.subject.algo != "eagle3":
            shared["algo"] = self.subject.algo
        shared |= {"label": self.plan.label, "shape": self.subject.shape, "mode": mode}
        return {**shared, **draft.row, "batch": cell.batch, "tokens": cell.tokens}

    def _measure(self, engine: Engine, mode: str, draft: DraftShape, cell: Cell) -> Iterator[Row]:
        """Yield the rows of one cell, by kind of sampling, with and without the tokenizer."""
        own = self.subject.tokenizer
        for sampling, tokenizer in product(self.plan.samplings, (None,) if own is None else (own, None)):
            engine.tokenizer = tokenizer
            key = {**self._key(_mode_of(mode, engine), draft, cell), "tokenizer": tokenizer is not None}
            key |= {} if sampling == "greedy" else {"sampling": sampling}
            before = _eager_runs(engine)
            for row in self._times(engine, draft, cell, sampling, f"{mode} {draft}, {cell}"):
                why = dict(_eager_runs(engine) - before)
                yield {**key, **row, "eager": sum(why.values()), "why_eager": why}

    def _times(self, engine: Engine, draft: DraftShape, cell: Cell, sampling: str, name: str) -> Iterator[Row]:
        """Yield the ttft row and the tpot row, as far as the budget allows."""

        runs = count()

        def call(new_tokens: int, prompts: list[list[int]] | None = None) -> TimedCall:
            return generate(engine, prompts or self.subject.prompts(cell), new_tokens, sampling, next(runs))

        if not self._has_time(0.0, name):
            return
        one = call(1).seconds  # not counted: kernels may still have to be loaded
        several = 3 if one < SLOW_S else 1
        repeats = self.plan.repeats if one < QUICK_S else min(self.plan.repeats, several)
        if not self._has_time((repeats + 2) * one - ALLOWANCE_S, name):
            return
        first_ms, first_host, _ = _medians([call(1) for _ in range(repeats)])
        floors, is_gpu, num = self._floors(engine, draft), self.subject.device == "cuda", self.plan.new_tokens
        yield {
            "what": "ttft",
            "ms": round(first_ms, 3),
            "host_ms": round(first_host, 4) if is_gpu else None,  # on a CPU the host is the device
            "floor_ms": floors and floors.first_ms(cell.batch, cell.tokens),
        }
        if engine.config.prefix_cache:
            prompts = self.subject.prompts(cell)
            hit_ms, hit_host, _ = _medians([call(1, prompts) for _ in range(1 + repeats)][1:])
            yield {"what": "ttft_hit", "ms": round(hit_ms, 3), "host_ms": round(hit_host, 4) if is_gpu else None}
        if not cell.has_tpot or not self._has_time(one, f"{name}, tpot"):
            return
        if not self._has_time(4 * call(num).seconds - ALLOWANCE_S, f"{name}, tpot"):
            return
        calls = [call(num) for _ in range(several)]
        ms, host, tau = _medians(calls)
        a_token, context = (ms - first_ms) / (num - 1), cell.tokens + num / 2
        row = {
            "what": "tpot",
            "ms": round(a_token, 4),
            "round_ms": round(median((1e3 * c.seconds - first_ms) * c.tau for c in calls) / (num - 1), 4),
            "launch_ms": round(median((1e3 * c.seconds - first_ms) / c.rounds for c in calls), 4),
            "tau": round(tau, 3),
            "expected_tau": round(draft.imposed_tau, 3) if draft.steps and self.subject.is_random else None,
            "host_ms": round((host - first_host) / (num - 1), 4) if is_gpu else None,
            "floor_ms": floors and floors.token_ms(draft.steps, draft.width, cell.batch, context, tau),
        }
        yield row | (self._idle(engine, cell) if sampling == "greedy" else {})

    def _idle(self, engine: Engine, cell: Cell) -> Row:
        """Return the GPU's idle share for the shortest context at batch 1, where the host is most likely the slower
        one."""
        is_short = cell.batch == 1 and cell.tokens == min(self.plan.tokens)
        if self.subject.device != "cuda" or not is_short or not self._has_time(0.0):
            return {}
        try:
            return idle_share(engine, self.subject.prompts(cell)[0])
        except (RuntimeError, OSError, KeyError, ValueError) as error:  # a failing profiler costs one column
            return {"idle_error": f"{type(error).__name__}: {error}"}

    def _floors(self, engine: Engine, draft: DraftShape) -> ShapeFloors | None:
        """Return lower bounds on times, for GPUs and named shapes."""
        subject = self.subject
        if subject.device != "cuda" or not subject.is_random:
            return None
        num_bytes = 2 if engine.config.draft_weights is None else 1
        return ShapeFloors(subject.shape, subject.ranks, subject.algo or "eagle3", draft.vocab, num_bytes)


def _medians(calls: list[TimedCall]) -> tuple[float, float, float]:
    """ms of a call, ms of the host's share of it, and tau."""
    seconds, host, tau, _ = (median(values) for values in zip(*calls, strict=True))
    return 1e3 * seconds, 1e3 * host, tau


def _mode_of(mode: str, engine: Engine) -> str:
    """Return a mode's name in rows: "eager" for "graph" where the engine has none, as on a CPU."""
    return "eager" if mode == "graph" and engine.report().capture == "eager" else mode


def _eager_runs(engine: Engine) -> Counter[str]:
    """Return how often each path has run without its graph, by "path: reason"."""
    runners = engine.report().runners
    return Counter(
        {f"{name}: {why}": n for name, c in runners.items() if c["eager"] for why, n in c["rejects"].items()}
    )
