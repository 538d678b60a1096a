"""Which requests get rows, prefills and pages first: new ones, short prompts, unrelated prompts, priorities."""

import pytest
import torch

import specdec
from specdec.core.engine.ranked import RankedCore
from tests.test_attach import greedy
from tests.test_scheduler import admitted, request_of, scheduler_of
from tests.tiny_models import tiny_model

MODEL = tiny_model("llama")


def engine_of(**options):
    return specdec.attach(MODEL, **{"max_batch": 8, "max_seq_len": 400, "prefix_cache": True, **options})


def steps_until(engine, is_so, most=200):
    """Step until `is_so()`; return the number of steps."""
    return next((n for n in range(1, most) if engine.step() is not None and is_so()), most)


def text_of(length, seed=0):
    return torch.randint(3, 90, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def test_newcomers_get_a_free_row_within_four_rounds():
    """Also the second of two if a batch of 32 has one free row: it is prefilled ahead of its turn."""
    engine = engine_of(max_batch=32, prefix_cache=False)
    engine.submit([[3, 4, 5 + i] for i in range(31)], max_new_tokens=100, ignore_eos=True)
    for _ in range(3):
        engine.step()
    new = engine.submit([[9, 8, 7]] * 2, max_new_tokens=1, ignore_eos=True)
    assert steps_until(engine, lambda: new[0].finish_reason, 9) <= 4
    assert steps_until(engine, lambda: new[1].finish_reason, 9) <= 4
    engine.detach()


def test_prompts_of_a_full_large_batch_are_prefilled_together_ahead_of_their_turn():
    """Four rows beside 32: at least three prompts per prefill, and rounds of 32 requests while there are as many."""
    graphs = {"cuda_graph": True, "strict": True, "graph_batches": (32,), "graph_sampling": "greedy"}
    given = {
        **graphs,
        "prefill_graph": "breakable",
        "prefill_buckets": (2, 4, 8, 16, 32, 64, 128),
        "prefix_cache": False,
    }
    engine, sizes, rounds = engine_of(max_batch=32, **given), [], []
    launcher = engine._attached().launcher
    prefill, play = launcher.prefill, launcher.round
    launcher.prefill = lambda pieces: sizes.append(len(pieces)) or prefill(pieces)
    launcher.round = lambda requests: rounds.append(len(requests)) or play(requests)
    prompts = [[3, 4, 5 + i] for i in range(80)]
    lengths = [2 + i * 7 % 23 for i in range(80)]
    out = engine.generate(prompts, max_new_tokens=lengths, ignore_eos=True)
    assert out.tokens == [greedy(MODEL, p, n) for p, n in zip(prompts, lengths, strict=True)]
    assert sizes[:2] == [32, 4] and sum(sizes) == 80 and min(sizes[1:-1]) >= 3
    assert set(rounds[: len(rounds) // 2]) == {32}
    engine.check_integrity()
    engine.detach()


@pytest.mark.parametrize("shares", [True, False])
def test_a_stranger_passes_a_long_prompt_and_one_that_waits_for_its_beginning(shares):
    """A request decodes, so prompts are prefilled 16 tokens at a time; the long ones take 30 such pieces each."""
    engine = engine_of(mixed_prefill_tokens=16, max_seq_len=512)
    engine.submit([[99] * 3], max_new_tokens=300, ignore_eos=True)
    for _ in range(3):
        engine.step()
    long = text_of(480)
    engine.submit([long], max_new_tokens=1)
    engine.step()
    second = engine.submit([(long[:470] if shares else text_of(470, 1)) + [5]], max_new_tokens=3, ignore_eos=True)[0]
    stranger = engine.submit([[11, 12, 13]], max_new_tokens=1, ignore_eos=True)[0]
    assert steps_until(engine, lambda: stranger.finish_reason) <= 2
    assert stranger.tokens == greedy(MODEL, [11, 12, 13], 1)
    assert (second.row is None) == shares, "it waits for its beginning"
    while second.finish_reason is None:
        engine.step()
    assert second.tokens == greedy(MODEL, second.prompt_ids, 3) and second.num_cached == (470 if shares else 0)
    engine.detach()


def test_a_long_prompt_goes_on_while_short_ones_come():
    """It gets at least half of every piece, and pieces are full."""
    scheduler = scheduler_of(max_batch=8)
    long, *short = [request_of(range(100)), *[request_of(range(3)) for _ in range(5)]]
    assert all(admitted(scheduler, long, *short))
    assert scheduler.next_prefill(16) == [(short[0], 3), (short[1], 3), (long, 10)]
    assert scheduler.next_prefill(1000) == [(long, 100), *[(r, 3) for r in short]]
    assert scheduler.next_prefill(1) == [(long, 1)]
    two = request_of(range(100))
    admitted(scheduler, two)
    assert scheduler.next_prefill(110) == [*[(r, 3) for r in short], (long, 95)]


@pytest.mark.parametrize("order", ["grouped", "interleaved"])
def test_samples_of_many_prompts_take_two_prefills(order):
    engine, prompts = engine_of(max_batch=64), [text_of(100, i) for i in range(16)]
    batch = [p for p in prompts for _ in range(4)] if order == "grouped" else prompts * 4
    out = engine.generate(batch, max_new_tokens=2, ignore_eos=True)
    assert engine.report().paths["EXTEND"]["eager"] == 2
    assert sorted(r.num_cached for r in out.requests) == [0] * 16 + [99] * 48
    assert out.tokens[5] == greedy(MODEL, batch[5], 2)
    engine.check_integrity()
    engine.detach()


def test_what_does_not_fit_anyway_costs_nothing_that_is_kept():
    engine = engine_of(max_batch=4, num_slots=700)
    engine.generate([text_of(100)], max_new_tokens=20, ignore_eos=True)
    kept = engine.report().prefix_cache["kept"]
    one = engine.submit([text_of(390, 1)], max_new_tokens=5, ignore_eos=True)[0]
    engine.step()
    two = engine.submit([text_of(390, 2)], max_new_tokens=5, ignore_eos=True)[0]
    engine.step()
    assert one.row is not None and two.row is None and engine.report().prefix_cache["kept"] >= kept > 100
    while two.finish_reason is None:
        engine.step()
    assert two.tokens == greedy(MODEL, two.prompt_ids, 5)
    engine.check_integrity()
    engine.detach()


def test_a_request_ends_at_its_deadline_with_what_it_has(monkeypatch):
    clock = [100.0]
    monkeypatch.setattr("specdec.core.engine.scheduler.time.perf_counter", lambda: clock[0])
    engine = engine_of(max_batch=1)
    prompt = [7, 8, 9]
    runs, waits = (engine.submit([prompt], max_new_tokens=60, ignore_eos=True, deadline=5)[0] for _ in range(2))
    other = engine.submit([prompt], max_new_tokens=4, ignore_eos=True, deadline=50)[0]
    for _ in range(6):
        engine.step()
    clock[0] += 4.9
    engine.step()
    num = len(runs.tokens)
    assert 3 < num < 60 and runs.finish_reason is waits.finish_reason is None
    clock[0] += 0.1
    engine.step()
    assert runs.finish_reason == waits.finish_reason == "deadline" and waits.tokens == []
    assert num <= len(runs.tokens) < 60 and runs.tokens == greedy(MODEL, prompt, len(runs.tokens))
    while engine.step():
        pass
    assert other.finish_reason == "length" and other.tokens == greedy(MODEL, prompt, 4)
    out = engine.generate([prompt], max_new_tokens=60, ignore_eos=True, deadline=0)
    assert out.finish_reasons == ["deadline"] and out.tokens == [[]]
    assert engine.report().num_free_pages == engine.report().num_pages
    engine.check_integrity()
    with pytest.raises(ValueError, match="deadline: the clocks of ranks differ"):
        RankedCore.submit(engine._core, [runs])
    for wrong in (-1, "soon", True):
        with pytest.raises(ValueError, match=f"deadline={wrong!r}: expected a number from 0 to 1e.09, or None"):
            engine.generate([prompt], deadline=wrong)
    engine.detach()


def test_higher_priorities_go_first_and_equal_ones_in_order():
    engine = engine_of(max_batch=1)
    waiting = [r for p in (0, 0, 5, -1, 5) for r in engine.submit([[7, 8, 9]], max_new_tokens=1, priority=p)]
    ends = []
    while engine.step():
        ends += [i for i, r in enumerate(waiting) if r.finish_reason and i not in ends]
    ends += [i for i in range(5) if i not in ends]
    assert ends == [2, 4, 0, 1, 3]
    for wrong in (1.5, "high", True, None, 1001):
        with pytest.raises(ValueError, match=f"priority={wrong!r}: expected an integer from -1000 to 1000"):
            engine.generate([[7]], priority=wrong)
    engine.detach()
