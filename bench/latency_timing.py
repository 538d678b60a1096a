"""Timing of bench/latency.py: calls of `generate` by the wall clock, the host's part of it, and the GPU's idle share.

It calls only what users call.
"""

import json
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
from latency_cases import Cell
from round_cases import DEVICE
from round_timing import read_trace
from torch.profiler import ProfilerActivity, profile

import specdec
from specdec.graphs import breakable

REPLACEMENT = "\ufffd"  # what half a character decodes to
PROFILED_TOKENS = 64
QUICK_S = 0.5  # first tokens that come sooner are timed `repeats` times, slower ones three times


class Call(NamedTuple):
    """One call of `generate`: all of it, what the host did of that, neither waiting nor launching rounds, and tau."""

    seconds: float
    host_seconds: float
    tau: float


class Prompts:
    """Random prompts of the ids that may be used, never the same twice."""

    def __init__(self, ids: torch.Tensor):
        self.ids = ids
        self._generator = torch.Generator().manual_seed(1)

    def __call__(self, cell: Cell) -> list[list[int]]:
        picks = torch.randint(0, len(self.ids), (cell.batch, cell.tokens), generator=self._generator)
        return self.ids[picks].tolist()


def text_ids(tokenizer: Any, vocab_size: int) -> torch.Tensor:
    """Ids that each decode to text by themselves. A random model says the others as often as any; no real one does."""
    special = set(tokenizer.all_special_ids)
    texts = ((i, tokenizer.decode([i])) for i in range(min(vocab_size, len(tokenizer))) if i not in special)
    return torch.tensor([i for i, text in texts if text.strip() and REPLACEMENT not in text])


@torch.no_grad()
def silence_others(model: Any, ids: torch.Tensor) -> None:
    """Make a random target say nothing but `ids`: the others' logits become 0, and some of `ids` lie above."""
    weight = model.get_output_embeddings().weight
    others = torch.ones(weight.shape[0], dtype=torch.bool, device=weight.device)
    others[ids.to(weight.device)] = False
    weight[others] = 0


def generate(engine: Any, prompts: list[list[int]], new_tokens: int) -> Call:
    """One timed call; what it returns is checked after the clock has stopped."""
    laws = [specdec.SamplingParams(seed=i) for i in range(len(prompts))]  # greedy; the seeds draw imposed acceptance
    _wait()
    with _waits() as waited:
        start = time.perf_counter()
        out = engine.generate(prompts, max_new_tokens=new_tokens, sampling=laws, ignore_eos=True)
        seconds = time.perf_counter() - start
    _wait()
    assert all(len(tokens) == new_tokens for tokens in out.tokens), "a request ended early"
    has_text = any(out.texts)
    assert has_text == (engine.tokenizer is not None), f"text: {has_text}, with tokenizer {engine.tokenizer}"
    return Call(seconds, seconds - sum(waited), out.stats.tau)


def idle_share(engine: Any, prompt: list[int]) -> dict[str, Any]:
    """GPU idle between the rounds of a `generate` call at batch 1, in per cent of the time from one to the next."""
    generate(engine, [prompt], 4)
    with tempfile.TemporaryDirectory() as folder:
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as prof:
            out = engine.generate([prompt], max_new_tokens=PROFILED_TOKENS, ignore_eos=True)
            _wait()
        path = Path(folder) / "trace.json"
        prof.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    found = read_trace(*last_launches(events, out.stats.num_rounds))
    return {"idle_percent": found["idle_percent"], "gap_us": found["gap_us"]}


def last_launches(events: list[dict[str, Any]], num_rounds: int) -> tuple[list[dict[str, Any]], int]:
    """The part of a trace from the `num_rounds`-th last graph launch on, and how many launches it has.

    The graphs before are the prefill's, which are launched in pieces.
    """
    calls = [e for e in events if e.get("cat") in ("cuda_runtime", "cuda_driver")]
    launches = sorted(e["ts"] for e in calls if "GraphLaunch" in e["name"])[-num_rounds:]
    since = launches[0] if launches else 0.0
    late = {e["args"].get("correlation") for e in calls if e["ts"] >= since}
    work = [e for e in events if e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    kept = [e for e in calls if e["ts"] >= since] + [e for e in work if e["args"].get("correlation") in late]
    return kept, max(len(launches), 1)


def host_probe_ms() -> float:
    """Median ms of a fixed piece of work of the kind a host does in a round: tells machines apart."""
    times = []
    for _ in range(7):
        start = time.perf_counter()
        total, x = 0, torch.zeros(4)
        for i in range(100_000):
            total += i & 7
        for _ in range(1000):
            x = x + 1
        times.append(1e3 * (time.perf_counter() - start))
    return round(median(times), 2)


def _wait() -> None:
    if DEVICE == "cuda":
        torch.cuda.synchronize()


@contextmanager
def _waits() -> Iterator[list[float]]:
    """Seconds of every wait for the device and of every graph launch while open; nothing is known of them on a CPU."""
    seconds: list[float] = []
    if DEVICE != "cuda":
        yield seconds
        return
    # A prefill's segments are replayed as one, the attention between them included.
    places = [(torch.cuda.Event, "synchronize"), (torch.cuda, "synchronize"), (torch.cuda.CUDAGraph, "replay")]
    places.append((breakable._Segmented, "replay"))
    before = [(owner, name, getattr(owner, name)) for owner, name in places]
    for owner, name, call in before:
        setattr(owner, name, _timed(call, seconds))
    try:
        yield seconds
    finally:
        for owner, name, call in before:
            setattr(owner, name, call)


def _timed(call: Callable[..., Any], seconds: list[float]) -> Callable[..., Any]:
    def timed(*args: Any, **kwargs: Any) -> Any:
        start = time.perf_counter()
        try:
            return call(*args, **kwargs)
        finally:
            seconds.append(time.perf_counter() - start)

    return timed
