"""Counters of every path: how often it replayed, ran eagerly, or was refused, and why."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from specdec.batch import ForwardMode


@dataclass
class PathCounters:
    """One path's life: `replays` and `eager` runs; `rejects`: reason -> eager runs that it caused."""

    replays: int = 0
    eager: int = 0
    rejects: Counter[str] = field(default_factory=Counter)


class Counters:
    """Of one engine: `forwards` by mode (a graph's forwards are replays), `runners` by name."""

    def __init__(self) -> None:
        self.forwards: dict[ForwardMode, PathCounters] = {mode: PathCounters() for mode in ForwardMode}
        self.runners: dict[str, PathCounters] = {}
        self._recorded: Counter[ForwardMode] | None = None

    def count_forward(self, mode: ForwardMode) -> None:
        """A forward of `mode` is run from Python: eagerly, unless it is being recorded."""
        if self._recorded is None:
            self.forwards[mode].eager += 1
        else:
            self._recorded[mode] += 1

    @contextmanager
    def recording(self) -> Iterator[Counter[ForwardMode]]:
        """Within, forwards are no live traffic: they go to what this yields."""
        outer, self._recorded = self._recorded, Counter()
        try:
            yield self._recorded
        finally:
            self._recorded = outer

    def count_replay(self, runner: str, forwards: Counter[ForwardMode]) -> None:
        """A graph of `runner` that holds `forwards` was replayed."""
        self.runners[runner].replays += 1
        for mode, num in forwards.items():
            self.forwards[mode].replays += num

    def count_eager(self, runner: str, reason: str) -> None:
        """`runner` ran its callable itself, for `reason`."""
        self.runners[runner].eager += 1
        self.runners[runner].rejects[reason] += 1
