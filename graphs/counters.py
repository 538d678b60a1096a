"""Counters of forward modes and runners: graph replays, eager runs, and batches that could not replay, by reason."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, field

from specdec.core.batch import ForwardMode


@dataclass
class PathCounters:
    """Counts of one forward mode or runner: graph replays, eager runs, and rejects: batches not replayed, by reason."""

    replays: int = 0
    eager: int = 0
    rejects: Counter[str] = field(default_factory=Counter)


class Counters:
    """Counters of one engine: `forwards` by mode (a forward in a replayed graph is a replay), `runners` by name."""

    def __init__(self) -> None:
        self.forwards: dict[ForwardMode, PathCounters] = {mode: PathCounters() for mode in ForwardMode}
        self.runners: dict[str, PathCounters] = {}
        self._recorded: Counter[ForwardMode] | None = None

    def count_forward(self, mode: ForwardMode) -> None:
        """Count a forward of `mode` that runs from Python: as eager, or within `recording` in its Counter."""
        if self._recorded is None:
            self.forwards[mode].eager += 1
        else:
            self._recorded[mode] += 1

    @contextmanager
    def recording(self) -> Iterator[Counter[ForwardMode]]:
        """Count forwards within this context in the Counter it yields, instead of as eager."""
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
        """Count a batch that `runner` did not replay for `reason`, and that other runners take."""
        self.runners[runner].rejects[reason] += 1
