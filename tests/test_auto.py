"""num_steps="auto": rounds of several shapes in one text, drafts that catch up, and the policy's inputs."""

import copy

import pytest
import torch

import specdec
from specdec.core.config import CATCH_UP, EngineConfig, Shape
from specdec.core.engine import tiers as tiers_module
from specdec.core.engine.policy import CostTable
from specdec.core.engine.tiers import Tiers
from tests.heads import ALGOS, MODULES, OracleWorker, poison, random_draft
from tests.laws import assert_own_law
from tests.recurrent_models import recurrent_model
from tests.test_algorithms import FromScratch, check_tree
from tests.test_attach import greedy, ragged_prompts
from tests.test_block import naive_states
from tests.test_scheduler import request_of
from tests.tiny_models import DEVICE, VOCAB, tiny_model

CHAINS = {"num_steps": "auto"}
TREE = {"num_steps": "auto", "topk": 3, "num_draft_tokens": 10, "auto_steps": (1, 3)}
SHAPES = pytest.mark.parametrize("shape", [CHAINS, TREE], ids=["chains", "tree"])
EVERY_ALGO = pytest.mark.parametrize("algo", [*ALGOS, MODULES])
NUM_TOKENS = 60


def engine_of(model, algo, shape=CHAINS, **settings):
    draft = () if algo == "lookup" else (random_draft(model, algo).to(DEVICE) if isinstance(algo, str) else algo,)
    given = {"max_batch": 3, "max_seq_len": 160, "graph_sampling": ("greedy", "filtered"), **shape, **settings}
    return specdec.attach(model, *draft, algo="lookup" if algo == "lookup" else "auto", **given)


def follow(engine, choose):
    """Make choose(round number) pick the tiers."""
    numbers, policy = iter(range(10**6)), engine._core.launcher.tiers.policy
    policy.choose = lambda batch, context: choose(next(numbers))
    policy.keeps_up = lambda batch: True


def vary(engine):
    """Alternate runs of plain rounds, some longer than the kept features, with all other tiers."""
    others, runs = range(1, len(engine.config.shapes)), []
    while len(runs) < 3000:
        for plain, drafted in ((2, 1), (CATCH_UP + 7, 2), (1, 1), (CATCH_UP, 1)):
            runs += [0] * plain
            for tier in others:
                runs += [tier] * drafted + [0]
    follow(engine, lambda number: runs[number])


@pytest.mark.parametrize("graphs", [False, True], ids=["eager", "graphs"])
@SHAPES
@pytest.mark.parametrize("algo", [*ALGOS, MODULES, "lookup"])
def test_greedy_text_is_that_of_generate(algo, shape, graphs):
    if algo == "lookup" and shape is TREE:
        pytest.skip("lookup drafts chains")
    model, prompts = tiny_model("llama").to(DEVICE), ragged_prompts()
    engine = engine_of(model, algo, shape, cuda_graph=graphs, graph_sampling="greedy")
    vary(engine)
    poison(engine) if algo != "lookup" else None
    out = engine.generate(prompts, max_new_tokens=NUM_TOKENS)
    engine.check_integrity()
    report = engine.report()
    engine.detach()
    assert out.tokens == [greedy(model, p, NUM_TOKENS) for p in prompts]
    assert all(tier["rounds"] for tier in report.policy["tiers"].values())
    assert bool(report.policy["catch_ups"]) == (algo != "lookup")
    way, other = ("replays", "eager") if graphs else ("eager", "replays")
    ran = {name: c for name, c in report.runners.items() if name.startswith(("round", "decode", "catch_up"))}
    assert len(ran) == len(engine.config.shapes) + (algo != "lookup")
    assert all(c[way] and not c[other] for c in ran.values()), "what was timed at attach is not counted"


