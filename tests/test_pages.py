"""Pages on demand: requests hold what they need now; preempted ones continue later, with the same text."""

import copy
import itertools
import random

import pytest
import torch

import specdec
from specdec.core.sampling_params import SamplingParams
from tests.faults import Letters, missing_pages
from tests.heads import ALGOS, MODULES, random_draft
from tests.recurrent_models import recurrent_model
from tests.test_attach import greedy
from tests.test_scheduler import admitted, request_of, rows_of, scheduler_of
from tests.tiny_models import VOCAB, tiny_model

NUM_TOKENS = 24
CHAIN, TREE = {"num_steps": 2}, {"num_steps": 2, "topk": 2, "num_draft_tokens": 5}
LAWS = [
    SamplingParams(),
    SamplingParams(temperature=1.0, seed=1),
    SamplingParams(temperature=0.8, top_k=20, top_p=0.9, seed=2),
    SamplingParams(repetition_penalty=1.3, frequency_penalty=0.4, presence_penalty=0.2, no_repeat_ngram_size=2),
    SamplingParams(temperature=1.2, repetition_penalty=1.1, min_new_tokens=9, bad_words_ids=((5, 6), (7,)), seed=3),
]
KINDS = [
    *((algo, CHAIN) for algo in (*ALGOS, MODULES, "lookup")),
    *((algo, TREE) for algo in (*ALGOS, MODULES)),
    (None, {}),
]


@pytest.fixture(autouse=True)
def small_steps(monkeypatch):
    """Texts here are short, so pages grow in small steps."""
    monkeypatch.setattr("specdec.core.engine.scheduler.GROWTH", 8)


def prompts_of(count, seed=0):
    """Return prompts, every second one with a common prefix."""
    rng = random.Random(seed)
    stem = [rng.randrange(3, VOCAB) for _ in range(9)]
    return [stem * (i % 2) + [rng.randrange(3, VOCAB) for _ in range(rng.randrange(2, 20))] for i in range(count)]


def engine_of(model, algo, **options):
    draft = () if algo in (None, "lookup") else (random_draft(model, algo),)
    name = "nextn" if algo == MODULES else algo
    given = {"max_batch": 4, "max_seq_len": 64, "cuda_graph": False, "logprobs": 1, "digests": True, **options}
    return specdec.attach(model, *draft, algo=name, tokenizer=Letters(), **given)


def same(out, expected):
    """Compare everything that a caller gets of requests, except times."""
    for got, known in zip(out.requests, expected.requests, strict=True):
        assert (got.tokens, got.text, got.finish_reason) == (known.tokens, known.text, known.finish_reason)
        assert got.round_lens == known.round_lens and len(got.digests) == len(got.tokens)
        ours, theirs = (torch.tensor([p.logprob for p in r.logprobs]) for r in (got, known))
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)


def generated(engine, i):
    """Return an engine's output for the i-th prompts."""
    asked = {
        "max_new_tokens": [NUM_TOKENS, 3, 17, 24, 9, 24, 2],
        "sampling": (LAWS * 2)[:7],
        "ignore_eos": i % 2 == 0,
    }
    return engine.generate(prompts_of(7, i), **asked)


def undisturbed(model, algo, options, times=1, **given):
    """Return the output of an engine with enough pages."""
    ample = engine_of(copy.deepcopy(model), algo, **options, **given)
    outs = [generated(ample, i) for i in range(times)]
    assert not ample.report().preemption["preemptions"]
    ample.detach()
    return outs


def compared(model, algo, options, expected, lag=0, prefix_cache=False, **given):
    """Generate with few pages that also go missing at random; return the number of preemptions."""
    engine = engine_of(model, algo, **options, num_slots=90, prefix_cache=prefix_cache, **given)
    engine._core._lag = lag
    missing_pages(engine, random.Random(len(expected)))
    for i, out in enumerate(expected):
        same(generated(engine, i), out)
        engine.check_integrity()
    report = engine.report()
    assert report.num_free_pages == report.num_pages
    engine.detach()
    return report.preemption["preemptions"]


