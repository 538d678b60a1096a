"""Timing of `specdec bench latency`: calls of `generate`, the host's part of them, the GPU's idle share, and
transformers' own `generate`. Ranks started by torchrun run the same, and decide by the first one's clock."""

import json
import os
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile
from transformers import PreTrainedModel

from specdec.api import Engine
from specdec.core.engine.ranks import Ranks
from specdec.graphs import breakable
from specdec.reach.targets.weight_bytes import distinct_experts, expert_modules
from specdec.tools.measure.latency.cases import SAMPLINGS
from specdec.tools.measure.roofline import wait

PROFILED_TOKENS = 64
WORK = ("kernel", "gpu_memcpy", "gpu_memset")  # of a profiler's events
HF_TOKENS, HF_REPEATS = 4, 3  # of calls of transformers' `generate`: least tokens, and repeats of the first token


class TimedCall(NamedTuple):
    """One call of `generate`: seconds in all, seconds of the host without waiting or launching rounds, tau, and the
    rounds of the request that took the most."""

    seconds: float
    host_seconds: float
    tau: float
    rounds: int


def generate(
    engine: Engine, prompts: list[list[int]], new_tokens: int, sampling: str = "greedy", run: int = 0
) -> TimedCall:
    """Time one call, sampled by one of SAMPLINGS; its results are checked after the clock has stopped. run: calls with
    different numbers draw different samples, and different imposed acceptance."""
    law, num = SAMPLINGS[sampling], len(prompts)
    laws = [replace(law, seed=run * num + i) for i in range(num)]
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
    return TimedCall(seconds, host_seconds, out.stats.tau, max(r.acceptance.num_rounds for r in out.requests))


@contextmanager
def _waits(device: str) -> Iterator[list[float]]:
    """Record the seconds of every wait for the device and of every graph launch within the context; empty on a CPU."""
    seconds: list[float] = []
    if device != "cuda":
        yield seconds
        return
    # A prefill's segments are replayed together, including the attention between them.
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


def idle_share(engine: Engine, prompt: list[int]) -> dict[str, Any]:
    """GPU idle between the rounds of a `generate` call at batch 1, in per cent of the time from one to the next."""
    generate(engine, [prompt], 4)
    with tempfile.TemporaryDirectory() as folder:
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as prof:
            out = engine.generate([prompt], max_new_tokens=PROFILED_TOKENS, ignore_eos=True)
            torch.cuda.synchronize()
        path = Path(folder) / "trace.json"
        prof.export_chrome_trace(str(path))
        return idle_between(json.loads(path.read_text())["traceEvents"], out.stats.num_rounds)


def idle_between(events: list[dict[str, Any]], num_rounds: int) -> dict[str, Any]:
    """Return the gaps between the last `num_rounds` graph launches of a chrome trace, which are the rounds."""
    calls = (e for e in events if e.get("cat") in ("cuda_runtime", "cuda_driver"))
    launches = sorted((e["ts"], e["args"]["correlation"]) for e in calls if "GraphLaunch" in e["name"])
    rounds = {correlation for _, correlation in launches[-num_rounds:]}
    work: dict[int, list[tuple[float, float]]] = defaultdict(list)  # begin and end of the work of a round's graph
    others: list[tuple[float, float]] = []
    for e in (e for e in events if e.get("cat") in WORK):
        by = e["args"].get("correlation")
        (work[by] if by in rounds else others).append((e["ts"], e["ts"] + e["dur"]))
    spans = sorted((min(begin for begin, _ in w), max(end for _, end in w)) for w in work.values())
    gaps, periods = [], []
    for (start, end), (following, _) in pairwise(spans):
        busy = sum(b - a for a, b in others if end <= a < following)
        gaps.append(following - end - busy)
        periods.append(following - start)
    return {
        "idle_percent": round(100 * sum(gaps) / max(sum(periods), 1e-9), 2) if gaps else None,
        "gap_us": round(median(gaps), 1) if gaps else None,
    }


def host_probe_ms() -> float:
    """Median ms of a fixed piece of host work like that of a round: distinguishes machines."""
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


@torch.no_grad()
def hf_rows(
    model: PreTrainedModel, prompt: Sequence[int], new_tokens: int, seconds: float, widths: Collection[int] = ()
) -> Iterator[dict[str, Any]]:
    """Yield a row of the time to the first token of `prompt` by transformers' own `generate`, greedy and with its
    cache, and one of the time per token; ms.

    widths: of a model with experts, the second row has the distinct experts of a layer that so many consecutive tokens
    use (`experts_in_use`).

    seconds: limit for calls, as far as their time can be predicted; so fewer tokens than new_tokens may be timed
    (`hf_new_tokens`), and after a slow first token none. A warm-up call is not timed, unless it took too long itself:
    then it is the only one.
    """
    first, _ = _hf_call(model, prompt, 1)
    if first * (HF_REPEATS + 1) < seconds:
        first = median(_hf_call(model, prompt, 1)[0] for _ in range(HF_REPEATS))
    yield {"what": "hf_ttft", "ms": round(1e3 * first, 3)}
    if 2 * first >= seconds or _hf_call(model, prompt, HF_TOKENS)[0] >= seconds:
        return
    tried, _ = _hf_call(model, prompt, HF_TOKENS)
    a_token = max((tried - first) / (HF_TOKENS - 1), 1e-6)
    num = max(HF_TOKENS, min(new_tokens, 1 + int((seconds - first) / a_token)))
    last, answer = _hf_call(model, prompt, num)
    row: dict[str, Any] = {"what": "hf_token", "ms": round(1e3 * (last - first) / (num - 1), 4), "hf_new_tokens": num}
    if expert_modules(model) and widths:
        found = {width: distinct_experts(model, [(prompt, answer)], width) for width in widths}
        row["experts_in_use"] = {width: round(mean, 2) for width, mean in found.items() if mean is not None}
    yield row


def _hf_call(model: PreTrainedModel, prompt: Sequence[int], new_tokens: int) -> tuple[float, list[int]]:
    """Return the seconds of one call that emits `new_tokens` tokens, and the tokens."""
    ids = torch.tensor([list(prompt)], device=model.device)
    lengths = {"min_new_tokens": new_tokens, "max_new_tokens": new_tokens, "pad_token_id": 0}
    wait(model.device.type)
    start = time.perf_counter()
    out = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, **lengths)
    wait(model.device.type)
    seconds = time.perf_counter() - start
    assert out.shape[1] == len(prompt) + new_tokens, "generate ended early"
    return seconds, out[0, len(prompt) :].tolist()


def num_ranks() -> int:
    """Return how many ranks torchrun has started; 1 without it."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def is_first() -> bool:
    """Return whether this rank is the one that prints and writes."""
    return int(os.environ.get("RANK", "0")) == 0


def device_of_rank(kind: str) -> str:
    """Return this rank's device of `kind` and make it current: on CUDA the one with torchrun's number."""
    if num_ranks() == 1 or not kind.startswith("cuda"):
        return kind
    torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    return f"cuda:{torch.cuda.current_device()}"


def of_first(value: Any) -> Any:
    """Return the first rank's value, of plain types. All ranks call this at the same points."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return value
    shared = [value]
    dist.broadcast_object_list(shared, src=0)
    return shared[0]
