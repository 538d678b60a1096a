"""CUDA graphs of callables: runners (`GraphRunner`) and captures (`Capture`), in buckets of requests or tokens.

Captures callables, whole or in segments; knows neither models nor draft algorithms. A runner is warmed up, captured and
sealed before the first live batch; from then on a batch replays the graph of the smallest bucket that holds it, or runs
eagerly. Both are counted.
"""

import typing

from specdec.core import names_from

if typing.TYPE_CHECKING:
    from specdec.graphs.breakable import BreakableCapture, RecordedBreakable, pick_breakable
    from specdec.graphs.buffers import BufferSpec, StaticBuffers
    from specdec.graphs.building import build, rehearse
    from specdec.graphs.captures import Capture, EagerCapture, FullCapture, RecordedCapture, pick_capture
    from specdec.graphs.counters import Counters, PathCounters
    from specdec.graphs.pool import GraphPool
    from specdec.graphs.prefill import PrefillRunner
    from specdec.graphs.runner import GraphRunner, Setup
    from specdec.graphs.shapes import Decision, ShapeKey, batch_buckets, replayed_sizes, token_buckets
    from specdec.graphs.watch import Change, ChangeKind, Watch

__all__ = [
    "BreakableCapture",
    "BufferSpec",
    "Capture",
    "Change",
    "ChangeKind",
    "Counters",
    "Decision",
    "EagerCapture",
    "FullCapture",
    "GraphPool",
    "GraphRunner",
    "PathCounters",
    "PrefillRunner",
    "RecordedBreakable",
    "RecordedCapture",
    "Setup",
    "ShapeKey",
    "StaticBuffers",
    "Watch",
    "batch_buckets",
    "build",
    "pick_breakable",
    "pick_capture",
    "rehearse",
    "replayed_sizes",
    "token_buckets",
]

_HOMES = ("shapes", "buffers", "counters", "pool", "captures", "breakable", "runner", "prefill", "building", "watch")
__getattr__ = names_from(__name__, __all__, _HOMES)
