"""Served texts stay cached for prompts with the same prefix: the same text, from less work, and no page lost."""

import copy

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import specdec
from specdec.core.cache.pages import Pages
from specdec.core.cache.prefix import PrefixCache, keys_of
from specdec.core.config import EngineConfig
from specdec.core.prefill.whole import whole_sizes
from specdec.core.sampling_params import SamplingKind
from tests.heads import ALGOS, MODULES, random_draft
from tests.test_attach import greedy
from tests.tiny_models import DEVICE, VOCAB, model_of

NUM_TOKENS = 10
TEXT = st.lists(st.integers(0, 2), min_size=1, max_size=9)


def prompt_of(length, seed=0):
    return torch.randint(3, VOCAB, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def engine_of(model, algo="eagle3", **options):
    draft = () if algo is None else (None,) if algo == "lookup" else (random_draft(model, algo).to(DEVICE),)
    given = {"max_batch": 3, "max_seq_len": 160, "prefix_cache": True, "cuda_graph": False, **options}
    return specdec.attach(model, *draft, algo=algo, **given)


class Model:
    """A brute-force `PrefixCache`: every kept text, with its pages."""

    def __init__(self, num_pages, page_size):
        self.pages, self.page_size = Pages(num_pages), page_size
        self.cache = PrefixCache(self.pages, page_size)
        self.texts: dict[tuple[int, ...], np.ndarray] = {}
        self.used: list[np.ndarray] = []  # pages in use by others

    def keep(self, text):
        """Do what the engine does: find, take the rest, keep, release."""
        keys, size = np.array(text, dtype=np.int64), self.page_size
        found = self.cache.find(keys)
        self.pages.hold(found)
        need = -(-len(text) // size) - len(found)
        if need > self.pages.num_free:
            self.cache.evict(need - self.pages.num_free)
        own = self.pages.take(need)
        assert own is not None, "what is kept gives way"
        pages = np.concatenate([found, own])
        self.cache.keep(keys, pages)
        self.pages.drop(pages)
        self.pages.check_integrity([*self.cache.held(), *self.used])
        for length in range(size, len(text) + 1, size):
            self.texts.setdefault(tuple(text[:length]), pages[: length // size])

    def found(self, text):
        return self.cache.find(np.array(text, dtype=np.int64))


@settings(deadline=None)
@given(st.lists(TEXT, max_size=12), st.lists(TEXT, min_size=1, max_size=4), st.sampled_from([1, 2, 3]))
def test_the_longest_beginning_is_found_where_it_lies(kept, asked, page_size):
    model = Model(200, page_size)
    for text in kept:
        model.keep(text)
    for text in asked:
        whole = range(len(text) // page_size * page_size, 0, -page_size)
        longest = next((tuple(text[:n]) for n in whole if tuple(text[:n]) in model.texts), ())
        expected = model.texts[longest] if longest else []
        assert model.found(text).tolist() == list(expected)
    model.cache.clear()
    assert model.pages.num_free == 200 and model.cache.num_pages == 0


@settings(deadline=None)
@given(st.lists(TEXT, min_size=1, max_size=20), st.sampled_from([1, 2]))
def test_what_is_kept_gives_way_and_what_is_used_does_not(texts, page_size):
    """A pool slightly larger than one text; the prefix of one is in use all the time."""
    model = Model(12, page_size)
    model.keep([0, 1, 0])
    used = model.found([0, 1, 0])
    model.pages.hold(used)
    model.used = [used]
    for text in texts:
        model.keep(text)
        assert model.found([0, 1, 0]).tolist() == used.tolist()
        num = model.cache.num_evictable
        assert [model.cache.has_evictable(n) for n in range(num + 3)] == [True] * (num + 1) + [False] * 2
    model.cache.clear()
    assert model.pages.num_free == 12 - len(used)


def test_what_was_used_last_goes_last():
    model = Model(12, 1)
    for text in ([1, 1, 1, 1], [2, 2, 2, 2], [3, 3, 3, 3], [1, 1, 1, 1]):
        model.keep(text)
    model.keep([4, 4])
    assert [len(model.found([n] * 4)) for n in (1, 2, 3, 4)] == [4, 2, 4, 2]


def test_room_is_made_for_more_than_is_needed():
    model = Model(64, 1)
    model.keep(list(range(60)))
    model.cache.evict(1)
    assert model.cache.num_pages == 58


def test_keys_say_what_kv_depends_on():
    tokens = np.array([5, 6, 7])
    assert keys_of(tokens, 0).tolist() == [5, 6]
    assert keys_of(tokens, 1).tolist() == [5 << 32 | 6, 6 << 32 | 7]
    assert keys_of(tokens[:1], 1).tolist() == []


def kv_of(engine, request):
    """Return K and V of target and draft at the prompt's positions."""
    core, count = engine._core, len(request.prompt_ids)
    slots = core.slot_tables.table[request.row, :count].long()
    contexts = [c for c in (core.context, core.round.worker.context) if c is not None]
    return [plane[slots] for context in contexts for plane in context.pool.planes]


@pytest.mark.parametrize(("algo", "page_size"), [*((algo, 1) for algo in (*ALGOS, "lookup")), ("eagle", 4), (None, 4)])
def test_text_and_kv_are_those_of_an_engine_that_keeps_nothing(algo, page_size):
    """A conversation, a branch of its first turn, and the same again: only new tokens are prefilled."""
    model = model_of()
    twin = copy.deepcopy(model)
    engines = [engine_of(m, algo, prefix_cache=m is model, page_size=page_size) for m in (model, twin)]
    first = prompt_of(40)
    answer = greedy(model, first, NUM_TOKENS)
    second = [*first, *answer, *prompt_of(15, 1)]
    branch = [*first[:21], *prompt_of(9, 2)]
    conversation = {0: first, 40 + NUM_TOKENS - 1: second, 21: branch, len(second) - 1: second}
    for known, prompt in conversation.items():
        requests = [engine.submit([prompt], max_new_tokens=NUM_TOKENS, ignore_eos=True)[0] for engine in engines]
        for engine, request in zip(engines, requests, strict=True):
            while not request.is_prefilled:
                engine.step()
        (ours, theirs) = (kv_of(engine, request) for engine, request in zip(engines, requests, strict=True))
        for own, other in zip(ours, theirs, strict=True):
            torch.testing.assert_close(own, other, atol=1e-5, rtol=1e-5)
        for engine, request in zip(engines, requests, strict=True):
            while request.finish_reason is None:
                engine.step()
            engine.check_integrity()
        assert requests[0].tokens == requests[1].tokens == greedy(model, prompt, NUM_TOKENS)
        assert requests[0].round_lens == requests[1].round_lens
        seen = engines[0]._core.round.worker.looks_ahead  # where texts diverge, the draft's K/V has another next token
        least = (known - (seen if prompt is branch else 0)) // page_size * page_size
        assert least <= requests[0].num_cached <= known and requests[1].num_cached == 0
    report = engines[0].report()
    assert report.prefix_cache["found"] > 120 and report.num_free_pages == report.num_pages
    assert "tokens cached, hits for" in str(report) and not engines[1].report().prefix_cache
    for engine in engines:
        engine.detach()


def test_many_samples_of_one_prompt_prefill_it_once():
    """Requests that arrive together wait for the first, then reuse its prompt."""
    model = model_of()
    engine = engine_of(model, max_batch=4)
    prompts = [prompt_of(100), prompt_of(30, 1), *[prompt_of(100)] * 3]
    out = engine.generate(prompts, max_new_tokens=NUM_TOKENS, ignore_eos=True)
    assert out.tokens == [greedy(model, p, NUM_TOKENS) for p in prompts]
    assert [r.num_cached for r in out.requests] == [0, 0, 99, 99, 99] and out.stats.num_cached_tokens == 297
    engine.check_integrity()
    engine.detach()


def test_sampled_text_does_not_depend_on_what_is_kept():
    model = model_of()
    kept, fresh = engine_of(model), engine_of(copy.deepcopy(model), prefix_cache=False)
    options = {"do_sample": True, "top_k": 5, "seed": 3, "max_new_tokens": NUM_TOKENS, "ignore_eos": True}
    for length in (30, 50, 50):
        prompt = prompt_of(50)[:length]
        assert kept.generate([prompt], **options).tokens == fresh.generate([prompt], **options).tokens
    assert kept.report().prefix_cache["found"] == 29 + 49
    kept.detach(), fresh.detach()


def test_a_small_pool_makes_room_and_loses_nothing():
    """Prompts with few prefixes, in a pool for two requests at a time; some callers leave early."""
    model, random = model_of(), np.random.default_rng(0)
    engine = engine_of(model, max_seq_len=64, num_slots=150, page_size=2)
    stems = [prompt_of(24, seed) for seed in range(3)]
    for turn in range(12):
        prompts = [[*stems[random.integers(3)], *prompt_of(int(random.integers(1, 9)), turn)] for _ in range(3)]
        if turn % 3 == 2:
            requests = engine.submit(prompts, max_new_tokens=NUM_TOKENS)
            for _ in range(int(random.integers(4))):
                engine.step()
            engine.abandon(requests)
        else:
            out = engine.generate(prompts, max_new_tokens=NUM_TOKENS)
            assert out.tokens == [greedy(model, p, NUM_TOKENS) for p in prompts]
        engine.check_integrity()
    report = engine.report()
    assert report.num_free_pages == report.num_pages and report.prefix_cache["found"] > 200
    engine.detach()


@pytest.mark.parametrize("prefill", ["whole", "piecewise", "breakable"])
def test_it_replays_from_graphs(prefill):
    model, prompt = model_of(), prompt_of(40)
    graphs = {"cuda_graph": True, "prefill_graph": prefill, "prefill_buckets": (1, 8, 64), "strict": True}
    engine = engine_of(model, compiler="eager", graph_sampling=("greedy",), **graphs)
    for text in (prompt, [*prompt[:30], 7, 8, 9], prompt):
        out = engine.generate([text], max_new_tokens=NUM_TOKENS, ignore_eos=True)
        assert out.tokens == [greedy(model, text, NUM_TOKENS)]
    report = engine.report()
    assert report.prefix_cache["found"] == 29 + 39
    assert not any(counts["eager"] for counts in report.runners.values()), report
    assert max(c["replays"] for name, c in report.runners.items() if "prefill" in name) == 3, report
    engine.detach()


def test_prompts_with_a_kept_beginning_are_one_graph_too():
    """Under "auto" whole graphs are for position 0 and 8 tokens on, except where prompts are often cached."""
    short = whole_sizes(EngineConfig(prefix_cache=True))[:4]
    assert short == (1, 2, 4, 8) and whole_sizes(EngineConfig())[0] == 8
    for keeps in (True, False):
        model = model_of()
        graphs = {"cuda_graph": True, "graph_sampling": "greedy", "prefill_buckets": (8, 64)}
        engine = engine_of(model, prefix_cache=keeps, compile=False, **graphs)
        whole = engine._core.prefill.whole
        assert (whole is not None) == (DEVICE.type == "cuda")
        if whole is not None:
            assert whole.can_run(SamplingKind.GREEDY, [5], 8).ok == keeps
        engine.detach()


def test_changed_weights_are_noticed():
    """An optimizer's in-place step invalidates what is cached; so does a replaced weight."""
    model, prompt = model_of(), prompt_of(40)
    engine = engine_of(model, None)

    def found():
        out = engine.generate([prompt], max_new_tokens=NUM_TOKENS, ignore_eos=True)
        assert out.tokens == [greedy(model, prompt, NUM_TOKENS)]
        return out.requests[0].num_cached

    assert [found(), found()] == [0, 39]
    weight = model.model.layers[0].mlp.up_proj.weight.requires_grad_()
    optimizer = torch.optim.SGD([weight], lr=1.0)
    weight.grad = torch.randn_like(weight)
    optimizer.step()
    assert [found(), found()] == [0, 39]
    model.model.layers[0].mlp.up_proj.weight = torch.nn.Parameter(torch.randn_like(weight))
    assert [found(), found()] == [0, 39]
    model.model.layers[0].mlp.up_proj.weight.data.zero_()  # changes no version counter
    engine.clear_prefix_cache()
    assert [found(), found()] == [0, 39]
    engine.detach()


def test_what_runs_while_weights_change_is_not_kept():
    model, prompt = model_of(), prompt_of(40)
    engine = engine_of(model, None)
    request = engine.submit([prompt], max_new_tokens=NUM_TOKENS)[0]
    engine.step()
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight.mul_(3.0)
    engine.generate([prompt_of(5, 1)], max_new_tokens=2)
    while request.finish_reason is None:
        engine.step()
    out = engine.generate([prompt], max_new_tokens=NUM_TOKENS)
    assert out.requests[0].num_cached == 0 and out.tokens == [greedy(model, prompt, NUM_TOKENS)]
    engine.detach()


def test_weights_that_change_while_requests_wait():
    """A waiting request is served with the weights at its admission."""
    model, prompt = model_of(), prompt_of(40)
    engine = engine_of(model, None, max_batch=1)
    requests = engine.submit([prompt, [*prompt, 7]], max_new_tokens=NUM_TOKENS)
    while requests[0].finish_reason is None:
        engine.step()
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight.mul_(3.0)
    while engine.step():
        pass
    assert requests[1].num_cached == 0 and requests[1].tokens == greedy(model, [*prompt, 7], NUM_TOKENS)
    waiting = engine.submit([prompt, prompt], max_new_tokens=NUM_TOKENS)
    engine.step()
    model.model.layers[1] = model.model.layers[2]
    while engine.step():
        pass
    assert waiting[0].finish_reason != "error" and "model.layers.1 (another module)" in str(waiting[1].failure)
    engine.detach()


def test_text_of_logits_that_are_not_finite_is_not_kept():
    model, prompt = model_of(), prompt_of(40)
    engine = engine_of(model, None)
    handle = model.model.norm.register_forward_hook(lambda module, args, out: out * float("nan"))
    with pytest.warns(UserWarning, match="not finite"):
        out = engine.generate([prompt], max_new_tokens=NUM_TOKENS)
    handle.remove()
    assert out.finish_reasons == ["error"] and engine.report().prefix_cache["kept"] == 0
    out = engine.generate([prompt], max_new_tokens=NUM_TOKENS, ignore_eos=True)
    assert out.tokens == [greedy(model, prompt, NUM_TOKENS)] and out.requests[0].num_cached == 0
    engine.detach()


def test_where_nothing_can_be_kept():
    """MTP modules read each other's last states."""
    model = model_of()
    with pytest.raises(ValueError, match="the draft has 3 modules"):
        specdec.attach(model, random_draft(model, MODULES).to(DEVICE), prefix_cache=True)
    with pytest.raises(ValueError, match="prefix_cache='yes': expected one of"):
        engine_of(model, None, prefix_cache="yes")