@torch.inference_mode()
@SHAPES
@EVERY_ALGO
def test_drafts_that_have_caught_up_are_what_the_draft_says_from_scratch(algo, shape):
    """After plain rounds, more than are kept, and drafted ones; a new request has nothing to catch up with."""
    with torch.inference_mode(False):
        model = tiny_model("llama").to(DEVICE)
        draft = random_draft(model, algo).to(DEVICE)
    engine = engine_of(model, draft, shape, max_batch=5)
    follow(engine, lambda number: (number % (CATCH_UP + 9)) == 5)
    core, prompts = engine._core, ragged_prompts()
    engine.submit(prompts[1:], max_new_tokens=100, ignore_eos=True)
    for _ in range(CATCH_UP + 12):
        engine.step()
    engine.submit(prompts[:1], max_new_tokens=100, ignore_eos=True)
    for _ in range(3):
        engine.step()
    core.delivery.read(0)
    requests = core.scheduler.decoding()
    assert len(requests) == 5
    behind = [r.num_behind for r in requests]
    assert max(behind) > 4 > 3 >= min(behind) > 0
    rows = core.launcher.batch_of(requests).rows
    core.graphs.catch_up(rows, 160)
    lens = core.state.seq_lens[rows].tolist()
    assert core.round.catch_up.seen[rows].tolist() == lens
    batch = core.round.batch("greedy", rows, 160)
    tree = core.round.worker.draft(batch).tree
    for i, request in enumerate(requests):
        tokens = [*request.prompt_ids, *request.tokens]
        assert len(tokens) == lens[i] + 1
        if algo == "block":  # its drafts follow from these states: see test_block.py
            states, expected = (
                core.round.worker.states(batch)[i],
                naive_states(draft, model, tokens, batch.shape.num_steps),
            )
            torch.testing.assert_close(states, expected, atol=1e-4, rtol=1e-4)
            continue
        check_tree(FromScratch(model, draft, algo, tokens), tree.tokens[i].tolist(), tree.parents[i].tolist(), shape)


def test_a_draft_that_is_always_right_stays_right():
    model = tiny_model("llama").to(DEVICE)
    engine = engine_of(model, copy.deepcopy(model))
    vary(engine)
    out = engine.generate(ragged_prompts(), max_new_tokens=120)
    tiers = engine.report().policy["tiers"]
    engine.detach()
    assert out.tokens == [greedy(model, p, 120) for p in ragged_prompts()]
    assert {name: tier["tokens"] for name, tier in tiers.items()} == {"plain": 1, "1:1:2": 2, "3:1:4": 4, "5:1:6": 6}


@pytest.mark.parametrize("algo", ["standalone", "eagle3", MODULES])
def test_a_draft_that_does_not_follow_plain_rounds_catches_up_later(algo):
    """From tokens it catches up with all of them, from features with the kept ones: the others leave a gap of zeros."""
    model, prompt, num_plain = tiny_model("llama").to(DEVICE), ragged_prompts()[0], 2 * CATCH_UP + 9
    engine = engine_of(model, copy.deepcopy(model) if algo == "standalone" else algo, graph_batches=(3,))
    follow(engine, lambda number: 3 if number >= num_plain else 0)
    core, given = engine._core, {"max_new_tokens": 1 + num_plain + 12, "ignore_eos": True}
    core.launcher.tiers.policy.keeps_up = lambda batch: False
    poison(engine)
    (request,) = engine.submit([prompt], **given)
    while len(request.round_lens) <= num_plain:
        engine.step()
    draft_k, start = core.round.worker.context.pool.k[0], len(prompt)
    row = draft_k[core.slot_tables.table[request.row].long()]
    assert row[: start + num_plain].isfinite().all()
    gap = 0 if algo == "standalone" else num_plain - CATCH_UP
    assert not row[start : start + gap].any() and row[start + gap : start + num_plain].any(2).any(1).all()
    assert engine.report().policy["catch_ups"] == (3 if algo == "standalone" else 1)
    assert len(request.tokens) == 1 + num_plain + 6 or algo != "standalone", "all drafts are right"
    assert core.round.catch_up.seen[request.row] == core.state.seq_lens[request.row]
    engine.step()
    assert request.tokens == greedy(model, prompt, len(request.tokens))
    engine.detach()


@pytest.mark.parametrize("name", ["qwen3_next", "lfm2"])
@SHAPES
def test_recurrent_states_follow_every_shape(name, shape):
    """Plain rounds commit at once, chains and trees after verification; the draft is recurrent too."""
    model, prompts = recurrent_model(name).to(DEVICE), ragged_prompts()
    engine = engine_of(model, recurrent_model(name, 3).to(DEVICE), shape, max_prefill_tokens=7)
    vary(engine)
    out = engine.generate(prompts, max_new_tokens=NUM_TOKENS)
    engine.detach()
    assert out.tokens == [greedy(model, p, NUM_TOKENS) for p in prompts]


