"""Rounds from graphs, tested through the engine: replay equals eager, poison, changing batches, faults.

Recorded captures on the torch backend on a CPU, CUDA graphs on the Triton backend on a GPU.
"""

import gc
import random
import weakref

import pytest
import torch

import specdec
from specdec import SamplingParams
from specdec.core.config import CONSTRAINED, GRAPH_SAMPLING, EngineConfig
from specdec.core.errors import CapacityError, GraphError
from specdec.core.functional.tree import Tree
from specdec.core.functional.verify import VerifyOutput, impose_acceptance
from specdec.core.sampling_params import SamplingKind
from specdec.reach.assembly.memory import check_fits
from tests.heads import ALGOS, MODULES, random_draft
from tests.state_tensors import pool_tensors, state_tensors, worker_tensors
from tests.test_attach import greedy, ragged_prompts
from tests.tiny_models import DEVICE, VOCAB, tiny_model

TOLERANCE = 1e-4 if DEVICE.type == "cuda" else 1e-5  # a padded product may sum in another order
PLAIN = None
CHAIN = {"num_steps": 3}
TREE = {"num_steps": 3, "topk": 3, "num_draft_tokens": 10}
SHAPES = [PLAIN, CHAIN, TREE]
IDS = ["plain", "chain", "tree"]
LAWS = {
    "greedy": SamplingParams(),
    "sampled": SamplingParams(temperature=0.9, seed=3),
    "filtered": SamplingParams(temperature=1.1, top_p=0.9, min_p=0.01, seed=4),
    "processed_greedy": SamplingParams(frequency_penalty=0.3, no_repeat_ngram_size=2, logit_bias={5: 2.0}),
    "processed": SamplingParams(temperature=1.1, top_k=40, seed=5, repetition_penalty=1.2, bad_words_ids=[[7], [8, 9]]),
}


@torch.inference_mode(False)  # some tests run within it
def engine_of(model, shape, algo="eagle3", **settings):
    head = random_draft(model, algo).to(DEVICE) if shape else None
    # Prefills have their own tests.
    kinds = ("greedy", "sampled", "filtered")
    settings = {"cuda_graph": True, "prefill_graph": "off", "graph_sampling": kinds, **settings}
    settings = {"max_batch": 5, "max_seq_len": 128, **settings}
    return specdec.attach(model, head, **(shape or {}), **settings)


@torch.inference_mode(False)  # some tests run within it
def model_of(name="llama", seed=0):
    return tiny_model(name, seed).to(DEVICE)


def state_of(core):
    """Return every tensor that rounds write, by name."""
    pools = pool_tensors(core.context.pool, "target")
    return {**state_tensors(core.state), **pools, **worker_tensors(core.round.worker)}


def past_prefill(engine, law, num_rounds=2):
    """Return the core and its live rows [5], a few rounds into five ragged requests."""
    core = engine._core
    engine.submit(ragged_prompts(), max_new_tokens=60, sampling=law, ignore_eos=True)
    while not core.scheduler.decoding() or any(not r.is_prefilled for r in core.scheduler.running):
        engine.step()
    for _ in range(num_rounds):
        engine.step()
    return core, core.launcher.batch_of(core.scheduler.decoding()).rows


def assert_same(ours, theirs, where):
    ours, theirs = torch.utils._pytree.tree_leaves(ours), torch.utils._pytree.tree_leaves(theirs)
    assert len(ours) == len(theirs)
    for a, b in zip(ours, theirs, strict=True):
        assert (a is None) == (b is None), where
        if a is not None:
            torch.testing.assert_close(
                a, b, rtol=TOLERANCE, atol=TOLERANCE, equal_nan=True, msg=lambda m: f"{where}: {m}"
            )


def outcome(core, call):
    """Return the result of `call` and what it leaves in live rows; then restore the state."""
    state = state_of(core)
    before = {name: t.clone() for name, t in state.items()}
    out = torch.utils._pytree.tree_map_only(torch.Tensor, torch.clone, call())
    after = {name: t.clone() for name, t in state.items()}
    for name, t in state.items():
        t.copy_(before[name])
    dummy = core.config.dummy_row
    for name in {*state_tensors(core.state), "logits", "hidden", "last"} & set(after):
        after[name][dummy] = 0  # padding's row
    for name in after:
        if "[" in name:  # a cache: slot 0 is for padding
            after[name][0] = 0
    return out, [after[name] for name in sorted(after)]


