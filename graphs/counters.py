"""Counters of every path: how often it replayed, ran eagerly, or was refused, and why."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, field

from specdec.core.batch import ForwardMode


@dataclass
class PathCounters:
    """Counts of one path: `replays` and `eager` runs; `rejects`: reason -> batches that it kept from replaying."""

    replays: int = 0
    eager: int = 0
    rejects: Counter[str] = field(default_factory=Counter)


class Counters:
    """Counters of one engine: `forwards` by mode (those in a replayed graph are replays), `runners` by name."""

    def __init__(self) -> None:
        self.forwards: dict[ForwardMode, PathCounters] = {mode: PathCounters() for mode in ForwardMode}
        self.runners: dict[str, PathCounters] = {}
        self._recorded: Counter[ForwardMode] | None = None

    def count_forward(self, mode: ForwardMode) -> None:
        """Count a forward of `mode` run from Python: as eager, unless it is being recorded."""
        if self._recorded is None:
            self.forwards[mode].eager += 1
        else:
            self._recorded[mode] += 1

    @contextmanager
    def recording(self) -> Iterator[Counter[ForwardMode]]:
        """Count forwards within this context in the Counter it yields, not as live traffic."""
        outer, self._recorded = self._recorded, Counter()
        try:
            yield self._recorded
        finally:
            self._recorded = outer

    @contextmanager
    def ignoring(self) -> Iterator[None]:
        """Count nothing within this context."""
        before = deepcopy((self.forwards, self.runners))
        try:
            yield
        finally:
            self.forwards, self.runners = before

    def count_replay(self, runner: str, forwards: Counter[ForwardMode]) -> None:
        """Count a replay of a graph of `runner` that holds `forwards`."""
        self.runners[runner].replays += 1
        for mode, num in forwards.items():
            self.forwards[mode].replays += num

    def count_eager(self, runner: str, reason: str) -> None:
        """Count an eager run of `runner`, caused by `reason`."""
        self.runners[runner].eager += 1
        self.count_reject(runner, reason)

    def count_reject(self, runner: str, reason: str) -> None:
        """Count a batch that `runner` did not replay for `reason`; other runners take it."""
        self.runners[runner].rejects[reason] += 1
