"""Rounds with drafts that are often right: commit, trimming, chunked prefill, stops, poison, sampling."""

import pytest
import torch
from scipy import stats

import specdec
from specdec import SamplingParams
from tests.heads import OracleWorker, poison, random_draft, random_head
from tests.test_attach import greedy, ragged_prompts
from tests.tiny_models import VOCAB, tiny_model

NUM_TOKENS = 30


def oracle_engine(model, prompts, expected, **settings):
    engine = specdec.attach(model, random_head(model), **settings)
    texts = [p + e for p, e in zip(prompts, expected, strict=True)]
    engine._core.round.worker = OracleWorker(engine.config, texts, VOCAB)
    engine._core.target.aux_layers = ()
    return engine


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize(
    "shape", [{"num_steps": 3}, {"num_steps": 4}, {"num_steps": 3, "topk": 3, "num_draft_tokens": 10}]
)
@pytest.mark.parametrize("name", ["llama", "qwen2_windowed", "gpt_oss"])
def test_accepted_drafts_change_nothing(name, shape, page_size):
    model = tiny_model(name)
    prompts = [p for p in ragged_prompts() if len(p) > 1]
    expected = [greedy(model, p, NUM_TOKENS) for p in prompts]
    engine = oracle_engine(model, prompts, expected, max_batch=3, page_size=page_size, **shape)
    out = engine.generate(prompts, max_new_tokens=NUM_TOKENS)
    engine.check_integrity()
    engine.detach()
    assert out.tokens == expected
    assert out.stats.tau > 1.5


def test_chain_tau_is_one_plus_the_acceptance_rates():
    model, prompts = tiny_model("llama"), ragged_prompts()[:2]
    expected = [greedy(model, p, NUM_TOKENS) for p in prompts]
    out = oracle_engine(model, prompts, expected, num_steps=3).generate(prompts, max_new_tokens=NUM_TOKENS)
    assert out.stats.tau == pytest.approx(1 + sum(out.stats.acceptance_at))
    emitted_by_rounds = out.stats.num_tokens - len(prompts)
    assert out.stats.tau == pytest.approx(emitted_by_rounds / out.stats.num_rounds)


@pytest.mark.parametrize("limit", [1, 2, 7])
def test_max_new_tokens_is_exact(limit):
    model, prompt = tiny_model("llama"), ragged_prompts()[0]
    expected = greedy(model, prompt, NUM_TOKENS)
    out = oracle_engine(model, [prompt], [expected], num_steps=4).generate([prompt], max_new_tokens=limit)
    assert out.tokens == [expected[:limit]]
    assert out.finish_reasons == ["length"]


def test_a_stop_id_ends_a_request_inside_an_accepted_path():
    model, prompt = tiny_model("llama"), ragged_prompts()[0]
    expected = greedy(model, prompt, NUM_TOKENS)
    stop = expected[10]
    engine = oracle_engine(model, [prompt], [expected], num_steps=4)
    out = engine.generate([prompt], max_new_tokens=NUM_TOKENS, stop_token_ids=[stop])
    assert out.tokens == [expected[: expected.index(stop) + 1]]
    assert out.finish_reasons == ["stop_id"]


def test_chunked_prefill_equals_one_prefill():
    model, prompts = tiny_model("gemma3"), ragged_prompts()
    outs = []
    for chunk in (8192, 7):
        engine = specdec.attach(model, random_head(model), max_prefill_tokens=chunk, max_batch=5)
        outs.append(engine.generate(prompts, max_new_tokens=NUM_TOKENS))
        engine.detach()
    assert outs[0].tokens == outs[1].tokens
    assert [r.acceptance for r in outs[0].requests] == [r.acceptance for r in outs[1].requests]


@pytest.mark.parametrize("shape", [{"num_steps": 3}, {"num_steps": 3, "topk": 3}])
@pytest.mark.parametrize("name", ["llama", "gpt_oss"])
def test_poisoned_pools_change_nothing(name, shape):
    model, prompts = tiny_model(name), ragged_prompts()
    engine = specdec.attach(model, random_head(model), max_batch=2, **shape)
    expected = engine.generate(prompts, max_new_tokens=NUM_TOKENS).tokens
    poison(engine)
    assert engine.generate(prompts, max_new_tokens=NUM_TOKENS).tokens == expected


def test_a_nan_row_ends_its_request_alone():
    model, prompts = tiny_model("llama"), ragged_prompts()[:3]
    expected = [greedy(model, p, NUM_TOKENS) for p in prompts]
    engine = specdec.attach(model, random_head(model), num_steps=3)
    core, forward = engine._core, engine._core.target.forward

    def spoil_second(context, metadata, ids):
        out = forward(context, metadata, ids)
        if metadata.num_reqs == 3:
            out.logits.view(3, -1, VOCAB)[1] = float("nan")
        return out

    core.target.forward = spoil_second
    with pytest.warns(UserWarning, match="not finite"):
        out = engine.generate(prompts, max_new_tokens=NUM_TOKENS)
    assert out.finish_reasons[1] == "error"
    assert [out.tokens[0], out.tokens[2]] == [expected[0], expected[2]]
    engine.check_integrity()