@torch.inference_mode()
@pytest.mark.parametrize("kind", GRAPH_SAMPLING)
@pytest.mark.parametrize("shape", SHAPES, ids=IDS)
@pytest.mark.parametrize("algo", [*ALGOS, MODULES])
def test_replay_equals_eager_for_every_runner_and_batch(algo, shape, kind):
    """Batches 1, bucket-1, bucket, bucket+1 and above the largest; every runner against the callable it captured."""
    if shape is PLAIN and algo != "eagle3":
        pytest.skip("plain decoding is one graph anyway")
    if kind not in ("greedy", "sampled") and algo != "eagle3":
        pytest.skip("filters and processors are the target's matter")
    engine = engine_of(model_of(), shape, algo, graph_batches=(1, 2, 4), graph_sampling=kind)
    core, every = past_prefill(engine, LAWS[kind])
    program, runners, counters = core.round, core.graphs.runners, core.counters.runners
    for num in (1, 2, 3, 4, 5):
        rows = every[:num]
        for name, runner in runners.items():
            replays = counters[name].replays
            if name == "first_token":
                hidden = torch.randn(num, program.target.spec.hidden_size, device=DEVICE)
                inputs = {"rows": rows, "hidden": hidden}
                logits = program.target.head(hidden)
                eager = lambda rows=rows, logits=logits: program.first_tokens(kind, rows, logits)  # noqa: E731
            elif name == "draft_begin":
                states = torch.randn(num, program.worker.hidden_size, device=DEVICE)
                inputs = {"rows": rows, **({"states": states} if states.numel() else {})}
                eager = lambda inputs=inputs: program.begin(**inputs)  # noqa: E731
            else:
                inputs, eager = {"rows": rows}, lambda rows=rows: program.play(kind, rows)
            ours = outcome(core, lambda runner=runner, inputs=inputs: runner(kind, inputs))
            assert_same(ours, outcome(core, eager), f"{name} of {num}")
            assert counters[name].replays == replays + (num <= 4), f"{name} of {num} must replay, above the largest not"


@pytest.mark.parametrize("shape", SHAPES, ids=IDS)
@pytest.mark.parametrize("name", ["llama", "gpt_oss"])
def test_text_does_not_depend_on_graphs(name, shape):
    model, prompts = model_of(name), ragged_prompts()
    laws = [list(LAWS.values())[i % 3] for i in range(len(prompts))]
    texts = {}
    for graphs in (False, True):
        engine = engine_of(model, shape, cuda_graph=graphs, strict=graphs)
        texts[graphs] = [engine.generate(prompts, max_new_tokens=16, sampling=s).tokens for s in (None, laws)]
        report = engine.report()
        if graphs:
            rounds = [c for name, c in report.runners.items() if "prefill" not in name]
            assert all(c["replays"] and not c["eager"] for c in rounds)
            mode = "TARGET_VERIFY" if shape else "DECODE"
            assert report.paths[mode]["replays"] and not report.paths[mode]["eager"]
        engine.check_integrity()
        engine.detach()
    assert texts[True] == texts[False]
    assert texts[True][0] == [greedy(model, p, 16) for p in prompts]


@pytest.mark.parametrize("shape", SHAPES, ids=IDS)
def test_poison_in_padding_changes_nothing(shape):
    """NaN in the dummy slot and the dummy row, arbitrary values in the padding of input buffers."""
    model, prompts = model_of("gpt_oss"), ragged_prompts()[:3]
    engine = engine_of(model, shape, graph_batches=(4,), strict=True)
    laws = list(LAWS.values())[:3]
    expected = engine.generate(prompts, max_new_tokens=12, sampling=laws).tokens
    core = engine._core
    step = core.step

    @torch.inference_mode()
    def poisoned_step(*waiting_for):
        for name, t in state_of(core).items():
            if "[" in name:
                t[0] = float("nan")
            elif t.is_floating_point() and t.dim() == 2 and name in ("logits", "hidden"):
                t[core.config.dummy_row] = float("nan")
        for runner in core.graphs.runners.values():
            for t in runner._buffers.tensors.values():
                if t is core.graphs.rows:  # rounds have no copy of its first rows
                    t = t[len(core.launcher._batch.requests) :]
                t.fill_(float("nan") if t.is_floating_point() else True if t.dtype is torch.bool else 1 << 40)
        step()

    core.step = poisoned_step
    assert engine.generate(prompts, max_new_tokens=12, sampling=laws).tokens == expected


