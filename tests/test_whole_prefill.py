"""Prefills as one graph: they leave the same state as prefills in parts, for every draft, model and batch."""

from itertools import pairwise

import pytest
import torch

import specdec
from specdec.core.batch import ForwardMode
from specdec.core.config import EngineConfig
from specdec.core.prefill import whole
from specdec.core.prefill.graphs import BUSY_WORK, part_sizes
from specdec.core.prefill.whole import MOST_REQUESTS, WHOLE_SIZES, whole_sizes
from specdec.core.sampling_params import SamplingKind
from specdec.graphs import pick_capture
from tests.heads import MODULES, poison, random_draft
from tests.state_tensors import worker_tensors
from tests.test_attach import greedy, ragged_prompts
from tests.tiny_models import ADMITTED, DEVICE, VOCAB, model_of

TOLERANCE = 1e-4 if DEVICE.type == "cuda" else 1e-5
BUCKETS = (4, 8, 16, 24, 32, 64)
AN_8B = -(-BUSY_WORK // 4096**2)  # tokens
DRAFTS = (None, "eagle", "eagle3", "nextn", MODULES, "standalone", "lookup")


def engine_of(model, draft=None, prefill_graph="whole", **settings):
    """Attach with a draft of the algorithm `draft`."""
    algo = draft if draft in (None, "lookup") else "auto"
    given = None if algo != "auto" else random_draft(model, draft).to(DEVICE)
    defaults = {"max_batch": 10, "max_seq_len": 128, "prefill_buckets": BUCKETS, "compiler": "eager"}
    engine = specdec.attach(model, given, algo=algo, prefill_graph=prefill_graph, **{**defaults, **settings})
    if engine._core.prefill.whole is not None:
        engine._core.prefill.whole.runner.device_bound_from = None  # it is measured: do not measure beside other tests
    return engine


def prompts_of(*lens, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, VOCAB, (n,), generator=generator).tolist() for n in lens]


def test_an_8b_has_few_prefill_graphs():
    """Per runner; there used to be 54 of target and draft each, and 20 whole ones."""
    config = EngineConfig(max_batch=1, max_seq_len=4096, graph_sampling=("greedy",))
    whole = whole_sizes(config, AN_8B)
    assert AN_8B == 1193 and whole == (*WHOLE_SIZES[:17], 2048) and whole[16] == 1280
    assert part_sizes(config, whole, AN_8B) == (1, 2, 4, *whole[:17], 4095)
    assert len(part_sizes(config, (), AN_8B)) == 41, "without whole graphs padding is finer"


def test_smaller_models_have_graphs_of_all_sizes_and_every_batch_one_that_fits():
    config = EngineConfig(max_batch=1, max_seq_len=16384)
    whole = whole_sizes(config)
    parts = part_sizes(config, whole, None)
    assert whole == WHOLE_SIZES and parts[-1] == 8192
    assert all(b <= 2 * (a + 1) for a, b in pairwise(parts)), "a guard refuses to pad by more than that"
    wanted = EngineConfig(prefill_buckets=(8, 64, 2000))
    assert whole_sizes(wanted, 20) == part_sizes(wanted, (8,), 20) == (8, 64, 2000)


@torch.inference_mode()
def state_after(engine, prompts, **options):
    """Return all that prefills of `prompts` leave by row, the K/V of their tokens, and then their texts."""
    core = engine._core
    tickets = engine.submit(prompts, max_new_tokens=6, ignore_eos=True, **options)
    while core.scheduler.waiting or any(not r.is_prefilled for r in core.scheduler.running):
        core.step()
    rows = [r.row for r in core.scheduler.running]
    worker, state = core.round.worker, core.state
    kept = [state.roots, state.seq_lens, state.remaining]
    own = worker_tensors(worker).items()
    kept += [t for name, t in own if t.shape[:1] == (core.config.num_rows,) and "rope" not in name]
    found = [t[rows].clone() for t in kept]
    if worker.reads_history:
        found += [state.history[row, : len(p) + 1].clone() for row, p in zip(rows, prompts, strict=True)]
    for row, prompt in zip(rows, prompts, strict=True):
        slots = core.slot_tables.table[row, : len(prompt)].long()
        pools = [core.context.pool, *([worker.context.pool] if worker.context else [])]
        found += [plane[slots].clone() for pool in pools for plane in pool.planes]
    while engine.step():
        pass
    return found, [t.tokens for t in tickets]


def replays(engine):
    return engine.report().runners["whole_prefill"]["replays"]


def assert_same(ours, theirs):
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=TOLERANCE, atol=TOLERANCE)