def preempted(model, algo, options, lag=0, prefix_cache=False, times=1, **given):
    """Compare with an engine that never preempts; return the number of preemptions."""
    expected = undisturbed(model, algo, options, times, **given)
    return compared(model, algo, options, expected, lag, prefix_cache, **given)


@pytest.mark.parametrize(("algo", "shape"), KINDS, ids=str)
def test_a_preempted_request_goes_on_with_the_same_text(algo, shape):
    keeps = algo not in (MODULES,)
    assert preempted(tiny_model("llama"), algo, shape, prefix_cache=keeps, lag=1) > 3


def test_it_does_so_without_a_prefix_cache_and_in_pages_and_pieces():
    options = {"page_size": 4, "max_prefill_tokens": 16, "mixed_prefill_tokens": 8}
    assert preempted(tiny_model("llama"), "eagle3", TREE, **options) > 3


def test_it_does_so_with_states_of_recurrent_layers_and_graphs():
    assert preempted(recurrent_model("qwen3_next"), "eagle", CHAIN) > 3
    graphs = {"cuda_graph": True, "strict": True, "prefill_graph": "whole", "prefill_buckets": (1, 2, 4, 8, 16, 32, 64)}
    assert preempted(tiny_model("llama"), "eagle", CHAIN, compiler="eager", **graphs) > 3


@pytest.mark.parametrize("lag", [0, 1])
def test_it_does_so_where_prompts_are_prefilled_ahead_of_their_turn(lag):
    model = tiny_model("llama")
    asked = {"max_new_tokens": [9 + i * 5 % 15 for i in range(40)], "sampling": (LAWS * 20)[:40]}
    ample = engine_of(copy.deepcopy(model), "eagle", **CHAIN, max_batch=16)
    expected = ample.generate(prompts_of(40), **asked)
    ample.detach()
    engine = engine_of(model, "eagle", **CHAIN, max_batch=16, num_slots=560)
    engine._core._lag = lag
    missing_pages(engine, random.Random(0))
    sizes, launcher = [], engine._core.launcher
    play = launcher.round
    launcher.round = lambda requests: sizes.append(len(engine._core.scheduler.running)) or play(requests)
    same(engine.generate(prompts_of(40), **asked), expected)
    assert max(sizes) > 16 and engine.report().preemption["preemptions"] > 3
    engine.check_integrity()
    engine.detach()


