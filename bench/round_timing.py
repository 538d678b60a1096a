"""Timing of bench/rounds.py: rounds by the wall clock, phases by events around graphs, gaps by a profile."""

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from statistics import median
from typing import Any

import torch
from round_cases import PROMPT, Case

from specdec.graphs import FullCapture
from specdec.measure.latency.trace import read_trace, traced

GROUPS = 5  # timings of which the median counts
NEW_TOKENS = 1800


@contextmanager
def running(engine: Any, case: Case) -> Iterator[Any]:
    """The engine's core with `case.batch` requests past their prefill."""
    generator = torch.Generator().manual_seed(0)
    vocab = engine._core.target.spec.vocab_size
    prompts = torch.randint(0, vocab, (case.batch, PROMPT), generator=generator).tolist()
    requests = engine.submit(prompts, max_new_tokens=NEW_TOKENS, sampling=case.law, ignore_eos=True)
    while any(not r.is_prefilled for r in requests):
        engine.step()
    for _ in range(3):
        engine.step()
    torch.cuda.synchronize()
    try:
        yield engine._core
    finally:
        engine.abandon(requests)
        torch.cuda.synchronize()


def round_ms(engine: Any, case: Case, num_rounds: int) -> tuple[float, float]:
    """Median wall-clock ms of a round, the host reading results as it does in `generate`, and tau meanwhile."""
    times = []
    with running(engine, case) as core:
        requests = list(core.scheduler.running)
        for _ in range(GROUPS):
            start = time.perf_counter()
            for _ in range(num_rounds):
                core.step()
            torch.cuda.synchronize()
            times.append(1e3 * (time.perf_counter() - start) / num_rounds)
        assert all(r.is_running for r in requests), "a request ended while it was timed"
        tau = sum(r.acceptance.num_emitted for r in requests) / sum(r.acceptance.num_rounds for r in requests)
    return median(times), tau


@torch.inference_mode()
def phase_ms(engine: Any, case: Case, num_rounds: int = 30) -> dict[str, float]:
    """Median ms of each phase: the round cut into graphs that read one another's outputs where they lie."""
    if not case.steps:
        return {}
    with running(engine, case) as core:
        program, kind, capture = core.round, case.kind, FullCapture(core.device)
        rows = core._batch_of(core.scheduler.decoding()).rows
        draft = capture.capture(lambda: program.worker.draft(program.batch(kind, rows)))
        verify = capture.capture(lambda: program.verify(program.batch(kind, rows), draft.outputs.tree))
        accept = capture.capture(lambda: program.accept(program.batch(kind, rows), draft.outputs, verify.outputs[0]))
        extend = capture.capture(lambda: program.extend(program.batch(kind, rows), accept.outputs, verify.outputs[1]))
        graphs = {"draft": draft, "verify": verify, "accept": accept, "extend": extend}
        times: dict[str, list[float]] = defaultdict(list)
        for _ in range(num_rounds):
            events = [torch.cuda.Event(enable_timing=True) for _ in range(len(graphs) + 1)]
            torch.cuda._sleep(2_000_000)  # the host gets ahead, so that no launch is waited for
            events[0].record()
            for graph, event in zip(graphs.values(), events[1:], strict=True):
                graph.replay()
                event.record()
            torch.cuda.synchronize()
            for name, a, b in zip(graphs, events, events[1:], strict=False):
                times[name].append(a.elapsed_time(b))
    return {name: median(values) for name, values in times.items()}


def profile_rounds(engine: Any, case: Case, num_rounds: int = 20) -> dict[str, Any]:
    """From a profiler trace of `num_rounds` rounds: graph and kernel launches a round, and the GPU's idle share
    between the graphs of successive rounds, in per cent of the time from one to the next."""

    def rounds() -> None:
        for _ in range(num_rounds):
            core.step()
        torch.cuda.synchronize()

    with running(engine, case) as core:
        events, _ = traced(rounds)
    return read_trace(events, num_rounds)


def hf_step_ms(model: Any, batch: int, num_tokens: int = 32) -> float:
    """ms a token-step of `model.generate` at that batch: two lengths timed, and their difference divided."""
    ids = torch.randint(0, model.config.vocab_size, (batch, PROMPT), device="cuda")

    def seconds(n: int) -> float:
        torch.cuda.synchronize()
        start = time.perf_counter()
        model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=n,
            min_new_tokens=n,
            do_sample=False,
            pad_token_id=0,
        )
        torch.cuda.synchronize()
        return time.perf_counter() - start

    seconds(2)
    return 1e3 * median((seconds(num_tokens + 1) - seconds(1)) / num_tokens for _ in range(3))
