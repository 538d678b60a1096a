"""Timing of `specdec bench latency`: calls of `generate`, the host's part of them, the GPU's idle share.

It calls only what users call.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from statistics import median
from typing import Any, NamedTuple

import torch

from specdec.api import Engine
from specdec.engine.ranks import Ranks
from specdec.functional.sampling import SamplingParams
from specdec.graphs import breakable
from specdec.measure.latency.trace import last_launches, read_trace, traced
from specdec.measure.together import of_first

PROFILED_TOKENS = 64
SAMPLINGS = {
    "greedy": SamplingParams(),
    "sampled": SamplingParams(temperature=1.0),
    "filtered": SamplingParams(temperature=1.0, top_k=50, top_p=0.9),
}
QUICK_S = 0.5  # first tokens that come sooner are timed `repeats` times, slower ones three times


class Call(NamedTuple):
    """One call of `generate`: all of it, what the host did of that, neither waiting nor launching rounds, and tau."""

    seconds: float
    host_seconds: float
    tau: float


def generate(engine: Engine, prompts: list[list[int]], new_tokens: int, sampling: str = "greedy") -> Call:
    """Time one call, by a law of SAMPLINGS; what it returns is checked after the clock has stopped."""
    law = SAMPLINGS[sampling]
    laws = [replace(law, seed=i) for i in range(len(prompts))]  # the seeds draw imposed acceptance, too
    device = engine.target_module.device.type
    wait(device)
    with _waits(device) as waited:
        start = time.perf_counter()
        out = engine.generate(prompts, max_new_tokens=new_tokens, sampling=laws, ignore_eos=True)
        seconds = time.perf_counter() - start
    wait(device)
    assert all(len(tokens) == new_tokens for tokens in out.tokens), "a request ended early"
    is_sure = new_tokens > 1  # one token of a real model can be half a character
    has_text = any(out.texts)
    assert has_text == (engine.tokenizer is not None) or not is_sure, f"text: {has_text}, with {engine.tokenizer}"
    seconds, host_seconds = of_first((seconds, seconds - sum(waited)))
    return Call(seconds, host_seconds, out.stats.tau)


def idle_share(engine: Engine, prompt: list[int]) -> dict[str, Any]:
    """GPU idle between the rounds of a `generate` call at batch 1, in per cent of the time from one to the next."""
    generate(engine, [prompt], 4)

    def profiled() -> int:
        out = engine.generate([prompt], max_new_tokens=PROFILED_TOKENS, ignore_eos=True)
        torch.cuda.synchronize()
        return out.stats.num_rounds

    found = read_trace(*last_launches(*traced(profiled)))
    return {"idle_percent": found["idle_percent"], "gap_us": found["gap_us"]}


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


def wait(device: str) -> None:
    """Wait until a device of that kind has done all its work."""
    if device == "cuda":
        torch.cuda.synchronize()


@contextmanager
def _waits(device: str) -> Iterator[list[float]]:
    """Seconds of every wait for the device and of every graph launch while open; nothing is known of them on a CPU."""
    seconds: list[float] = []
    if device != "cuda":
        yield seconds
        return
    # A prefill's segments are replayed as one, the attention between them included.
    places: list[tuple[Any, str]] = [(torch.cuda.Event, "synchronize"), (torch.cuda, "synchronize"), (Ranks, "wait")]
    places += [(torch.cuda.CUDAGraph, "replay"), (breakable._Segmented, "replay")]
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