def test_trees_and_chains_that_are_accepted_are_committed():
    """The oracle's drafts are right three times in four."""
    model, prompts = tiny_model("llama").to(DEVICE), ragged_prompts()
    texts = [greedy(model, p, NUM_TOKENS) for p in prompts]
    engine = engine_of(model, "eagle3", TREE, cuda_graph=False)
    core = engine._core
    core.round.worker = OracleWorker(engine.config, [p + t for p, t in zip(prompts, texts, strict=True)], VOCAB)
    core.target.aux_layers, core.round.catch_up = (), None
    core.launcher.tiers._reads_features = None
    follow(engine, lambda number: number % len(engine.config.shapes))
    out = engine.generate(prompts, max_new_tokens=NUM_TOKENS)
    assert out.tokens == texts and 1.2 < out.stats.tau < 4


@SHAPES
@pytest.mark.parametrize("algo", ["eagle3", "standalone", "lookup"])
def test_samples_have_the_targets_own_law(algo, shape):
    if algo == "lookup" and shape is TREE:
        pytest.skip("lookup drafts chains")
    model, prompt = tiny_model("llama").to(DEVICE), ragged_prompts()[1]
    engine = engine_of(model, algo, shape, max_batch=250, max_seq_len=40, graph_batches=(250,), cuda_graph=False)
    count = len(engine.config.shapes)
    follow(engine, lambda number: number % count)
    assert_own_law(engine, model, prompt, num_tokens=4)


def test_preempted_requests_go_on_with_the_same_text(monkeypatch):
    monkeypatch.setattr("specdec.core.engine.scheduler.GROWTH", 8)
    model, prompts = tiny_model("llama").to(DEVICE), ragged_prompts()
    expected = [greedy(model, p, NUM_TOKENS) for p in prompts]
    engine = engine_of(model, "eagle3", max_batch=5, num_slots=260)
    vary(engine)
    out = engine.generate(prompts, max_new_tokens=NUM_TOKENS)
    engine.check_integrity()
    assert engine.report().preemption["preemptions"] >= 2
    assert out.tokens == expected


def test_what_the_draft_has_not_seen_is_not_kept_for_others():
    model, prompt = tiny_model("llama").to(DEVICE), ragged_prompts()[0]
    engine = engine_of(model, copy.deepcopy(model), prefix_cache=True)
    follow(engine, lambda number: 0)
    text = engine.generate([prompt], max_new_tokens=CATCH_UP + 10, ignore_eos=True).tokens[0]
    kept = engine.report().prefix_cache["kept"]
    assert kept == len(prompt) + CATCH_UP, "plain rounds 33.. are not seen"
    follow(engine, lambda number: 3)
    out = engine.generate([prompt + text], max_new_tokens=1 + 2 * 6, ignore_eos=True)
    assert out.requests[0].num_cached == kept and out.stats.tau == 6, "all drafts right"


def costs_of(engine, ms):
    """Set a cost table in which rounds of each tier take `ms`, whatever they really take."""
    core = engine._core
    core.launcher.tiers.set_costs(CostTable({3: (ms, ms)}, (1, 2), {3: 0.1}))
    core.launcher.tiers.policy.note_time = lambda *args: None


@pytest.mark.parametrize("is_right", [False, True])
def test_the_policy_hears_what_is_accepted(is_right):
    """Costs are fixed here; a draft that is never right runs only in probes."""
    model = tiny_model("llama").to(DEVICE)
    draft = copy.deepcopy(model) if is_right else random_draft(model, "standalone").to(DEVICE)
    engine = engine_of(model, draft, {"num_steps": "auto", "auto_steps": (2, 5)}, max_seq_len=512)
    costs_of(engine, (4.2, 4.9, 6.0))
    engine.generate(ragged_prompts()[:3], max_new_tokens=400, ignore_eos=True)
    report = engine.report()
    tiers = report.policy["tiers"]
    engine.detach()
    rounds = {name: tier["rounds"] for name, tier in tiers.items()}
    most = "5:1:6" if is_right else "plain"
    assert rounds[most] > 0.8 * sum(rounds.values()), report.policy
    assert tiers["5:1:6"]["expected_tokens"] > 5 if is_right else tiers["5:1:6"]["expected_tokens"] < 1.6
    assert report.policy["probes"] if not is_right else True
    assert tiers[most]["cost_ms"] == {3: 6.0 if is_right else 4.2} and tiers[most]["ms"] > 0
    text = str(report)
    assert f"{most}: {rounds[most]} rounds of " in text and "policy     " in text


