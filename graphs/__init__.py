"""CUDA graphs: what runs (`GraphRunner`) × how it is captured (`Capture`), in buckets of requests.

Captures callables; knows neither models nor draft algorithms. A runner is warmed up, captured and sealed before the
first live batch; from then on a batch replays the smallest bucket that holds it, or runs eagerly and is counted.
"""

from specdec.graphs.buffers import BufferSpec, StaticBuffers
from specdec.graphs.build import build
from specdec.graphs.captures import Capture, EagerCapture, FullCapture, RecordedCapture, pick_capture
from specdec.graphs.counters import Counters, PathCounters
from specdec.graphs.runner import GraphRunner, Setup
from specdec.graphs.shapes import Decision, ShapeKey, batch_buckets

__all__ = [
    "BufferSpec",
    "Capture",
    "Counters",
    "Decision",
    "EagerCapture",
    "FullCapture",
    "GraphRunner",
    "PathCounters",
    "RecordedCapture",
    "Setup",
    "ShapeKey",
    "StaticBuffers",
    "batch_buckets",
    "build",
    "pick_capture",
]