def test_bans_that_leave_no_token_are_named():
    model = tiny_model("llama")
    with specdec.attach(model) as engine:
        with pytest.warns(UserWarning, match="not finite after 1 tokens, or its bans leave no token"):
            out = engine.generate([[3, 4]], suppress_tokens=range(1, VOCAB), no_repeat_ngram_size=1, max_new_tokens=4)
        assert out.finish_reasons == ["error"] and out.tokens == [[0]]


@pytest.mark.parametrize("shape", [{"num_steps": 3}, {"num_steps": 3, "topk": 3}])
def test_sampled_text_does_not_depend_on_the_batch(shape):
    model, prompts = tiny_model("llama"), ragged_prompts()
    law = SamplingParams(temperature=0.8, top_k=20, top_p=0.9, seed=5)
    outs = []
    for batch in (1, 5):
        engine = specdec.attach(model, random_head(model), max_batch=batch, **shape)
        outs.append(engine.generate(prompts, max_new_tokens=12, sampling=law).tokens)
        engine.detach()
    assert outs[0] == outs[1]
    assert len({tuple(t) for t in outs[0]}) > 1


@pytest.mark.parametrize("shape", [None, {"num_steps": 2}, {"num_steps": 2, "topk": 3}])
def test_engine_samples_the_targets_own_law(shape):
    """Chi-square test over 1500 seeds of the second token (drafted and verified if drafts exist), given the first."""
    model, prompt = tiny_model("llama"), ragged_prompts()[1]
    head = random_head(model, draft_vocab_size=VOCAB) if shape else None
    engine = specdec.attach(model, head, max_batch=250, max_seq_len=64, **(shape or {}))
    law = SamplingParams(temperature=1.0, top_k=4, seed=0)
    out = engine.generate([prompt] * 1500, max_new_tokens=2, sampling=law, ignore_eos=True)
    pairs = torch.tensor(out.tokens)
    first = int(pairs[:, 0].mode().values)
    seconds = pairs[pairs[:, 0] == first, 1]
    logits = model(torch.tensor([[*prompt, first]])).logits[0, -1]
    best = logits.topk(4)
    expected = best.values.softmax(-1) * len(seconds)
    observed = torch.stack([(seconds == t).sum() for t in best.indices]).double()
    assert observed.sum() == len(seconds)
    expected = expected.double() * observed.sum() / expected.double().sum()
    assert stats.chisquare(observed.numpy(), expected.detach().numpy()).pvalue > 1e-3


def test_requests_wait_and_report_counts_paths():
    model, prompts = tiny_model("llama"), ragged_prompts()
    engine = specdec.attach(model, random_head(model), max_batch=2, num_steps=3)
    engine.generate(prompts, max_new_tokens=4)
    report = engine.report()
    assert report.num_free_pages == report.num_pages
    for mode in ("EXTEND", "DRAFT", "TARGET_VERIFY", "DRAFT_EXTEND"):
        assert report.paths[mode]["eager"] > 0
    assert report.runners["round"]["rejects"] == {"graphs are off": report.runners["round"]["eager"]}
    assert "tau" in str(report) and report.backend == "torch"


def test_the_report_counts_what_callers_step_themselves():
    model = tiny_model("llama")
    engine = specdec.attach(model, random_head(model), max_batch=2, num_steps=3)
    own = engine.submit([[5, 6, 7], [9, 8]], max_new_tokens=9, ignore_eos=True)
    while engine.step():
        pass
    abandoned = engine.submit([[4, 4]], max_new_tokens=30, ignore_eos=True)
    for _ in range(4):
        engine.step()
    engine.abandon(abandoned)
    rounds = [r.acceptance.num_rounds for r in (*own, *abandoned)]
    assert all(rounds) and engine.report().acceptance.num_rounds == sum(rounds)


@pytest.mark.parametrize("num_draft_tokens", [2, 3, 4])
def test_a_tree_smaller_than_its_depth(num_draft_tokens):
    """D <= S is allowed: no accepted path is then longer than D."""
    model, prompts = tiny_model("llama"), ragged_prompts()
    expected = [greedy(model, p, NUM_TOKENS) for p in prompts]
    shape = {"num_steps": 4, "topk": 2, "num_draft_tokens": num_draft_tokens}
    engine = specdec.attach(model, random_head(model), max_batch=4, **shape)
    assert engine.generate(prompts, max_new_tokens=NUM_TOKENS).tokens == expected
    engine.check_integrity()


