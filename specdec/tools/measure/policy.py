"""Measures num_steps="auto" beside plain decoding and every fixed shape: tokens/s at an imposed acceptance, or at the
draft's own on given prompts.

Plain decoding has its own engine; the shapes and their policy share one. All requests of a cell decode together, with
prompts from the prefix cache; the clock runs until the first of them ends.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import geometric_mean
from typing import Any

import torch

from specdec.api import Engine, attach
from specdec.core.config import AUTO
from specdec.core.sampling_params import SamplingParams
from specdec.tools.measure.latency.cases import Cell, Timed, free
from specdec.tools.measure.roofline import wait

Row = dict[str, Any]
Prompts = Mapping[int | str, list[list[int]]]  # token ids, by their length or by their file


@dataclass(frozen=True)
class Grid:
    """Cells: batch and context (a key of the prompts) x acceptance, as tau of the longest chain; a cell of several taus
    drifts, and () imposes nothing.

    taus: each a tuple that a text goes through twice, `drift` tokens each. new_tokens: per request in other runs; a
    single request emits four times as many; repeats: runs of each way.
    """

    cells: tuple[tuple[int, int | str], ...]
    taus: tuple[tuple[float, ...], ...]
    new_tokens: int
    drift: int = 64
    repeats: int = 1

    def num_tokens(self, batch: int, taus: Sequence[float]) -> int:
        """Return the tokens that each request emits in a run."""
        return 2 * len(taus) * self.drift if len(taus) > 1 else self.new_tokens * max(1, 4 // batch)

    def capacity(self, prompts: Prompts) -> dict[str, Any]:
        """Return settings of `attach` for an engine that holds each of the cells, and the given prompts to keep."""
        most = {b: max(self.num_tokens(b, taus) for taus in self.taus) for b, _ in self.cells}
        reach = {(b, c): max(map(len, prompts[c])) + most[b] for b, c in self.cells}
        kept = sum(len(ids) for c, own in prompts.items() if isinstance(c, str) for ids in own)
        slots = max(b * (tokens + 96) for (b, _), tokens in reach.items()) + kept
        return {
            "max_batch": max(most),
            "graph_batches": tuple(most),
            "max_seq_len": max(reach.values()),
            "num_slots": slots,
        }


def rates_of(tau: float, steps: int) -> list[float]:
    """Return shares p, p**2, .. of rounds in which position 1, 2, .. `steps` is accepted, with 1 + their sum = tau."""
    low, high = 0.0, 1.0
    for _ in range(50):
        p = (low + high) / 2
        low, high = (p, high) if sum(p**j for j in range(steps + 1)) < tau else (low, p)
    return [low**j for j in range(1, steps + 1)]


def measure_policy(subject: Timed, grid: Grid, prompts: Prompts | None = None, **settings: Any) -> Iterator[Row]:
    """Yield a row for each cell, then one of all: ratios of "auto" to plain decoding and to the best fixed shape.

    prompts: of given texts, by the names that cells have for contexts; else they are random, of so many tokens.
    settings: of the engine that picks shapes.
    """
    if prompts is None:
        largest = {int(c): max(b for b, other in grid.cells if other == c) for _, c in grid.cells}
        prompts = {context: subject.prompts(Cell(batch, context)) for context, batch in largest.items()}
    capacity = {**grid.capacity(prompts), "graph_sampling": "greedy", "prefix_cache": True}
    plain: dict[tuple[int, int | str, int], float] = {}  # by length of texts, since longer ones cost more
    with attach(subject.model, None, None, **capacity) as engine:
        for batch, context, own in _kept(engine, grid, prompts):
            for length, taus in {grid.num_tokens(batch, taus): taus for taus in grid.taus}.items():
                plain[batch, context, length] = _runs(engine, own, batch, grid, taus)
    free(subject.device)
    given = {"num_steps": AUTO, **settings, **capacity}
    if any(grid.taus):
        rates = rates_of(max(grid.taus[0]), max(settings.get("auto_steps", (5,))))
        given["synthetic_acceptance"] = rates
    rows = []
    with attach(subject.model, subject.draft, subject.algo, **given) as engine:
        for batch, context, own in _kept(engine, grid, prompts):
            for taus in grid.taus:
                alone = plain[batch, context, grid.num_tokens(batch, taus)]
                rows.append(_cell(engine, own, batch, grid, taus, alone))
                case = {"batch": batch, "prompts" if isinstance(context, str) else "context": context}
                yield {"what": "policy", "shape": subject.shape, **case, **rows[-1]}
    yield {"what": "policy_summary", "shape": subject.shape, **_summary(rows)}


def _kept(engine: Engine, grid: Grid, prompts: Prompts) -> Iterator[tuple[int, int | str, list[list[int]]]]:
    """Yield batch, context and prompts of each cell, after caching these prompts: else requests that decode beside long
    prefills would end before the clock starts."""
    for batch, context in grid.cells:
        own = prompts[context] if isinstance(context, str) else prompts[context][:batch]
        engine.generate(own, max_new_tokens=1, ignore_eos=True)
        yield batch, context, own


def _cell(
    engine: Engine, prompts: Sequence[list[int]], batch: int, grid: Grid, taus: tuple[float, ...], plain: float
) -> Row:
    """Return a cell's row: tokens/s of each way, ratios, and the share of rounds in which "auto" had each shape."""
    tiers = engine._attached().launcher.tiers
    names, fixed = list(map(str, tiers.shapes)), {}
    if len(taus) < 2:
        _run(engine, prompts, batch, grid, taus)  # not counted: the policy comes from the last cell, and settles
    before = _rounds(engine)
    for i, name in [(None, AUTO), *enumerate(names)]:
        tiers.fixed = i
        fixed[name] = plain if i == 0 else _runs(engine, prompts, batch, grid, taus)
        if i is None:
            played = {name: num - before[name] for name, num in _rounds(engine).items()}
    tiers.fixed = None
    own = fixed.pop(AUTO)
    return {
        "accepts": "/".join(f"{tau:g}" for tau in taus) or "what the draft gets",
        "tokens_per_s": round(own, 1),
        "plain_tokens_per_s": round(plain, 1),
        "best": max(fixed, key=fixed.__getitem__),
        "of_plain": round(own / plain, 3),
        "of_best": round(own / max(fixed.values()), 3),
        "of_each": {name: round(own / other, 3) for name, other in fixed.items()},
        "rounds": {name: num / max(sum(played.values()), 1) for name, num in played.items()},
    }