@pytest.mark.parametrize("shape", [TREE, CHAIN] if DEVICE.type == "cuda" else [TREE])
def test_batches_that_shrink_and_grow(shape):
    """200 random changes of the batch; every text is the target's own, whatever runs beside it."""
    model, rng = model_of(), random.Random(7)
    prompts = [[rng.randrange(3, VOCAB) for _ in range(rng.randrange(1, 20))] for _ in range(12)]
    texts = [greedy(model, p, 24) for p in prompts]
    engine = engine_of(model, shape, max_batch=6, graph_batches=(1, 2, 4, 6), strict=True)
    core, jobs = engine._core, []
    num_changes, last = 0, 0
    while num_changes < 200:
        if rng.random() < 0.3:
            which, limit = rng.randrange(len(prompts)), rng.randrange(1, 25)
            (request,) = engine.submit([prompts[which]], max_new_tokens=limit)
            jobs.append((request, which, limit))
        running = [r for r in core.scheduler.running if r.is_running]
        if running and rng.random() < 0.03:
            engine.abandon([rng.choice(running)])
        engine.step()
        num_changes += len(core.scheduler.decoding()) != last
        last = len(core.scheduler.decoding())
    while engine.step():
        pass
    engine.check_integrity()
    finished = [job for job in jobs if job[0].finish_reason]
    assert len(finished) > 40
    for request, which, limit in finished:
        assert request.tokens == texts[which][:limit]
    assert core.counters.runners["round"].replays > 200 and not core.counters.runners["round"].eager


def test_two_engines_never_meet():
    models = [model_of("llama"), model_of("gpt_oss")]
    prompts = ragged_prompts()[:2]
    expected = [[greedy(m, p, 20) for p in prompts] for m in models]
    engines = [engine_of(m, s, strict=True) for m, s in zip(models, (CHAIN, TREE), strict=True)]
    requests = [engine.submit(prompts, max_new_tokens=20) for engine in engines]
    while any([engine.step() for engine in engines]):
        pass
    assert [[r.tokens for r in own] for own in requests] == expected
    engines[0].detach()
    assert engines[1].generate(prompts, max_new_tokens=20).tokens == expected[1]


def test_an_error_in_a_replay_leaves_the_engine_able():
    model, prompts = model_of(), ragged_prompts()[:2]
    engine = engine_of(model, CHAIN, strict=True)
    runner = list(engine._core.graphs.runners.values())[-1]
    graphs = [c.graph for c in runner.captured.values()]
    before = [g.replay for g in graphs]
    calls = []

    def fail():
        calls.append(1)
        raise RuntimeError("a replay went wrong")

    for graph in graphs:
        graph.replay = fail
    with pytest.raises(RuntimeError, match="a replay went wrong"):
        engine.generate(prompts, max_new_tokens=12)
    for graph, replay in zip(graphs, before, strict=True):
        graph.replay = replay
    assert calls == [1]
    engine.check_integrity()
    assert engine.generate(prompts, max_new_tokens=12).tokens == [greedy(model, p, 12) for p in prompts]
    assert engine.report().num_free_pages == engine.report().num_pages


@pytest.mark.parametrize("where", ["round", "prefill"])
def test_an_error_in_one_callers_step_reaches_every_caller(where):
    """Two streams alternate and the second one's step raises: neither hangs, neither gets a wrong text."""
    model, prompts = model_of(), ragged_prompts()
    engine = engine_of(model, CHAIN)
    runs = []
    for prompt in prompts[:2]:
        requests = engine._requests([prompt], max_new_tokens=20)
        runs.append((engine._run(requests), requests[0]))
    (first, one), (second, two) = runs
    if where != "prefill":
        for _ in range(3):
            next(first), next(second)
    core = engine._core
    replays = [(c.graph, "replay") for c in core.graphs.runners["round"].captured.values()]
    broken = {"round": replays, "prefill": [(core.target, "layers")]}[where]
    before = [getattr(*place) for place in broken]
    for place in broken:
        setattr(*place, lambda *args: (_ for _ in ()).throw(RuntimeError("it broke")))
    if where == "prefill":
        core.scheduler.add([one])
        core.scheduler.admit()
    with pytest.raises(RuntimeError, match="it broke"):
        for _ in range(8):
            next(second)
    for place, old in zip(broken, before, strict=True):
        setattr(*place, old)
    assert one.finish_reason == two.finish_reason == "error"
    if where != "prefill":
        with pytest.raises(RuntimeError, match="it broke"):
            next(first)
    engine.check_integrity()
    assert engine.generate(prompts, max_new_tokens=12).tokens == [greedy(model, p, 12) for p in prompts]


