"""Prefills from graphs, tested through the engine: replay equals eager, the guard, poison, faults.

Recorded captures and uncompiled pieces on a CPU; CUDA graphs, and Inductor too, on a GPU.
"""

import subprocess
import sys
import threading
import warnings
from contextlib import contextmanager

import pytest
import torch

import specdec
from specdec.core.batch import ForwardMode
from specdec.core.errors import GraphError
from specdec.graphs import BufferSpec, Counters, EagerCapture, GraphRunner, PrefillRunner, RecordedCapture, Setup
from specdec.graphs.building import build
from specdec.graphs.compile.trace import Traced
from specdec.graphs.prefill import check_padding
from tests.heads import MODULES, random_draft, random_head
from tests.test_attach import greedy, ragged_prompts
from tests.test_threads import join
from tests.tiny_models import ADMITTED, DEVICE, VOCAB, model_of

TOLERANCE = 1e-4 if DEVICE.type == "cuda" else 1e-5  # padded and joined products may sum in another order
BUCKETS = (4, 8, 12, 16, 24, 32, 48, 64)
MODES = ["breakable", "piecewise"]
LIKELY = MODES if DEVICE.type == "cuda" else ["breakable"]  # where the trace, which takes a second, adds little
SHAPES = {"plain": None, "chain": {"num_steps": 3}, "tree": {"num_steps": 3, "topk": 3, "num_draft_tokens": 10}}
TRACED = ("qwen2_windowed", "gemma3", "gpt_oss", "deepseek_v3")  # biases, two ropes, sinks, latent attention
COMPILERS = ["eager", "inductor"] if DEVICE.type == "cuda" else ["eager"]


def engine_of(model, mode, shape="chain", **settings):
    head = random_head(model).to(DEVICE, next(model.parameters()).dtype) if SHAPES[shape] else None
    defaults = {"max_batch": 8, "max_seq_len": 128, "prefill_buckets": BUCKETS, "compiler": "eager"}
    defaults |= {"graph_sampling": "greedy"}  # rounds do not matter here
    engine = specdec.attach(model, head, prefill_graph=mode, **{**(SHAPES[shape] or {}), **defaults, **settings})
    engine._core.prefill.target_runner.device_bound_from = None  # it is measured: do not measure beside other tests
    return engine


def auto_mode(engine):
    """Return the mode of "auto" without compiled layers."""
    has_whole = engine._core.context.backend.capabilities.packed_prefill
    return "whole, " * has_whole + "breakable" if DEVICE.type == "cuda" else "off"


@contextmanager
def specdec_engine(model, draft, **settings):
    engine = specdec.attach(model, draft, **settings)
    try:
        yield engine
    finally:
        engine.detach()


def batch_of(engine, lens, starts=None, seed=0):
    """Return metadata and ids of prompts of `lens` tokens from `starts` on, in new rows."""
    core = engine._core
    starts = starts or [0] * len(lens)
    for row in list(core.slot_tables._of_row):
        core.slot_tables.release(row)
    numbers = [core.slot_tables.reserve(s + n + 8) for s, n in zip(starts, lens, strict=True)]
    rows = torch.tensor(numbers, device=DEVICE)
    core.slot_tables.write(rows, torch.from_numpy(core.slot_tables.pages_of(numbers)).to(DEVICE))
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, VOCAB, (sum(lens),), generator=generator).to(DEVICE)
    return core.context.backend.metadata.prefill(core.slot_tables.table, rows, starts, lens), ids


@torch.inference_mode()
def both_ways(engine, lens, starts=None, seed=0):
    """Run a batch in graphs and eagerly; return hidden, aux, draft hidden, and K/V of live slots of both."""
    core = engine._core
    metadata, ids = batch_of(engine, lens, starts, seed)
    worker, results = core.round.worker, []
    pools = [core.context.pool, *([worker.context.pool] if worker.context else [])]
    for graphs in (True, False):
        if graphs:
            hidden, aux = core.prefill.target(metadata, ids)
            draft = core.prefill.draft(metadata, ids, aux) if worker.context else None
        else:
            programs, batch = core.prefill.programs, (ids, metadata.positions, metadata.out_cache_loc)
            hidden, aux = programs.target.run("", *batch, metadata=metadata)
            draft = programs.draft[0].run("", *batch, aux, metadata=metadata)[0] if programs.draft else None
        caches = [cache[metadata.out_cache_loc] for pool in pools for cache in pool.planes]
        results.append([t.clone() for t in (hidden, aux, draft, *caches) if t is not None])
    return results


def assert_same(engine, lens, starts=None, seed=0):
    for ours, theirs in zip(*both_ways(engine, lens, starts, seed), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=TOLERANCE, atol=TOLERANCE)


