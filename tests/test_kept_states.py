"""Prompts of hybrids with a common prefix continue from cached states: the same text, from less work."""

import copy
import random

import numpy as np
import pytest
import torch

import specdec
from specdec.core.cache.prefix import KeptStates
from tests.heads import random_draft
from tests.recurrent_models import recurrent_model
from tests.test_attach import greedy
from tests.test_pages import CHAIN, TREE, preempted
from tests.test_prefix_cache import prompt_of

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
NUM_TOKENS, STEP = 6, 8
SUBJECTS = [("qwen3_next", "eagle", CHAIN), ("mamba2", None, {}), ("qwen3_next", "standalone", TREE)]
SUBJECTS += [("lfm2", "eagle", TREE), ("kimi_linear", "lookup", CHAIN), ("jamba", "eagle3", CHAIN)]


@pytest.fixture(autouse=True)
def short_texts(monkeypatch):
    monkeypatch.setattr("specdec.core.cache.prefix.CHUNK", STEP)
    monkeypatch.setattr("specdec.core.engine.sharing.WORTH_WAITING", STEP)


def engine_of(model, algo, **options):
    given = () if algo in (None, "lookup") else (random_draft(model, algo).to(DEVICE),)
    settings = {"max_batch": 4, "max_seq_len": 96, "prefix_cache": True, **options}
    return specdec.attach(model, *given, algo=algo, **settings)


@pytest.mark.parametrize(("name", "algo", "shape"), SUBJECTS, ids=str)
def test_text_is_that_of_generate(name, algo, shape):
    """A prompt, the same again, one that diverges, and another that diverges there: it uses the third one's state."""
    model = recurrent_model(name).to(DEVICE)
    engine = engine_of(model, algo, page_size=2, **shape)
    stem = prompt_of(30)
    prompts = [
        [*stem, *prompt_of(13, 1)],
        [*stem, *prompt_of(13, 1)],
        [*stem, *prompt_of(9, 2)],
        [*stem, *prompt_of(4, 3)],
    ]
    found = []
    for prompt in prompts:
        out = engine.generate([prompt], max_new_tokens=NUM_TOKENS, ignore_eos=True)
        assert out.tokens == [greedy(model, prompt, NUM_TOKENS)]
        found.append(out.requests[0].num_cached)
        engine.check_integrity()
    assert found == [0, 40, 0, 24]  # of 42; none at 30 or before; the third one's at 24
    assert engine.report().prefix_cache["states"] == 4
    engine.detach()


def test_samples_of_one_prompt_are_prefilled_once_and_changed_weights_are_noticed():
    model = recurrent_model("qwen3_next").to(DEVICE)
    engine, prompt = engine_of(model, "eagle", cuda_graph=False), prompt_of(45)
    sampled = {"do_sample": True, "temperature": 1.0, "seed": 3, "max_new_tokens": NUM_TOKENS, "ignore_eos": True}
    out = engine.generate([prompt] * 5, **sampled)
    assert [r.num_cached for r in out.requests] == [0] + [40] * 4
    twin = engine_of(copy.deepcopy(model), "eagle", cuda_graph=False, prefix_cache=False)
    assert out.tokens == twin.generate([prompt] * 5, **sampled).tokens
    with torch.no_grad():
        model.model.layers[0].mlp.shared_expert.up_proj.weight.mul_(2.0)
    for cached in (0, 40):
        out = engine.generate([prompt], max_new_tokens=NUM_TOKENS, ignore_eos=True)
        assert out.tokens == [greedy(model, prompt, NUM_TOKENS)] and out.requests[0].num_cached == cached
    engine.clear_prefix_cache()
    assert engine.report().prefix_cache["states"] == 0
    engine.detach(), twin.detach()


def test_a_long_text_takes_the_place_of_a_copy_of_its_beginning(monkeypatch):
    """No state was kept within the first text, so the second has its own K/V; again only its end is kept."""
    monkeypatch.setattr("specdec.core.engine.scheduler.GROWTH", STEP)
    model = recurrent_model("lfm2").to(DEVICE)
    engine = engine_of(model, None, cuda_graph=False, max_batch=1)
    first = engine.generate([prompt_of(5)], max_new_tokens=40, ignore_eos=True)
    prompt = [*prompt_of(5), *first.tokens[0], 9, 10]
    out = engine.generate([prompt], max_new_tokens=96 - len(prompt), ignore_eos=True)
    assert out.tokens == [greedy(model, prompt, 96 - len(prompt))] and out.requests[0].num_cached == 0
    engine.check_integrity()
    engine.detach()


def test_prompts_that_come_together_share_what_they_have_in_common():
    """The second waits for the first, whose prefill stops where they diverge."""
    model = recurrent_model("qwen3_next").to(DEVICE)
    engine, stem = engine_of(model, None, cuda_graph=False), prompt_of(29)
    prompts = [[*stem, *prompt_of(10 + i, i + 1)] for i in range(4)]
    out = engine.generate(prompts, max_new_tokens=NUM_TOKENS, ignore_eos=True)
    assert out.tokens == [greedy(model, p, NUM_TOKENS) for p in prompts]
    assert [r.num_cached for r in out.requests] == [0, 24, 24, 24]
    engine.detach()


def test_the_least_recently_used_goes_first_and_those_of_freed_pages_go():
    states = KeptStates(2, page_size=2)
    assert states.step == STEP and states.find(np.arange(1, 20)) == (0, None)
    first, second = states.take(4), states.take(8)
    assert {first, second} == {0, 1} and states.take(4) is None
    assert states.find(np.arange(1, 20)) == (8, second) and states.find(np.arange(1, 8)) == (4, first)
    assert states.take(12) == second and states.find(np.arange(1, 20)) == (12, second)
    states.drop(np.arange(1, 6))
    assert states.find(np.arange(1, 6)) == (0, None) and states.take(16) == first
    states.clear()
    assert not states.places and states.take(4) is not None


@pytest.mark.parametrize(("name", "algo", "shape"), [("qwen3_5", "eagle", CHAIN), ("mamba2", None, {})], ids=str)
def test_preempted_requests_and_few_pages(name, algo, shape):
    assert preempted(recurrent_model(name), algo, shape, times=3, lag=1, prefix_cache=True) > 10


@pytest.mark.parametrize("mode", ["whole", "breakable"])
def test_it_replays_from_graphs(mode):
    model = recurrent_model("qwen3_next").to(DEVICE)
    engine = engine_of(
        model,
        "eagle",
        cuda_graph=True,
        strict=True,
        prefill_graph=mode,
        prefill_buckets=(1, 2, 4, 8, 16, 32, 64, 128),
        compiler="eager",
    )
    rng = random.Random(0)
    for _ in range(6):
        prompts = [prompt_of(40)[: rng.randrange(8, 40)] + prompt_of(9, rng.randrange(3)) for _ in range(3)]
        out = engine.generate(prompts, max_new_tokens=NUM_TOKENS, ignore_eos=True)
        assert out.tokens == [greedy(model, p, NUM_TOKENS) for p in prompts]
    assert engine.report().prefix_cache["found"] > 60
    engine.detach()