def test_an_error_over_one_callers_text_ends_that_request_alone():
    model, prompts = model_of(), ragged_prompts()
    engine = engine_of(model, CHAIN)
    runs = []
    for prompt in prompts[:2]:
        requests = engine._requests([prompt], max_new_tokens=20)
        runs.append((engine._run(requests), requests[0]))
    (first, one), (second, two) = runs
    for _ in range(2):
        next(first), next(second)
    one.take = lambda *_: (_ for _ in ()).throw(LookupError("it broke"))
    for _ in second:
        pass
    assert two.tokens == greedy(model, prompts[1], 20)
    with pytest.raises(LookupError, match="it broke"):
        list(first)
    engine.check_integrity()
    assert engine.report().num_free_pages == engine.report().num_pages


def test_results_read_late_from_graphs_change_nothing():
    """CUDA's order on a CPU: a round is launched, over the same outputs, before the previous results are read."""
    model, prompts = model_of(), ragged_prompts()
    limits = [7, 30, 1, 12, 30]
    expected = [greedy(model, p, n) for p, n in zip(prompts, limits, strict=True)]
    engine = engine_of(model, CHAIN, max_batch=2, strict=True, max_prefill_tokens=9)
    engine._core._lag = 1
    assert engine.generate(prompts, max_new_tokens=limits).tokens == expected
    core = engine._core
    for name in ("seq_lens", "remaining"):
        assert int(getattr(core.state, name)[core.config.dummy_row]) == 0, name


@pytest.mark.parametrize("shape", [CHAIN, TREE], ids=["chain", "tree"])
def test_padding_leaves_the_dummy_row_alone_and_passes_debug_checks(shape, monkeypatch):
    monkeypatch.setenv("SPECDEC_DEBUG", "1")
    engine = engine_of(model_of(), shape, graph_batches=(5,), strict=True)
    engine.generate(ragged_prompts()[:3], max_new_tokens=10, sampling=list(LAWS.values())[:3])
    core = engine._core
    assert int(core.state.seq_lens[core.config.dummy_row]) == int(core.state.remaining[core.config.dummy_row]) == 0
    assert not core.mailbox._pending or core._lag


def test_a_mixed_batch_is_served_as_its_hottest_request_needs():
    model, prompts = model_of(), ragged_prompts()[:2]
    law = SamplingParams(temperature=0.9, seed=11)
    engine = engine_of(model, CHAIN, strict=True)
    alone = engine.generate(prompts[1:], max_new_tokens=12, sampling=[law]).tokens
    both = engine.generate(prompts, max_new_tokens=12, sampling=[SamplingParams(), law]).tokens
    assert both == [greedy(model, prompts[0], 12), alone[0]]
    rows = torch.tensor([0], device=DEVICE)
    assert engine._core.round.batch("sampled", rows).sampling.has_filters is False
    assert engine._core.round.batch("filtered", rows).sampling.has_filters is True


def test_bounds_of_the_length_follow_what_was_read():
    engine = engine_of(model_of(), CHAIN, cuda_graph=False)
    core = engine._core
    core._lag = 0
    bounds, play = [], core.graphs.play
    core.graphs.play = lambda kind, rows, bound, *rest: (bounds.append(bound), play(kind, rows, bound, *rest))[1]
    requests = engine.submit(ragged_prompts(), max_new_tokens=30, ignore_eos=True)
    while any(r.finish_reason is None for r in requests):
        lens = [len(r.prompt_ids) + len(r.tokens) - 1 for r in core.scheduler.decoding()]
        num_before = len(bounds)
        engine.step()
        if len(bounds) > num_before:
            assert max(lens) <= bounds[-1] < max(lens) + 32
    assert bounds and all(b % 32 == 0 or b == core.slot_tables.table.shape[1] for b in bounds)