@pytest.mark.matrix
@pytest.mark.parametrize(("algo", "shape"), KINDS, ids=str)
def test_a_thousand_of_them(algo, shape):
    model = tiny_model("llama")
    settings = [*itertools.product((0, 1), {False, algo != MODULES})]
    expected = undisturbed(model, algo, shape, times=8 // len(settings))
    assert sum(compared(model, algo, shape, expected, lag, keeps) for lag, keeps in settings) > 100


def test_it_may_go_on_in_another_row_although_nobody_played_a_round_in_between():
    model = tiny_model("llama")
    engine = engine_of(model, "eagle3", max_batch=3, mixed_prefill_tokens=8)
    one = engine.submit([[5, 6, 7]], max_new_tokens=20, ignore_eos=True)[0]
    for _ in range(3):
        engine.step()
    row, scheduler = one.row, engine._core.scheduler
    engine.submit([list(range(3, 43))], max_new_tokens=1, priority=1)
    engine.step()
    missing_pages(engine, random.Random(0), 1.0)
    engine.step()
    del scheduler.grow
    engine._core.slot_tables._free_rows.reverse()
    assert one.row is None and engine.step() and one.row != row
    while engine.step():
        pass
    assert one.tokens == greedy(model, [5, 6, 7], 20) and scheduler.preemption["preemptions"] == 1
    engine.detach()


def test_streams_and_stop_strings_do_not_notice():
    model = tiny_model("llama")
    engine = engine_of(model, "eagle3", num_slots=70)
    missing_pages(engine, random.Random(0))
    prompts = prompts_of(4)
    expected = [Letters().decode(greedy(model, p, NUM_TOKENS)) for p in prompts]
    streams = [engine.stream(p, max_new_tokens=NUM_TOKENS, ignore_eos=True) for p in prompts]
    texts = [""] * 4
    for _ in range(NUM_TOKENS * 4):
        for i, stream in enumerate(streams):
            texts[i] += next(stream, "")
    assert texts == expected
    stops = [text[9:12] for text in expected]
    for i, stop in enumerate(stops):
        out = engine.generate(prompts, max_new_tokens=NUM_TOKENS, stop=stop, ignore_eos=True)
        assert out.texts[i] == expected[i][: expected[i].find(stop)]
    assert engine.report().preemption["preemptions"] > 10 and "prefilled again" in str(engine.report())
    engine.check_integrity()
    engine.detach()


def test_a_pool_runs_three_times_as_many_requests_as_if_all_slots_were_reserved(monkeypatch):
    """2,048 tokens are allowed and 350 used on average, after prompts of 500, in a pool of 65,536 slots."""
    monkeypatch.undo()
    rng, scheduler = random.Random(0), scheduler_of(max_batch=128, num_slots=65536, width=2600)
    lens, counts = {}, []
    for _ in range(1500):
        while len(scheduler.waiting) < 8:
            request = request_of([0] * 500, 2048)
            lens[request] = min(2048, 1 + int(rng.expovariate(1 / 350)))
            scheduler.add([request])
        scheduler.admit()
        for request in scheduler.running:
            request.num_prefilled = request.num_to_prefill
        while not scheduler.grow(scheduler.decoding(), ahead=4):
            scheduler.preempt()
        for request in scheduler.decoding():
            request.tokens.append(1)
            if len(request.tokens) >= lens[request]:
                request.finish_reason = "eos"
                scheduler.release(request)
        counts.append(len(scheduler.running))
    reserved = 65536 // scheduler.slots_needed(500, 2048)
    assert sum(counts[700:]) / 800 > 2.95 * reserved
    assert scheduler.preemption["recomputed_tokens"] < 0.15 * sum(counts), "of those emitted"


def test_what_is_allowed_costs_nothing_until_it_is_used():
    scheduler = scheduler_of(max_batch=8, num_slots=1000, width=500)
    one, two = request_of(max_new_tokens=400), request_of(max_new_tokens=4)
    assert admitted(scheduler, one, two) == [True, True]
    assert scheduler.slot_tables.num_free_pages == 1000 - (3 + 8 + 3) - (3 + 4 + 3)


def test_rows_grow_by_one_copy_and_all_or_none_do():
    scheduler = scheduler_of(max_batch=2, num_slots=40, page_size=4, width=30)
    tables, rows = scheduler.slot_tables, [0, 1]
    assert [tables.reserve(n) for n in (5, 9)] == rows
    tables.write(*rows_of(tables, rows))
    before = tables.table.clone()
    assert not tables.grow({0: 30, 1: 30}) and torch.equal(before, tables.table)
    assert tables.grow({0: 12, 1: 12}) and tables.num_slots(0) == 12
    assert tables.grow({0: 28}) and not tables.grow({1: 13}) and tables.num_free_pages == 0
    tables.check_integrity()
    assert torch.equal(before[1], tables.table[1]) and len(set(tables.table[0, :28].tolist())) == 28


def test_kept_prefixes_go_first_then_the_youngest_of_the_lowest_priority():
    scheduler = scheduler_of(max_batch=4, num_slots=60, keeps=True)
    kept = request_of(range(20), 1)
    admitted(scheduler, kept)
    kept.num_prefilled, kept.tokens = 20, [1]
    scheduler.release(kept)
    old, young, urgent = (request_of([i] * 3, 100) for i in (50, 51, 52))
    for request in (old, young, urgent):
        request.max_new_tokens = 9
    urgent.priority = 1
    assert admitted(scheduler, old, young, urgent) == [True] * 3
    for request in (old, young, urgent):
        request.max_new_tokens, request.num_prefilled = 40, 3
    assert scheduler.grow([old], 0) and scheduler.grow([young], 9) and scheduler.slot_tables.prefixes.num_pages > 0
    assert scheduler.grow([old, young], 15) or scheduler.slot_tables.prefixes.num_pages == 0
    scheduler.preempt()
    assert list(scheduler.waiting) == [young] and scheduler.running == [urgent, old]