@pytest.mark.parametrize("draft", DRAFTS if DEVICE.type == "cuda" else (None, "eagle3", MODULES, "standalone"), ids=str)
def test_a_whole_prefill_leaves_what_one_in_parts_leaves(draft):
    """Ragged batches, exact and padded buckets, prompts in chunks (prefixes), one request and the most possible."""
    batches = [(5, 1, 9), (16,), (33,), (70, 3), (3,) * MOST_REQUESTS]
    settings = {"num_steps": 3} if draft else {}
    engines = [engine_of(model_of(), draft, mode, max_prefill_tokens=64, **settings) for mode in ("whole", "breakable")]
    for num, lens in enumerate(batches):
        prompts = prompts_of(*lens, seed=num)
        (ours, tokens), (theirs, expected) = (state_after(engine, prompts) for engine in engines)
        assert_same(ours, theirs)
        assert tokens == expected
    assert replays(engines[0]) == len(batches) + 1 and engines[0].report().runners["target_prefill"]["replays"] == 0


@pytest.mark.parametrize("is_beside", [True, False])
@pytest.mark.parametrize("count", [1, MOST_REQUESTS, MOST_REQUESTS + 2])
def test_new_requests_come_in_the_copy_of_their_prefill(count, is_beside, monkeypatch):
    """If there is room, for any size of the graph."""
    if not is_beside:
        monkeypatch.setattr("specdec.core.engine.launcher.ROOM", 10)
    model = model_of()
    engine, prompts = engine_of(model, max_prefill_tokens=64), prompts_of(122, *range(3, 2 + count))
    inputs, taken = engine._core.prefill.whole._inputs, []
    write_rows = engine._core.launcher._write_rows
    monkeypatch.setattr(engine._core.launcher, "_write_rows", lambda rows: (taken.append(rows), write_rows(rows)))
    assert engine.generate(prompts, max_new_tokens=6).tokens == [greedy(model, p, 6) for p in prompts]
    assert [len(rows) for rows in taken] == [count]
    assert (taken[0].untyped_storage().data_ptr() == inputs.untyped_storage().data_ptr()) == is_beside
    engine.check_integrity()


@pytest.mark.parametrize("name", ADMITTED if DEVICE.type == "cuda" else ("gemma3", "gpt_oss", "deepseek_v3"))
def test_every_architecture_keeps_its_text(name):
    model, prompts = model_of(name), ragged_prompts()
    expected = [greedy(model, p) for p in prompts]
    engine = engine_of(model, "eagle3", num_steps=3, max_prefill_tokens=48, prefill_buckets=(16, 48))
    assert engine.generate(prompts, max_new_tokens=24).tokens == expected
    assert replays(engine) and not engine.report().runners["target_prefill"]["eager"]


@pytest.mark.parametrize("compiler", ["eager", "inductor"] if DEVICE.type == "cuda" else ["eager"])
def test_compiled_layers_run_whole(compiler):
    model, prompts = model_of("gemma3"), prompts_of(11, 3)
    expected = [greedy(model, p, 12) for p in prompts]
    settings = {"compile": True, "compiler": compiler, "num_steps": 3, "prefill_buckets": (16, 64)}
    engine = engine_of(model, "eagle3", **settings)
    assert engine.generate(prompts, max_new_tokens=12).tokens == expected and replays(engine) == 1
    assert engine.report().prefill_graph == "whole, piecewise"


def test_a_graph_of_many_layers_is_divided(monkeypatch):
    divided, capture = [], pick_capture(True, DEVICE)
    divide = type(capture).divide
    monkeypatch.setattr(type(capture), "divide", lambda self: (divided.append(self), divide(self)))
    monkeypatch.setattr(whole, "PARTS", (1 << 10, 2))  # after half of the layers
    modes = ("whole", "breakable")
    engine, parts = (engine_of(model_of(), "eagle", mode, prefill_buckets=(16,)) for mode in modes)
    (ours, text), (theirs, expected) = (state_after(e, prompts_of(9, 5)) for e in (engine, parts))
    assert_same(ours, theirs)
    assert text == expected and replays(engine) == 1
    graphs = engine._core.prefill.whole.runner.runner.captured
    if DEVICE.type == "cuda":  # recorded captures run their body again
        assert all(len(c.graph._parts) == 5 for c in graphs.values())  # the fourth one sends first tokens to the host
    assert divided


