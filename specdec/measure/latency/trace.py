"""Idle time of the GPU between graphs, read from a profiler's chrome trace."""

import json
import tempfile
from collections import defaultdict
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from torch.profiler import ProfilerActivity, profile

WORK = ("kernel", "gpu_memcpy", "gpu_memset")


def traced(run: Callable[[], Any]) -> tuple[list[dict[str, Any]], Any]:
    """Return the events of a trace of `run`, which waits for the device by itself, and what `run` returned."""
    with tempfile.TemporaryDirectory() as folder:
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as prof:
            out = run()
        path = Path(folder) / "trace.json"
        prof.export_chrome_trace(str(path))
        return json.loads(path.read_text())["traceEvents"], out


def last_launches(events: list[dict[str, Any]], num_rounds: int) -> tuple[list[dict[str, Any]], int]:
    """The part of a trace from the `num_rounds`-th last graph launch on, and how many launches it has.

    The graphs before are the prefill's, which are launched in pieces.
    """
    calls = [e for e in events if e.get("cat") in ("cuda_runtime", "cuda_driver")]
    launches = sorted(e["ts"] for e in calls if "GraphLaunch" in e["name"])[-num_rounds:]
    since = launches[0] if launches else 0.0
    late = {e["args"].get("correlation") for e in calls if e["ts"] >= since}
    work = [e for e in events if e.get("cat") in WORK]
    kept = [e for e in calls if e["ts"] >= since] + [e for e in work if e["args"].get("correlation") in late]
    return kept, max(len(launches), 1)


def read_trace(events: list[dict[str, Any]], num_rounds: int) -> dict[str, Any]:
    """Counts and gaps of a chrome trace in which every round is one graph launch."""
    calls = [e for e in events if e.get("cat") in ("cuda_runtime", "cuda_driver")]
    launches = {e["args"]["correlation"] for e in calls if "GraphLaunch" in e["name"]}
    kernels = [e for e in calls if "LaunchKernel" in e["name"]]
    work: dict[int, list[dict[str, Any]]] = defaultdict(list)
    for e in events:
        if e.get("cat") in WORK and e["args"].get("correlation") in launches:
            work[e["args"]["correlation"]].append(e)
    spans = sorted((min(e["ts"] for e in w), max(e["ts"] + e["dur"] for e in w)) for w in work.values())
    others = sorted(
        (e["ts"], e["ts"] + e["dur"])
        for e in events
        if e.get("cat") in WORK and e["args"].get("correlation") not in launches
    )
    gaps, periods = [], []
    for (start, end), (following, _) in pairwise(spans):
        busy = sum(b - a for a, b in others if end <= a < following)
        gaps.append(following - end - busy)
        periods.append(following - start)
    return {
        "launches": round(len(launches) / num_rounds, 2),
        "kernel_launches": round(len(kernels) / num_rounds, 2),
        "nodes": round(median(len(w) for w in work.values())) if work else 0,
        "idle_percent": round(100 * sum(gaps) / max(sum(periods), 1e-9), 2) if gaps else None,
        "gap_us": round(median(gaps), 1) if gaps else None,
    }