def _summary(rows: Sequence[Row]) -> Row:
    """Return the worst cells, and the geometric mean over all cells of the ratio to each fixed shape."""
    means = {name: round(geometric_mean([r["of_each"][name] for r in rows]), 3) for name in rows[0]["of_each"]}
    return {
        "cells": len(rows),
        "least_of_plain": min(r["of_plain"] for r in rows),
        "least_of_best": min(r["of_best"] for r in rows),
        "mean_of_each": means,
    }


def _rounds(engine: Engine) -> dict[str, int]:
    return {name: tier["rounds"] for name, tier in engine.report().policy["tiers"].items()}


def _runs(engine: Engine, prompts: Sequence[list[int]], batch: int, grid: Grid, taus: tuple[float, ...]) -> float:
    """Return tokens/s over `grid.repeats` runs."""
    runs = [_run(engine, prompts, batch, grid, taus, run) for run in range(grid.repeats)]
    return sum(tokens for tokens, _ in runs) / sum(seconds for _, seconds in runs)


def _run(
    engine: Engine, prompts: Sequence[list[int]], batch: int, grid: Grid, taus: tuple[float, ...], run: int = 0
) -> tuple[int, float]:
    """Return the tokens and seconds from when all requests decode until the first one ends. Acceptance moves through
    `taus` with the mean length of texts, and is drawn anew in every run; each run takes the next prompts."""
    asked = [prompts[(run * batch + i) % len(prompts)] for i in range(batch)]
    laws = [SamplingParams(seed=1000 * run + i) for i in range(batch)]  # imposed acceptance is drawn by them
    length = grid.num_tokens(batch, taus)
    requests = engine.submit(asked, max_new_tokens=length, sampling=laws, ignore_eos=True)
    while not all(r.tokens for r in requests):
        engine.step()
    wait(engine.target_module.device.type)
    start, first, at = time.perf_counter(), sum(len(r.tokens) for r in requests), -1
    while all(r.finish_reason is None for r in requests):
        num = sum(len(r.tokens) for r in requests)
        if taus and at != (at := num // (grid.drift * batch) % len(taus)):
            _impose(engine, taus[at])
        engine.step()
    seconds, tokens = time.perf_counter() - start, sum(len(r.tokens) for r in requests) - first
    engine.abandon(requests)
    while engine.step():
        pass
    return tokens, seconds


def _impose(engine: Engine, tau: float) -> None:
    """Impose an acceptance at which chains of the longest tier have that tau."""
    rates = engine._attached().round.rates
    if rates is not None:
        rates.copy_(torch.tensor(rates_of(tau, len(rates)), dtype=rates.dtype))
