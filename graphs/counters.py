"""Counters of every forward path: how often it replayed, ran eagerly, or was refused, and why."""

from collections import Counter
from dataclasses import dataclass, field

from specdec.batch import ForwardMode


@dataclass
class PathCounters:
    """One forward mode's life. The runner of the path adds; `Engine.report()` reads."""

    replays: int = 0
    eager: int = 0
    rejects: Counter[str] = field(default_factory=Counter)


class Counters:
    """A PathCounters for every mode of one engine."""

    def __init__(self) -> None:
        self.paths: dict[ForwardMode, PathCounters] = {
            mode: PathCounters() for mode in ForwardMode if mode is not ForwardMode.IDLE
        }

    def __getitem__(self, mode: ForwardMode) -> PathCounters:
        return self.paths[mode]

    def count_eager(self, mode: ForwardMode) -> None:
        """A forward of `mode` ran eagerly."""
        self.paths[mode].eager += 1