def replays(engine):
    return engine.report().runners["target_prefill"]["replays"]


@pytest.mark.parametrize("compiler", COMPILERS)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("shape", ["plain", "chain"])
def test_replay_equals_eager_at_every_edge_and_batch_size(mode, shape, compiler):
    engine = engine_of(model_of(), mode, shape, compiler=compiler)
    sizes = [n for bucket in BUCKETS for n in (bucket - 1, bucket, bucket + 1)]
    for num_calls, total in enumerate(n for n in sizes if 2 <= n <= 64):
        for batch in {1, 2, 1 + total % 8}:
            if batch > total:
                continue
            cuts = [total // batch + (i < total % batch) for i in range(batch)]
            cuts[0], cuts[-1] = cuts[0] + cuts[-1] - 1, 1  # ragged
            assert_same(engine, cuts if batch > 1 else [total], seed=num_calls)
    counters = engine._core.counters.runners
    assert counters["target_prefill"].replays and not counters["target_prefill"].rejects
    if shape == "chain":
        assert counters["draft_prefill"].replays == counters["target_prefill"].replays


@pytest.mark.parametrize("mode", MODES)
def test_chunks_replay_over_a_cached_prefix(mode):
    engine = engine_of(model_of(), mode)
    assert_same(engine, [5, 20, 1], [0, 30, 63])
    assert replays(engine) == 1


@pytest.mark.parametrize(
    ("name", "mode"),
    [(name, mode) for name in ADMITTED for mode in (MODES if name in TRACED or DEVICE.type == "cuda" else LIKELY)],
)
def test_every_architecture_replays_and_keeps_its_text(name, mode):
    model, prompts = model_of(name), ragged_prompts()
    expected = [greedy(model, p) for p in prompts]
    engine = engine_of(model, mode, max_prefill_tokens=48)
    assert engine.generate(prompts, max_new_tokens=24).tokens == expected
    runners = engine.report().runners
    assert runners["target_prefill"]["replays"] and not runners["target_prefill"]["rejects"]
    assert_same(engine, [7, 9, 3])
    assert runners["draft_prefill"]["replays"] and not runners["draft_prefill"]["rejects"]


@pytest.mark.parametrize(
    ("mode", "shape"),
    [(m, shape) for m in MODES for shape in SHAPES if DEVICE.type == "cuda" or (m == "breakable" and shape != "plain")],
)
def test_texts_do_not_depend_on_the_mode(mode, shape):
    """Greedy and sampled, with prompts longer than a chunk; every prefill replays, with strict=True."""
    model, prompts = model_of(), ragged_prompts()
    law = specdec.SamplingParams(temperature=0.9, seed=5)
    common = {"max_prefill_tokens": 32, "cuda_graph": True, "graph_sampling": ("greedy", "filtered")}
    off = engine_of(model, "off", shape, **common)
    expected = [off.generate(prompts, max_new_tokens=16, sampling=s).tokens for s in (None, law)]
    assert off.report().runners["target_prefill"]["eager"]
    off.detach()
    for settings in ({}, {"compile": True}) if mode == "piecewise" else ({},):
        engine = engine_of(model, mode, shape, strict=True, **common, **settings)
        assert [engine.generate(prompts, max_new_tokens=16, sampling=s).tokens for s in (None, law)] == expected
        report = engine.report()
        assert report.prefill_graph == mode and (report.compile_seconds > 0) == bool(settings or mode == "piecewise")
        assert all(r["replays"] and not r["eager"] for r in report.runners.values()), report.runners
        assert report.paths["EXTEND"]["replays"] and not report.paths["EXTEND"]["eager"]
        engine.detach()


@pytest.mark.parametrize(
    ("strict", "mode"),
    [(strict, m) for m in MODES for strict in (False, True) if DEVICE.type == "cuda" or m == "breakable" or strict],
)
def test_a_target_verify_batch_never_replays_a_prefill(mode, strict):
    """Passed straight to the runners, with as many tokens as a bucket; it runs eagerly and correctly, or raises."""
    engine = engine_of(model_of(), mode, "tree", strict=strict, cuda_graph=True)
    core = engine._core
    prefix, ids = batch_of(engine, [9, 6])
    with torch.inference_mode():
        core.prefill.target(prefix, ids)
        nodes = torch.tensor([[3, 4, 5, 6], [7, 8, 9, 10]], device=DEVICE)
        bits = torch.tensor([[1, 3, 5, 11], [1, 3, 7, 9]], device=DEVICE).unsqueeze(2)
        depths = torch.tensor([[0, 1, 1, 2], [0, 1, 2, 1]], device=DEVICE)
        metadata = core.context.backend.metadata.uniform(
            ForwardMode.TARGET_VERIFY, prefix.slot_table, prefix.rows, torch.tensor([9, 6], device=DEVICE), q_len=4,
            max_prefix=9, depths=depths, tail_depths=depths, ancestor_bits=bits,
        )  # fmt: skip
        before = replays(engine)
        calls = [lambda: core.prefill.target(metadata, nodes.view(-1))[0]]
        aux = torch.zeros(8, 3 * 64, device=DEVICE)
        calls.append(lambda: core.prefill.draft(metadata, nodes.view(-1), aux))
        if strict:
            for call in calls:
                with pytest.raises(GraphError, match="a TARGET_VERIFY batch is not a prefill"):
                    call()
        else:
            hidden, _draft = [call() for call in calls]
            expected = core.target.forward(core.context, metadata, nodes.view(-1)).logits
            torch.testing.assert_close(core.target.head(hidden), expected, rtol=1e-4, atol=1e-4)
    for name in ("target_prefill", "draft_prefill"):
        counters = engine.report().runners[name]
        assert counters["eager"] == (0 if strict else 1)
        assert strict or list(counters["rejects"]) == [
            "a TARGET_VERIFY batch is not a prefill: rounds have graphs of their own"
        ]
    assert replays(engine) == before


def guarded(sizes=(4, 8, 16, 32, 64), failing=(), capture=None):
    """Return a prefill runner whose body doubles its ids; graphs of `failing` sizes run out of memory."""
    setup = Setup(capture or RecordedCapture(), Counters(), torch.device("cpu"), sizes, unit="tokens")
    ids = BufferSpec("ids", lambda n: (n,), torch.int64, pad=0)

    def body(variant, ids, **live):
        if ids.shape[0] in failing:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate")
        return ids * 2

    runner = GraphRunner("target_prefill", body, [ids], setup)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        build([runner], setup.capture, lower="max_prefill_tokens")
    return PrefillRunner(runner, lambda size, **live: None)


@pytest.mark.parametrize("capture", [RecordedCapture(), EagerCapture("graphs are off")])
def test_the_guard_looks_at_the_mode_first(capture):
    runner = guarded(capture=capture)
    for tokens in (1, 4, 8, 64, 1000):
        for mode in ForwardMode:
            is_told = "TARGET_VERIFY" in runner.can_run(mode, tokens).reason
            assert is_told == (mode is ForwardMode.TARGET_VERIFY)


@pytest.mark.parametrize(
    ("mode", "num_tokens", "reason"),
    [
        (ForwardMode.EXTEND, 8, ""),
        (ForwardMode.EXTEND, 2, ""),
        (ForwardMode.EXTEND, 1, "pads more than 2x"),
        (ForwardMode.EXTEND, 64, ""),
        (ForwardMode.EXTEND, 65, "the batch is larger than the largest bucket"),
        (ForwardMode.DECODE, 8, "a DECODE batch is not a prefill"),
        (ForwardMode.DRAFT_EXTEND, 8, "a DRAFT_EXTEND batch is not a prefill"),
    ],
)
def test_every_rule_of_the_guard(mode, num_tokens, reason):
    decision = guarded().can_run(mode, num_tokens)
    assert decision.ok == (not reason) and reason in decision.reason


def test_where_launches_are_hidden_padding_must_be_small():
    runner = guarded((64, 128, 256))
    runner.device_bound_from = 100
    outputs = {n: runner.can_run(ForwardMode.EXTEND, n).ok for n in (40, 99, 100, 126, 128, 200, 256)}
    assert outputs == {40: True, 99: True, 100: False, 126: True, 128: True, 200: False, 256: True}


def test_padding_is_measured_against_the_graph_that_would_replay():
    """16 and 32 ran out of memory: batches planned for them get the graph of 64."""
    runner = guarded(failing=(16, 32))
    padded = "the smallest graph pads more than 2x"
    reasons = {n: runner.can_run(ForwardMode.EXTEND, n).reason for n in (8, 10, 16, 31, 32, 40)}
    assert reasons == {8: "", 10: padded, 16: padded, 31: padded, 32: "", 40: ""}
    assert not check_padding(10, 64).ok and check_padding(10, 16).ok
    runner(ForwardMode.EXTEND, 8, {"ids": torch.arange(8)})
    runner.device_bound_from = 30
    assert "launches cost no time" in runner.can_run(ForwardMode.EXTEND, 33).reason


@pytest.mark.parametrize("mode", MODES)
def test_prefills_of_every_module_replay_and_equal_eager(mode):
    """A NextN head of several modules: one forward each, from graphs, counted, and strict."""
    model, prompts = model_of(), ragged_prompts()
    expected = [greedy(model, p) for p in prompts]
    settings = {"num_steps": 3, "max_prefill_tokens": 32, "prefill_buckets": BUCKETS, "max_seq_len": 128}
    settings |= {"graph_sampling": "greedy"}
    told, last = [], []
    for graphs in (mode, "off"):
        draft = random_draft(model, MODULES).to(DEVICE)
        engine = specdec.attach(
            model, draft, prefill_graph=graphs, strict=graphs != "off", cuda_graph=True, compiler="eager", **settings
        )
        assert engine.generate(prompts, max_new_tokens=24).tokens == expected
        told.append(engine.report())
        last.append(engine._core.round.worker.last[:8].clone())
        engine.detach()
    runners, paths = told[0].runners, told[0].paths
    names = ["target_prefill", "draft_prefill", "draft_prefill_1", "draft_prefill_2"]
    assert len({runners[name]["replays"] for name in names}) == 1 and runners["draft_prefill_2"]["replays"]
    assert not any(runners[name]["eager"] for name in names)
    assert (paths["EXTEND"]["replays"], paths["EXTEND"]["eager"]) == (4 * runners["target_prefill"]["replays"], 0)
    assert told[1].runners["draft_prefill_2"]["eager"] == told[1].paths["EXTEND"]["eager"] / 4
    torch.testing.assert_close(*last, rtol=TOLERANCE, atol=TOLERANCE)


def test_prefills_of_modules_that_cannot_replay_are_counted_and_strict_raises():
    model, prompt = model_of(), ragged_prompts()[3]
    settings = {"num_steps": 3, "prefill_buckets": (8, 16), "max_seq_len": 128, "prefill_graph": "breakable"}
    with specdec_engine(model, random_draft(model, MODULES).to(DEVICE), **settings) as engine:
        engine.generate(prompt, max_new_tokens=4)
        for module in (1, 2):
            rejects = engine.report().runners[f"draft_prefill_{module}"]["rejects"]
            assert rejects == {"the batch is larger than the largest bucket": 1}
    with specdec_engine(
        model, random_draft(model, MODULES).to(DEVICE), strict=True, cuda_graph=True, **settings
    ) as engine:
        prefill = engine._core.prefill
        metadata, ids = batch_of(engine, [40])
        states = torch.zeros(40, 64, device=DEVICE)
        with pytest.raises(GraphError, match="strict: draft_prefill_2 of 40 tokens cannot replay"):
            prefill.draft(metadata, ids, states, 2)


@pytest.mark.parametrize("mode", LIKELY)
def test_prompts_beyond_the_largest_bucket_run_eagerly(mode):
    model = model_of()
    prompt = torch.randint(3, VOCAB, (40,), generator=torch.Generator().manual_seed(1)).tolist()
    engine = engine_of(model, mode, prefill_buckets=(8, 16))
    assert engine.generate(prompt, max_new_tokens=12).tokens == [greedy(model, prompt, 12)]
    reasons = engine.report().runners["target_prefill"]["rejects"]
    assert reasons == {"the batch is larger than the largest bucket": 1}
    assert engine.generate(prompt[:11], max_new_tokens=12).tokens == [greedy(model, prompt[:11], 12)]
    assert replays(engine) == 1
    engine.detach()
    strict = engine_of(model, mode, prefill_buckets=(8, 16), strict=True, cuda_graph=True)
    with pytest.raises(GraphError, match="strict: target_prefill of 40 tokens cannot replay: the batch is larger than"):
        strict.generate(prompt, max_new_tokens=4)
    strict.check_integrity()
    assert strict.generate(prompt[:11], max_new_tokens=12).tokens == [greedy(model, prompt[:11], 12)]


@pytest.mark.parametrize("mode", MODES)
def test_poison_in_padding_and_dummy_slot_reaches_nobody(mode):
    engine = engine_of(model_of(), mode)
    core = engine._core
    prefill = core.prefill
    static = []
    for program in (prefill.programs.target, *prefill.programs.draft):
        static += [*program.results, *program.bridge._q.values(), *program.bridge._out.values()]
    pools = [core.context.pool, core.round.worker.context.pool]
    with torch.inference_mode():
        for lens in ([64], [5], [3, 9, 1], [33], [4]):
            for tensor in static:
                tensor.fill_(float("nan"))
            for cache in (plane for pool in pools for plane in pool.planes):
                cache[0] = float("nan")
            ours, theirs = both_ways(engine, lens)
            for a, b in zip(ours, theirs, strict=True):
                assert a.isfinite().all()
                torch.testing.assert_close(a, b, rtol=TOLERANCE, atol=TOLERANCE)
        total = sum(lens)
        for runner in prefill.runners:
            for name, buffer in runner._buffers.tensors.items():
                assert (buffer[total:4] == runner._buffers.specs[name].pad).all()


@pytest.mark.parametrize("mode", LIKELY)
def test_padded_rows_find_zeros_where_attention_has_not_been(mode):
    """The break does not write rows past the batch: what the graph reads there is zero at every replay."""
    engine = engine_of(model_of(), mode)
    (out,) = engine._core.prefill.programs.target.bridge._out.values()
    for lens in ([48], [25], [9, 2], [5]):
        out.fill_(float("nan"))
        both_ways(engine, lens)
        size = min(b for b in BUCKETS if b >= sum(lens))
        assert out[: sum(lens)].isfinite().all() and (out[sum(lens) : size] == 0).all()


@pytest.mark.parametrize("mode", LIKELY)
def test_sizes_may_come_in_any_order(mode):
    engine = engine_of(model_of(), mode)
    for seed, lens in enumerate([[64], [3], [30, 2], [4], [64], [12], [5, 5, 5], [2], [47]]):
        assert_same(engine, lens, seed=seed)
    assert replays(engine) == 9


@pytest.mark.parametrize("mode", LIKELY)
def test_two_engines_do_not_meet(mode):
    """Two models, interleaved call by call, then in two threads."""
    models = [model_of(), model_of("qwen3", seed=1)]
    prompts = ragged_prompts()
    expected = [[greedy(m, p, 12) for p in prompts] for m in models]
    engines = [engine_of(m, mode) for m in models]
    for lens in ([5], [30], [7, 3]):
        for engine in engines:
            assert_same(engine, lens)
    for e in engines:
        for row in list(e._core.slot_tables._of_row):
            e._core.slot_tables.release(row)
    requests = [e.submit(prompts, max_new_tokens=12) for e in engines]
    for _ in range(3):
        for e in engines:
            e.step()
    texts: list = [None, None]

    def generate(i):
        texts[i] = engines[i].generate(prompts, max_new_tokens=12).tokens

    threads = [threading.Thread(target=generate, args=(i,)) for i in range(2)]
    for e, own in zip(engines, requests, strict=True):
        e.abandon(own)
    join(threads)
    assert texts == expected
    assert all(replays(e) for e in engines)


@pytest.mark.parametrize("mode", MODES)
def test_attention_that_fails_in_a_replay_fails_its_request_only(mode):
    model, prompts = model_of(), ragged_prompts()
    expected = [greedy(model, p, 12) for p in prompts]
    engine = engine_of(model, mode, max_prefill_tokens=48)
    backend = engine._core.context.backend
    attend, left = backend.attend, [2]

    def sometimes(call):
        left[0] -= 1
        if left[0] == -1:
            raise FloatingPointError("attention gave up")
        attend(call)

    backend.attend = sometimes
    with pytest.raises(GraphError, match=r"break 3.*FloatingPointError: attention gave up"):
        engine.generate(prompts, max_new_tokens=12)
    engine.check_integrity()
    assert engine._core.slot_tables.num_free_rows == 8
    assert engine.generate(prompts, max_new_tokens=12).tokens == expected
    assert replays(engine)


@pytest.mark.parametrize("mode", LIKELY)
def test_out_of_memory_at_a_capture_leaves_the_smaller_sizes(mode, monkeypatch):
    layers = specdec.reach.targets.hf.HFTarget.layers

    def short(self, mode, ids, positions):
        if ids.shape[0] > 24:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate")
        return layers(self, mode, ids, positions)

    monkeypatch.setattr(specdec.reach.targets.hf.HFTarget, "layers", short)
    with pytest.warns(UserWarning, match=r"no graph for target_prefill of 64: out of memory.*lower max_prefill_tokens"):
        engine = engine_of(model_of(), mode)
    monkeypatch.undo()
    assert_same(engine, [20])
    assert replays(engine) == 1
    assert_same(engine, [40])
    rejects = engine.report().runners["target_prefill"]["rejects"]
    assert rejects == {"out of memory when it was captured": 1}


class Around(torch.nn.Module):
    """Wraps `inner` and runs it."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner


def untraceable():
    """Return a model whose MLPs read their values on the host."""
    model = model_of()

    class Looks(Around):
        def forward(self, x):
            return self.inner(x) if float(x.abs().max()) < 1e9 else x

    for layer in model.model.layers:
        layer.mlp = Looks(layer.mlp)
    return model


def test_layers_that_do_not_trace_are_named_and_run_as_they_are():
    model, prompts = untraceable(), ragged_prompts()
    with pytest.raises(
        GraphError, match="the layers of LlamaForCausalLM: it cannot be traced and compiled as one graph"
    ):
        engine_of(model, "piecewise")
    assert not hasattr(model, "_specdec_attached")
    with pytest.raises(GraphError, match="cannot be traced"):
        engine_of(model, "auto", compile=True, strict=True, cuda_graph=True)
    with pytest.warns(UserWarning, match="runs uncompiled: it cannot be traced") as caught:
        engine = engine_of(model, "auto", compile=True)
    assert any("float(x.abs().max())" in str(w.message) for w in caught)  # the source of the op
    report = engine.report()
    assert report.prefill_graph == auto_mode(engine) and report.compile_seconds == 0
    assert engine.generate(prompts, max_new_tokens=12).tokens == [greedy(model, p, 12) for p in prompts]


def test_auto_compiles_where_rounds_have_graphs_and_says_why_not(monkeypatch):
    from specdec.core.config import EngineConfig
    from specdec.reach.targets.compiling.target import why_uncompiled

    cuda, cpu = torch.device("cuda"), torch.device("cpu")
    assert why_uncompiled(EngineConfig(), cuda) == "SPECDEC_COMPILE=0"  # tests/conftest.py
    monkeypatch.setenv("SPECDEC_COMPILE", "1")
    assert why_uncompiled(EngineConfig(), cuda) == ""
    assert why_uncompiled(EngineConfig(), cpu) == "compile='auto' on cpu"
    assert why_uncompiled(EngineConfig(cuda_graph=False), cuda) == "compile='auto' without graphs"
    assert why_uncompiled(EngineConfig(compile=False), cuda) == "compile=False"
    assert why_uncompiled(EngineConfig(compile=True), cpu) == ""


def test_what_compiling_imports_is_there_before_it_starts():
    """Imported on a thread; in a separate process, since this one has imported it already."""
    code = """if True:
        import sys, torch
        from specdec.core.config import EngineConfig
        from specdec.reach.targets.compiling import target
        model = types.SimpleNamespace(device=torch.device("cpu"))
        with target.preloading(EngineConfig(), model):
            assert threading.active_count() == 1, "nothing is to be compiled"
        target.preloading(EngineConfig(compile=True), model).__enter__()
        while "specdec.graphs.compile.trace" not in sys.modules:
            time.sleep(0.01)
        with target.PRELOADING:
            assert hasattr(sys.modules["specdec.graphs.compile.trace"], "trace"), "a thread imports all of it"
    """
    subprocess.run([sys.executable, "-c", f"import threading, time, types\n{code}"], check=True, timeout=120)


def test_auto_runs_a_model_that_does_not_trace_without_a_word(monkeypatch):
    model, prompts = untraceable(), ragged_prompts()
    for where in ("assembly.models", "targets.compiling.target", "targets.compiling.draft"):  # where it is imported
        monkeypatch.setattr(f"specdec.reach.{where}.why_uncompiled", lambda config, device: "")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        if DEVICE.type == "cuda":
            warnings.filterwarnings("default", "no graph for")  # host reads cannot be captured either
        engine = engine_of(model, "auto", strict=DEVICE.type == "cpu", cuda_graph=True)
    report = engine.report()
    assert report.compiled.startswith("not compiled: it cannot be traced") and "float(x.abs().max())" in report.compiled
    assert report.prefill_graph == auto_mode(engine) and report.compiled in str(report)
    assert engine.generate(prompts, max_new_tokens=8).tokens == [greedy(model, p, 8) for p in prompts]


@pytest.mark.parametrize("compiler", COMPILERS)
@pytest.mark.parametrize("shape", list(SHAPES) if DEVICE.type == "cuda" else ["tree"])
def test_compiled_layers_serve_rounds(shape, compiler):
    model, prompts = model_of(), ragged_prompts()
    expected = [greedy(model, p) for p in prompts]
    engine = engine_of(model, "off", shape, compile=True, compiler=compiler, cuda_graph=True)
    live, calls = engine._core.target.run_layers, []
    engine._core.target.run_layers = lambda *args: (calls.append(1), live(*args))[1]
    assert engine.generate(prompts, max_new_tokens=24).tokens == expected
    assert len(calls) == engine.report().runners["target_prefill"]["eager"]  # prefills run the live model


def test_a_model_is_as_it_was_after_compiled_engines():
    model, prompt = model_of("qwen2_windowed"), ragged_prompts()[0]
    before = {name: p.clone() for name, p in model.state_dict().items()}
    expected = greedy(model, prompt)
    engine = engine_of(model, "piecewise", compile=True)
    assert greedy(model, prompt) == expected  # while attached: its products read views of joined weights
    engine.generate([prompt], max_new_tokens=4)
    engine.detach()
    for name, p in model.named_parameters():
        assert torch.equal(p, before[name]) and p.untyped_storage().nbytes() == p.nbytes, name
    assert "forward" not in model.model.__dict__ and greedy(model, prompt) == expected


def test_prefill_graphs_watch_their_tensors():
    model = model_of()
    engine = engine_of(model, "breakable")
    weight = model.model.layers[1].mlp.up_proj.weight
    before, weight.data = weight.data, weight.data.clone()
    with pytest.raises(GraphError, match=r"up_proj.weight \(moved\)"):
        engine.generate(ragged_prompts(), max_new_tokens=4)
    weight.data = before
    engine.generate(ragged_prompts(), max_new_tokens=4)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"prefill_graph": "full"}, "prefill_graph='full': expected one of"),
        ({"prefill_graph": None}, "prefill_graph=None: expected one of"),
        ({"compiler": "gcc"}, "compiler='gcc': expected one of"),
        ({"compile": 1}, "compile=1: expected one of"),
        ({"prefill_buckets": (0, 4)}, r"prefill_buckets=\(0, 4\) \(item 0 is 0\): expected a list of token counts"),
        ({"prefill_buckets": 64}, "prefill_buckets=64: expected a list of token counts"),
        ({"prefill_buckets": ()}, r"prefill_buckets=\(\): expected a list of token counts"),
    ],
)
def test_settings_out_of_range_are_named(settings, message):
    with pytest.raises(ValueError, match=message):
        specdec.attach(model_of(), **settings)


@pytest.mark.gpu
@pytest.mark.parametrize("mode", MODES)
def test_bf16_replays_equal_eager(mode):
    with pytest.warns(UserWarning, match="low precision"):
        engine = engine_of(model_of(dtype=torch.bfloat16), mode, compiler="inductor")
    for seed, lens in enumerate([[64], [13], [3, 40, 9], [5]]):
        for ours, theirs in zip(*both_ways(engine, lens, seed=seed), strict=True):
            assert (ours - theirs).float().norm() <= 2e-2 * theirs.float().norm()
    assert replays(engine) == 4


class Branches(Around):
    """A norm that does something else for long batches."""

    def forward(self, x):
        return self.inner(x + 1 if x.shape[1] > 40 else x)


def test_layers_that_depend_on_the_number_of_tokens_are_refused():
    model = model_of()
    model.model.norm = Branches(model.model.norm)
    with pytest.raises(GraphError, match="depends on the number of tokens"):
        engine_of(model, "piecewise")


@pytest.mark.parametrize("what", ["q_proj", "k_proj", "v_proj", "down_proj", "aux"])
def test_compiled_layers_that_differ_are_refused(what, monkeypatch):
    """Change what one product of the trace uses, or the features, after the live layers have run."""
    model = model_of()
    call = Traced.__call__

    def spoilt(self, *inputs):
        if what == "aux":
            hidden, aux = call(self, *inputs)
            return hidden, aux * 1.2
        weight = dict(model.model.layers[1].named_modules())[
            f"self_attn.{what}" if what != "down_proj" else f"mlp.{what}"
        ].weight
        weight.mul_(-3)
        out = call(self, *inputs)
        weight.div_(-3)
        return out

    monkeypatch.setattr(Traced, "__call__", spoilt)
    with pytest.raises(GraphError, match="compiled, they differ from the live model's"):
        engine_of(model, "piecewise")
    assert all(p.untyped_storage().nbytes() == p.nbytes for p in model.parameters())


def test_compiled_layers_that_raise_leave_no_trace(monkeypatch):
    model, prompts = model_of(), ragged_prompts()

    def raises(self, *inputs):
        raise RuntimeError("an illegal something")

    monkeypatch.setattr(Traced, "__call__", raises)
    with pytest.raises(GraphError, match="compiled, they fail: an illegal something"):
        engine_of(model, "piecewise")
    with pytest.warns(UserWarning, match="runs uncompiled: compiled, they fail"):
        engine = engine_of(model, "off", compile=True)
    assert engine.generate(prompts, max_new_tokens=8).tokens == [greedy(model, p, 8) for p in prompts]
    assert all(p.untyped_storage().nbytes() == p.nbytes for p in model.parameters())


def test_a_head_with_more_rows_than_the_embedding_is_compiled():
    """Ids that only the head has are neither traced nor compared: the embedding has no rows for them."""
    model, prompts = model_of(), ragged_prompts()
    own = model.lm_head
    model.lm_head = torch.nn.Linear(own.in_features, 2 * own.out_features, bias=False, device=DEVICE)
    model.lm_head.weight.data.zero_()[: own.out_features] = own.weight
    engine = engine_of(model, "off", "plain", compile=True)
    assert engine.report().compiled.startswith("compiled")
    assert engine.generate(prompts, max_new_tokens=8).tokens == [greedy(model, p, 8) for p in prompts]


def test_one_trace_serves_prefills_and_rounds_on_the_live_weights():
    model, prompts = model_of(), ragged_prompts()
    engine = engine_of(model, "piecewise", compile=True, max_prefill_tokens=48)
    compiled = engine._core.target.compiled
    assert compiled[True] is compiled[False]
    model.model.layers[0].mlp.gate_proj.weight.data.mul_(0.5)  # both follow it
    assert engine.generate(prompts, max_new_tokens=12).tokens == [greedy(model, p, 12) for p in prompts]
    engine.detach()
    assert all(p.untyped_storage().nbytes() == p.nbytes for p in model.parameters())


def test_weights_that_are_replaced_under_compiled_layers_are_noticed():
    model = model_of()
    engine = engine_of(model, "off", compile=True)
    weight = model.model.layers[1].mlp.up_proj.weight
    weight.data = weight.data.clone()
    with pytest.raises(GraphError, match=r"up_proj.weight \(moved\)"):
        engine.generate(ragged_prompts(), max_new_tokens=4)


def test_hooks_of_the_model_run_once_a_forward():
    model, prompts, calls = model_of(), ragged_prompts(), []

    def shift(module, args, output):
        calls.append(1)
        output.last_hidden_state = output.last_hidden_state + 0.5
        return output

    handle = model.model.register_forward_hook(shift)
    expected = [greedy(model, p, 8) for p in prompts]
    engine = engine_of(model, "off", "plain", cuda_graph=False)
    calls.clear()
    assert engine.generate(prompts, max_new_tokens=8).tokens == expected
    assert len(calls) == sum(path["eager"] for path in engine.report().paths.values())
    handle.remove()
    assert engine.generate(prompts, max_new_tokens=8).tokens == [greedy(model, p, 8) for p in prompts]


def test_attaching_draws_no_random_numbers():
    model = model_of()
    before = torch.get_rng_state()
    engine_of(model, "piecewise", "plain")
    assert torch.equal(torch.get_rng_state(), before)


def test_auto_captures_prefills_where_there_are_graphs():
    from specdec.core.config import EngineConfig
    from specdec.reach.assembly.models import resolve_prefill_mode

    cuda, cpu = torch.device("cuda"), torch.device("cpu")

    assert resolve_prefill_mode(EngineConfig(prefill_graph="breakable"), cuda) == "breakable"
    assert resolve_prefill_mode(EngineConfig(), cuda) == "breakable"
    assert resolve_prefill_mode(EngineConfig(compile=True), cuda) == "piecewise"
    assert resolve_prefill_mode(EngineConfig(cuda_graph=False), cuda) == "off"
    assert resolve_prefill_mode(EngineConfig(compile=True), cpu) == "off"


class BranchesOnOne(Around):
    """An MLP that does something else for a single token, as decode kernels do."""

    def forward(self, x):
        return self.inner(x) * (1.5 if x.shape[1] == 1 else 1.0)


def branching_on_one():
    model = model_of()
    for layer in model.model.layers:
        layer.mlp = BranchesOnOne(layer.mlp)
    return model


def test_a_trace_that_is_wrong_for_one_token_is_refused():
    """Dynamo assumes T > 1 without a guard; a plain decode at batch 1 is one token."""
    model, prompts = branching_on_one(), ragged_prompts()
    with pytest.raises(GraphError, match=r"differ from the live model's by .* in forwards of 1 token"):
        engine_of(model, "piecewise")
    assert not hasattr(model, "_specdec_attached")
    with pytest.warns(UserWarning, match=r"runs uncompiled: .* in forwards of 1 token"):
        engine = engine_of(model, "off", "plain", compile=True, cuda_graph=True)
    for prompt in prompts:
        assert engine.generate([prompt], max_new_tokens=8).tokens == [greedy(model, prompt, 8)]


@pytest.mark.parametrize("name", ADMITTED if DEVICE.type == "cuda" else ("llama", *TRACED))
def test_compiled_layers_serve_one_token(name):
    model = model_of(name)
    engine = engine_of(model, "off", "plain", compile=True, cuda_graph=True)
    for prompt in ragged_prompts():
        assert engine.generate([prompt], max_new_tokens=8).tokens == [greedy(model, prompt, 8)]
    assert engine._core.target.compiled