def test_a_batch_above_the_largest_bucket():
    model, prompts = model_of(), ragged_prompts()
    expected = [greedy(model, p, 8) for p in prompts]
    engine = engine_of(model, CHAIN, graph_batches=(2,))
    assert engine.generate(prompts, max_new_tokens=8).tokens == expected
    rejects = engine.report().runners["round"]["rejects"]
    assert list(rejects) == ["the batch is larger than the largest bucket"]
    assert "larger than the largest bucket" in str(engine.report())
    engine.detach()
    with pytest.warns(UserWarning, match="larger batches, up to max_batch=5, will raise"):
        engine = engine_of(model, CHAIN, graph_batches=(2,), strict=True)
    with pytest.raises(GraphError, match="of 5 requests cannot replay"):
        engine.generate(prompts, max_new_tokens=8)
    assert engine.generate(prompts[:2], max_new_tokens=8).tokens == expected[:2]
    engine.check_integrity()


def test_kinds_that_were_not_captured_run_eagerly_or_as_a_later_kind():
    model, prompts = model_of(), ragged_prompts()[:1]
    engine = engine_of(model, CHAIN, graph_sampling="greedy")
    engine.generate(prompts, max_new_tokens=6, sampling=LAWS["sampled"])
    rejects = engine.report().runners["round"]["rejects"]
    assert list(rejects) == ["variant 'sampled' was not captured"]
    engine.detach()
    law = LAWS["sampled"]
    engine = engine_of(model, CHAIN, graph_sampling=("filtered", "filtered"), strict=True)
    texts = [engine.generate(prompts, max_new_tokens=6, sampling=s).tokens for s in (None, law)]
    graphs = [(g.runner, g.size) for g in engine.report().graphs]
    assert len(graphs) == len(set(graphs))
    engine.detach()
    engine = engine_of(model, CHAIN, cuda_graph=False)
    assert texts == [engine.generate(prompts, max_new_tokens=6, sampling=s).tokens for s in (None, law)]


def test_the_least_kind_that_serves_a_batch():
    assert SamplingKind.of([LAWS["greedy"]]) == "greedy"
    assert SamplingKind.of([LAWS["greedy"], LAWS["sampled"]]) == "sampled"
    assert SamplingKind.of([LAWS["filtered"], LAWS["sampled"]]) == "filtered"
    assert SamplingKind.of([SamplingParams(top_k=3)]) == "greedy"
    assert tuple(SamplingKind) == GRAPH_SAMPLING + CONSTRAINED


def test_detach_frees_everything_at_once():
    model = model_of()
    engine = engine_of(model, CHAIN)
    engine.generate(ragged_prompts()[:2], max_new_tokens=4)
    gc.collect()
    gc.disable()
    try:
        pool = weakref.ref(engine._core.context.pool)
        engine.detach()
        assert pool() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("shape", [CHAIN, TREE], ids=["chain", "tree"])
@pytest.mark.parametrize("graphs", [False, True], ids=["eager", "graphs"])
def test_synthetic_acceptance_keeps_its_rates(shape, graphs):
    rates = (0.8, 0.5, 0.2)
    settings = {"max_batch": 32, "graph_batches": (32,), "cuda_graph": graphs, "synthetic_acceptance": rates}
    with pytest.warns(UserWarning, match="texts are meaningless"):
        engine = engine_of(model_of(), shape, **settings)
    out = engine.generate([[7, 8, 9]] * 96, max_new_tokens=60, ignore_eos=True)
    assert all(len(t) == 60 for t in out.tokens)
    assert out.stats.acceptance_at == pytest.approx(rates, abs=0.03)  # a request's last round is trimmed
    assert engine.report().config["synthetic_acceptance"] == rates