@pytest.mark.parametrize("draft", [None, "eagle3"])
def test_first_tokens_are_mailed_before_the_draft_takes_the_prompt(draft, monkeypatch):
    engine, done = engine_of(model_of(), draft, **{"num_steps": 3} if draft else {}), []
    core, prompts = engine._core, prompts_of(9, 5)
    post, finish = core.mailbox.post, core.round.worker.finish_prefill
    monkeypatch.setattr(core.mailbox, "post", lambda *args: (done.append("mailed"), post(*args)))
    monkeypatch.setattr(core.round.worker, "finish_prefill", lambda *args: (done.append("drafted"), finish(*args))[1])
    for captured in core.prefill.whole.runner.runner.captured.values():
        if DEVICE.type == "cuda":  # a replay runs none of the worker's Python
            last = captured.graph._parts[-1]
            captured.graph._parts[-1] = lambda last=last: (done.append("drafted"), last())
    answers = engine.generate(prompts, max_new_tokens=1).tokens
    assert answers == [greedy(model_of(), prompt, 1) for prompt in prompts]
    assert done == (["mailed", "drafted"] if draft else ["drafted", "mailed"])


def test_a_whole_prefill_on_triton():
    """On a CPU one prompt and its first token: the interpreter is slow, and test_backends has every kind of layer."""
    settings = {"backend": "triton", "prefill_buckets": (8,), "max_batch": 2, "max_prefill_tokens": 8}
    draft, lens, num_tokens = ("eagle3", (9, 4), 6) if DEVICE.type == "cuda" else (None, (8,), 1)
    model, prompts = model_of("qwen2_windowed"), prompts_of(*lens)
    engine = engine_of(model, draft, **settings)
    answer = engine.generate(prompts, max_new_tokens=num_tokens, ignore_eos=True)
    assert answer.tokens == [greedy(model, p, num_tokens) for p in prompts] and replays(engine) >= 1


@pytest.mark.parametrize(
    ("law", "is_whole"),
    [
        ({"temperature": 0.8}, True),
        ({"temperature": 0.8, "top_k": 7, "top_p": 0.9}, True),
        ({"repetition_penalty": 1.5}, False),
        ({"temperature": 0.8, "repetition_penalty": 1.5}, False),
    ],
    ids=str,
)
def test_first_tokens_of_any_law(law, is_whole):
    sampling = [specdec.SamplingParams(seed=i, **law) for i in range(3)]
    engines = [engine_of(model_of(), "eagle3", mode, num_steps=3) for mode in ("whole", "breakable")]
    answers = [state_after(engine, prompts_of(5, 9, 2), sampling=sampling)[1] for engine in engines]
    assert answers[0] == answers[1] and replays(engines[0]) == is_whole
    runners = engines[0].report().runners
    assert runners["target_prefill"]["replays"] == (not is_whole)
    assert [why.startswith("sampling of kind 'processed") for why in runners["whole_prefill"]["rejects"]] == (
        [] if is_whole else [True]
    )


def test_log_probabilities_of_first_tokens():
    engines = [engine_of(model_of(), None, mode, logprobs=2) for mode in ("whole", "breakable")]
    ours, theirs = (e.generate(prompts_of(5, 9), max_new_tokens=2, ignore_eos=True) for e in engines)
    assert replays(engines[0]) == 1 and ours.tokens == theirs.tokens
    for a, b in zip(ours.requests[0].logprobs, theirs.requests[0].logprobs, strict=True):
        assert a.logprob == pytest.approx(b.logprob, abs=1e-4)


def test_what_a_whole_graph_does_not_hold_is_prefilled_in_parts():
    engine = engine_of(model_of(), "eagle3", num_steps=3, prefill_buckets=(8, 32), max_prefill_tokens=128)
    many, long = prompts_of(*(2,) * (MOST_REQUESTS + 1)), prompts_of(40)
    for prompts in (many, long):
        assert [t for p, t in zip(prompts, state_after(engine, prompts)[1], strict=True)] == [
            greedy(engine.target_module, p, 6) for p in prompts
        ]
    told = {"more than 8 requests": 1, "the batch is larger than the largest bucket": 1}
    assert engine.report().runners["whole_prefill"] == {"replays": 0, "eager": 0, "rejects": told}
    assert "more than 8 requests: 1, the batch is larger" in str(engine.report())
    whole = engine._core.prefill.whole
    reasons = [
        whole.can_run(SamplingKind.GREEDY, [0] * 9, 18).reason,
        whole.can_run(SamplingKind.PROCESSED, [0], 8).reason,
        whole.can_run(SamplingKind.GREEDY, [0], 40).reason,
        whole.can_run(SamplingKind.GREEDY, [7], 9).reason,
    ]
    assert reasons[:2] == ["more than 8 requests", "sampling of kind 'processed': prefilled in parts"]
    assert reasons[2:] == ["the batch is larger than the largest bucket", "the smallest graph pads more than 2x"]