def test_a_rounds_time_is_from_the_arrival_before_it_or_its_launch(monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(tiers_module, "perf_counter", lambda: clock[0])
    tiers, told = Tiers(EngineConfig(num_steps="auto", auto_steps=(2,)).shapes, reads_features=True), []
    tiers.set_costs(CostTable({1: ((1, 2), (1, 2))}, (1, 2), {1: 0.1}))
    tiers.policy.choose = lambda batch, context: tier[0]
    tiers.policy.note_time = lambda index, batch, context, ms: told.append((index, ms))
    request, tier = request_of(), [0]
    request.row, request.round_lens = 0, [1]

    def launch(at):
        clock[0] = at
        return tiers.begin([request])

    def arrive(played, at):
        clock[0] = at
        tiers.end(played, [request])

    first, second = launch(1.0), launch(1.5)
    arrive(first, 2.0)  # the first of all: only prefills ran before it
    third = launch(2.5)
    arrive(second, 3.0)
    arrive(third, 4.5)
    arrive(launch(10.0), 10.25)  # the device was idle
    tier[0] = 1
    behind, again = launch(11.0), launch(11.5)
    assert behind.catch_ups == 1 and not again.catch_ups
    arrive(behind, 12.0)
    arrive(again, 13.0)
    tiers.disturb()
    arrive(launch(14.0), 15.0)
    assert told == [(0, 1000.0), (0, 1500.0), (0, 250.0), (1, 1000.0)]


def test_costs_are_measured_on_an_engine_that_they_leave_as_it_was():
    model = tiny_model("llama").to(DEVICE)
    engine = engine_of(model, "eagle3", max_batch=5)
    core, tiers = engine._core, engine.report().policy["tiers"]
    assert list(tiers) == ["plain", "1:1:2", "3:1:4", "5:1:6"]
    assert all(list(tier["cost_ms"]) == [1, 2, 4, 5] and min(tier["cost_ms"].values()) > 0 for tier in tiers.values())
    assert not core.slot_tables.table.any() and not core.state.seq_lens.any() and not core.state.remaining.any()
    assert not any(c.replays or c.eager for c in (*core.counters.runners.values(), *core.counters.forwards.values()))
    text = str(engine.report())
    assert "0 rounds; " in text
    engine.detach()
    engine = engine_of(model, "eagle3", {"num_steps": 2})
    assert engine.report().policy == {} and "policy" not in str(engine.report())
    assert set(engine.report().runners) & {"decode", "catch_up"} == set()
    engine.detach()


def test_settings(monkeypatch):
    config = EngineConfig(num_steps="auto")
    assert config.shapes == (Shape(0, 1, 1), Shape(1, 1, 2), Shape(3, 1, 4), Shape(5, 1, 6)) and config.num_steps == 5
    assert EngineConfig(num_steps="auto", topk=4).shapes[-2:] == (Shape(5, 1, 6), Shape(5, 4, 32))
    assert EngineConfig(num_steps=2).shapes == (Shape(2, 1, 3),)
    with pytest.raises(ValueError, match=r"auto_steps=\(2, 4\) with num_steps=3: expected num_steps='auto'"):
        EngineConfig(auto_steps=(4, 2))
    with pytest.raises(ValueError, match=r"num_draft_tokens=5: expected 6\.\.69 for topk=4, num_steps=5"):
        EngineConfig(num_steps="auto", topk=4, num_draft_tokens=5)
    with pytest.raises(ValueError, match=r"num_steps='Auto': expected 'auto' or an integer from 0 to 255"):
        EngineConfig(num_steps="Auto")
    with (
        monkeypatch.context() as patch,
        pytest.raises(ValueError, match="num_steps='auto': ranks of a sharded model measure different times"),
    ):
        patch.setattr("specdec.api.find_group", lambda model: object())
        specdec.attach(tiny_model("llama"), algo="lookup", num_steps="auto")
    with pytest.raises(ValueError, match="auto_steps, num_steps: plain decoding drafts nothing"):
        specdec.attach(tiny_model("llama"), num_steps="auto", auto_steps=(2,))