def test_imposed_paths_on_a_hand_made_output():
    """Draws against rates (0.8, 0.5), over five nodes: the last two stand in for depths 1 and 2."""
    nodes = torch.tensor([[10, 11, 12, 13, 14]]).repeat(4, 1)
    tree = Tree(nodes, nodes * 0, nodes * 0, nodes * 0)
    lens = torch.tensor([1, 3, 2, 1])
    tokens = torch.tensor([[7, -1, -1], [11, 12, 7], [11, 7, -1], [0, -1, -1]])
    invalid = torch.tensor([False, False, False, True])
    verified = VerifyOutput(torch.zeros(4, 3, dtype=torch.int64), lens, tokens, invalid)
    rates, u = torch.tensor([0.8, 0.5]).double(), torch.tensor([0.4, 0.6, 0.9, 0.1]).double()
    imposed = impose_acceptance(verified, tree, rates, u)
    assert imposed.accept_lens.tolist() == [3, 2, 1, 1]
    assert imposed.tokens.tolist() == [[13, 14, 7], [13, 7, -1], [7, -1, -1], [0, -1, -1]]
    assert imposed.accept_index.tolist() == [[0, 3, 4], [0, 3, -1], [0, -1, -1], [0, -1, -1]]
    assert imposed.invalid.tolist() == invalid.tolist()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"cuda_graph": 1}, "cuda_graph=1: expected one of"),
        ({"strict": None}, "strict=None: expected one of"),
        ({"strict": True, "cuda_graph": False}, "strict refuses to run eagerly"),
        ({"graph_batches": ()}, "graph_batches"),
        ({"graph_sampling": ("greedy", "hot")}, r"graph_sampling=.*item 1 is 'hot'\): expected one of"),
        ({"graph_batches": 8}, "graph_batches=8: expected a list"),
        ({"graph_sampling": None}, "graph_sampling=None: expected .* or a list of one or more of"),
        ({"synthetic_acceptance": 0.8}, "expected a list of shares"),
        ({"synthetic_acceptance": (True, 0.4, 0.3)}, r"item 0 is True\): expected a list of shares"),
        ({"synthetic_acceptance": ("0.5", "0.4", "0.3")}, "expected a list of shares"),
        ({"synthetic_acceptance": (0.5, 0.4, 0.3), "topk": 2, "num_draft_tokens": 3}, "no more than 2 drafts"),
        ({"synthetic_acceptance": (0.5, 0.4)}, "expected num_steps=3 non-increasing shares"),
        ({"synthetic_acceptance": (0.5, 0.6, 0.1)}, "non-increasing shares"),
        ({"synthetic_acceptance": (1.2, 0.6, 0.1)}, "shares of rounds from 1 to 0"),
    ],
)
def test_settings_out_of_range_are_named(settings, message):
    with pytest.raises(ValueError, match=message):
        engine_of(model_of(), {**CHAIN, **settings}) if "topk" in settings else engine_of(model_of(), CHAIN, **settings)


def test_memory_is_counted_before_anything_is_allocated():
    gib = 2**30
    needs = {"KV pool": (8 * gib, "max_batch or max_seq_len"), "states": (gib, "num_draft_tokens")}
    resident = {"weights": 15 * gib}
    check_fits(needs, resident, 9 * gib)
    check_fits(needs, resident, None)  # the free memory is unknown
    with pytest.raises(CapacityError) as caught:
        check_fits(needs, resident, 5 * gib)
    assert str(caught.value) == (
        "the engine needs 9.00 GiB (KV pool 8.00 GiB, states 1.00 GiB) and 5.00 GiB are available (on the device "
        "already: weights 15.00 GiB); lower max_batch or max_seq_len"
    )


def test_an_engine_that_cannot_fit_is_refused_and_leaves_the_model_alone(monkeypatch):
    monkeypatch.setattr("specdec.reach.assembly.memory.free_bytes", lambda device: 1 << 20)
    model = model_of()
    with pytest.raises(CapacityError, match=r"the engine needs .* \(KV pool .*, the draft's KV pool .*\)"):
        engine_of(model, CHAIN, max_batch=64)
    monkeypatch.undo()
    engine_of(model, CHAIN).detach()


def test_graphs_are_off_on_a_cpu_unless_wanted():
    assert EngineConfig().cuda_graph is None
    with pytest.raises(ValueError, match="strict=True on cpu, where graphs are off"):
        specdec.attach(tiny_model("llama"), max_batch=1, strict=True)
    report = specdec.attach(tiny_model("llama"), max_batch=1).report()
    assert report.capture == "eager" and report.graphs == [] and report.graph_bytes == 0