def test_auto_takes_prompts_that_have_nothing_cached(monkeypatch):
    """Their graphs need no split K/V; later chunks of a long prompt run in parts. (On a CPU auto is "off".)"""
    monkeypatch.setattr("specdec.reach.assembly.models.auto_captures", lambda *_: True)
    engine = engine_of(model_of(), "eagle3", "auto", num_steps=3, max_prefill_tokens=16, prefill_buckets=(8, 16))
    whole = engine._core.prefill.whole
    assert whole.runner.runner.variants == ("greedy, fresh", "filtered, fresh")
    prompts = prompts_of(22, 7)
    assert state_after(engine, prompts)[1] == [greedy(engine.target_module, p, 6) for p in prompts]
    assert replays(engine) == 1 and engine.report().runners["target_prefill"]["replays"] == 1
    told = {"tokens are cached already: prefilled in parts": 1}
    assert engine.report().runners["whole_prefill"]["rejects"] == told


def test_the_guard_looks_at_the_mode_first():
    guard = engine_of(model_of())._core.prefill.whole.runner
    for mode in ForwardMode:
        decision = guard.can_run(mode, 8, SamplingKind.GREEDY)
        assert decision.ok == (mode is ForwardMode.EXTEND)
    assert "TARGET_VERIFY batch is not a prefill" in guard.can_run(ForwardMode.TARGET_VERIFY, 10**6, "greedy").reason


@pytest.mark.parametrize("backend", ["torch", "triton"] if DEVICE.type == "cuda" else ["torch"])
def test_poison_in_slots_and_the_dummy_row_reaches_nobody(backend):
    settings = {"backend": backend, "num_steps": 3, "prefill_buckets": (24,)}
    model = model_of("gpt_oss" if DEVICE.type == "cpu" else "llama")  # windows and sinks
    engine = engine_of(model, "eagle3", **settings)
    prompts = prompts_of(11, 2, 5)
    state_after(engine, prompts)
    poison(engine)
    core = engine._core
    for tensor in worker_tensors(core.round.worker).values():
        if tensor.shape[:1] == (core.config.num_rows,):
            tensor.fill_(float("nan"))
    found, tokens = state_after(engine, prompts)
    assert all(t.isfinite().all() for t in found) and tokens == [greedy(model, p, 6) for p in prompts]
    for pool in (core.context.pool, core.round.worker.context.pool):
        assert all(plane[0].isfinite().all() for plane in pool.planes), "padding wrote what is not a number"


def test_a_backend_that_plans_on_the_host_is_told(monkeypatch):
    from dataclasses import replace

    from specdec.backends import TorchBackend

    monkeypatch.setattr(TorchBackend, "capabilities", replace(TorchBackend.capabilities, packed_prefill=False))
    settings = {"backend": "torch", "max_batch": 2, "max_seq_len": 64}
    with pytest.raises(ValueError, match="prefill_graph='whole': torch plans prefills on the host"):
        specdec.attach(model_of(), **settings, prefill_graph="whole")
    assert not hasattr(model_of(), "_specdec_attached")


@pytest.mark.gpu
@pytest.mark.parametrize("draft", DRAFTS, ids=str)
def test_a_prefill_waits_for_nothing_and_is_a_launch_a_part(draft):
    from torch.profiler import ProfilerActivity, profile

    model = model_of()
    engine = engine_of(model, draft, "auto", prefill_buckets=None, strict=True, **({"num_steps": 3} if draft else {}))
    assert engine.report().prefill_graph == "whole, breakable"
    prompts = prompts_of(20, 7)
    assert engine.generate(prompts, max_new_tokens=8).tokens == [greedy(model, p, 8) for p in prompts]
    core = engine._core
    requests = engine.submit(prompts, max_new_tokens=8)
    core.scheduler.admit()
    core.launcher.fill()
    core.launcher.admit()
    torch.cuda.synchronize()
    with torch.inference_mode(), profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as trace:
        torch.cuda.set_sync_debug_mode("error")
        try:
            core.launcher.prefill(core.scheduler.next_prefill(8192))
        finally:
            torch.cuda.set_sync_debug_mode("default")
        torch.cuda.synchronize()
    calls = [e.name for e in trace.events()]
    num_parts = {len(c.graph._parts) for c in core.prefill.whole.runner.runner.captured.values()}
    num_divided = len({len(core.context.layers) // part for part in whole.PARTS} - {0})
    has_model = draft not in (None, "lookup")  # it reads the prompt after first tokens are sent
    assert num_parts == {2 + num_divided + 2 * has_model}  # first tokens follow what all kinds of sampling share
    assert calls.count("cudaGraphLaunch") == 2 + num_divided + has_model
    assert not [c for c in calls if "LaunchKernel" in c]
    engine.abandon(requests)
    assert replays(engine) == 2