@pytest.mark.parametrize("lag", [1, 2])
def test_late_results_change_nothing(lag):
    """CUDA reads results one launch late; the same bookkeeping on a CPU, with reused rows and an abandoned run."""
    model, prompts = tiny_model("llama"), ragged_prompts()
    limits = [7, 30, 1, 12, 30]
    expected = [greedy(model, p, n) for p, n in zip(prompts, limits, strict=True)]
    engine = specdec.attach(model, random_head(model), max_batch=2, num_steps=3, max_prefill_tokens=9)
    engine._core._lag = lag
    requests = engine.submit([prompts[0]], max_new_tokens=20, ignore_eos=True)
    for _ in range(4):
        engine.step()
    engine.abandon(requests)  # results of its last rounds have not been read
    assert engine.generate(prompts, max_new_tokens=limits).tokens == expected
    engine.check_integrity()
    assert engine.report().num_free_pages == engine.report().num_pages


def test_requests_may_be_stepped_by_hand():
    """As a server does: requests come at any time, text is read meanwhile, one is abandoned."""
    model, prompts = tiny_model("llama"), ragged_prompts()
    expected = [greedy(model, p, 16) for p in prompts]
    engine = specdec.attach(model, random_head(model), max_batch=2, num_steps=3)
    assert not engine.step(), "nothing is queued"
    served = engine.submit(prompts[:2], max_new_tokens=16)
    assert engine.step()
    (late,) = engine.submit([prompts[2]], max_new_tokens=16)
    (given_up,) = engine.submit([prompts[3]], max_new_tokens=16)
    engine.abandon([given_up])
    seen = []
    while engine.step():
        seen.append(len(late.tokens))
    assert [r.tokens for r in (*served, late)] == expected[:3] and not given_up.tokens
    assert {r.finish_reason for r in (*served, late)} == {"length"} and seen == sorted(seen)
    engine.abandon(served)  # finished requests stay as they are
    assert served[0].tokens == expected[0]
    engine.check_integrity()
    with pytest.raises(ValueError, match="prompt 0 is empty"):
        engine.submit([[]])


def test_greedy_requests_beside_sampled_ones():
    model, prompts = tiny_model("llama"), ragged_prompts()
    laws = [SamplingParams(temperature=0.0 if i % 2 == 0 else 0.9, seed=i) for i in range(len(prompts))]
    for shape in ({"num_steps": 3}, {"num_steps": 3, "topk": 3}):
        engine = specdec.attach(model, random_head(model), **shape)
        out = engine.generate(prompts, max_new_tokens=12, sampling=laws)
        engine.detach()
        for i in range(0, len(prompts), 2):
            assert out.tokens[i] == greedy(model, prompts[i], 12)


def test_eos_ends_a_request_as_in_generate():
    model, prompt = tiny_model("llama"), ragged_prompts()[0]
    full = greedy(model, prompt, NUM_TOKENS)
    model.generation_config.eos_token_id = [2, full[9]]
    expected = greedy(model, prompt, NUM_TOKENS)
    out = oracle_engine(model, [prompt], [full], num_steps=4).generate([prompt], max_new_tokens=NUM_TOKENS)
    assert out.tokens == [expected] and len(expected) < NUM_TOKENS
    assert out.finish_reasons == ["eos"]


@pytest.mark.parametrize("algo", [None, "eagle3"])
def test_a_long_prompt_does_not_stop_requests_that_came_earlier(algo):
    """Pieces of at most `mixed_prefill_tokens` alternate with rounds; all prompts that arrive together go first."""
    model = tiny_model("llama")
    head = random_head(model) if algo else None
    early, late = [3, 4, 5], [7 + i % 60 for i in range(50)]
    engine = specdec.attach(model, head, max_batch=4, max_seq_len=128, mixed_prefill_tokens=8, max_prefill_tokens=32)
    core, steps = engine._core, []
    prefill, play = core.launcher.prefill, core.launcher.round
    core.launcher.prefill = lambda pieces: steps.append(sum(n for _, n in pieces)) or prefill(pieces)
    core.launcher.round = lambda requests: steps.append("round") or play(requests)
    (first,) = engine.submit([early], max_new_tokens=40, ignore_eos=True)
    while len(first.tokens) < 3:
        engine.step()
    del steps[:]
    second = engine.submit([late, early], max_new_tokens=6, ignore_eos=True)
    while engine.step():
        pass
    assert steps[:14] == [8, "round"] * 6 + [5, "round"]  # 50 tokens and 3, whose last piece has tokens of both
    expected = [greedy(model, p, n) for p, n in ((early, 40), (late, 6), (early, 6))]
    assert [first.tokens, *(r.tokens for r in second)] == expected
    del steps[:]
    engine.generate([late, early], max_new_tokens=2, ignore_eos=True)
    assert steps[:2] == [32, 21]


def test_an_engine_says_what_it_is():
    model = tiny_model("llama")
    engine = specdec.attach(model, random_draft(model, "eagle3"), max_batch=2, max_seq_len=64, num_steps=2)
    engine.submit([[3, 4]] * 3, max_new_tokens=9)
    engine.step()
    shape = "num_steps=2, topk=1, num_draft_tokens=3, max_batch=2, max_seq_len=64, cpu, 2 running, 1 waiting"
    assert repr(engine) == f"<specdec.Engine of LlamaForCausalLM, eagle3 draft Eagle3Head, {shape}>"
    engine.detach()
    assert repr(engine) == "<specdec.Engine, detached>"
