"""`draft_vocab`: drafts that propose only some tokens; the text is still the target's."""

import pytest
import torch

import specdec
from specdec.core.draft.worker import NarrowHead
from tests.heads import ALGOS, MODULES, random_draft
from tests.laws import assert_own_law
from tests.test_attach import greedy, ragged_prompts
from tests.tiny_models import DEVICE, VOCAB, tiny_model

NUM_TOKENS = 16
SHAPES = {"chain": {"num_steps": 3}, "tree": {"num_steps": 3, "topk": 3, "num_draft_tokens": 8}}


def attached(model, draft, **settings):
    return specdec.attach(model, draft, **{"max_batch": 3, "max_seq_len": 128, **settings})


def proposed(engine, prompts, **options):
    """Return the output of `generate`, and every drafted token; rounds run eagerly."""
    worker = engine._core.round.worker
    draft, seen = worker.draft, set()

    def noted(batch):
        found = draft(batch)
        seen.update(found.tree.tokens[:, 1:].flatten().tolist())
        return found

    worker.draft = noted
    return engine.generate(prompts, max_new_tokens=NUM_TOKENS, **options), seen


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("algo", [*ALGOS, MODULES])
def test_drafts_are_of_these_tokens_and_the_text_is_the_targets(algo, shape):
    model, prompts = tiny_model("llama").to(DEVICE), ragged_prompts()[:3]
    expected, draft = [greedy(model, p, NUM_TOKENS) for p in prompts], random_draft(model, algo).to(DEVICE)
    ids = [7, 3, *range(40, 90)]
    scored = set(draft.hot_ids.tolist()) if algo == "eagle3" else set(range(VOCAB))
    engine = attached(model, draft, draft_vocab=ids, cuda_graph=False, **SHAPES[shape])
    out, seen = proposed(engine, prompts)
    assert out.tokens == expected and seen and seen <= set(ids)
    assert engine.report().draft["draft_vocab_size"] == len(scored.intersection(ids))
    engine.detach()


def test_in_fp64():
    model = tiny_model("llama").double().to(DEVICE)
    with attached(model, random_draft(model, "eagle"), draft_vocab=40) as engine:
        assert engine.report().draft["draft_vocab_size"] == 40


@pytest.mark.parametrize("shape", SHAPES)
def test_a_draft_that_is_right_stays_right_where_it_may(shape):
    """In graphs: a copy has all S drafts accepted if it may propose the text's tokens, and none otherwise."""
    model, copy, prompts = (tiny_model("llama").to(DEVICE), tiny_model("llama").to(DEVICE), ragged_prompts()[:2])
    for m in (model, copy):
        m.get_output_embeddings().weight.data.mul_(50)
    said = {token for p in prompts for token in greedy(model, p, 13)}
    others = set(range(VOCAB)) - said - {2}
    for ids, tau in ((said | set(list(others)[:9]), 4), (others, 1)):
        settings = {"cuda_graph": True, "prefill_graph": "off", "graph_sampling": "greedy", **SHAPES[shape]}
        engine = attached(model, copy, draft_vocab=sorted(ids), **settings)
        out = engine.generate(prompts, max_new_tokens=13, ignore_eos=True)
        assert out.stats.tau == tau and engine.report().runners["round"]["replays"]
        engine.detach()


def test_sampled_tokens_follow_the_targets_own_law():
    """The second token, drafted and verified, given the first; half of the likely tokens cannot be drafted."""
    model, prompt = tiny_model("llama").to(DEVICE), ragged_prompts()[1]
    engine = attached(
        model, tiny_model("llama").to(DEVICE), draft_vocab=[*range(0, VOCAB, 2)], num_steps=1, max_batch=250
    )
    assert_own_law(engine, model, prompt)
    engine.detach()


def test_a_number_is_for_the_first_ids_and_the_end():
    model = tiny_model("llama").to(DEVICE)
    model.generation_config.eos_token_id = [2, 99]
    engine = attached(model, random_draft(model, "eagle").to(DEVICE), draft_vocab=50)
    narrow = engine._core.round.worker.narrow
    assert isinstance(narrow, NarrowHead) and narrow.ids.tolist() == [*range(50), 99]
    assert torch.equal(narrow.weight, model.lm_head.weight[narrow.ids])
    engine.detach()


def test_heads_keep_their_own_rows_and_biases():
    model = tiny_model("llama").to(DEVICE)
    draft = random_draft(model, "eagle3").to(DEVICE)
    ids, rows = draft.hot_ids[:20], draft.lm_head.weight[:20].clone()
    engine = attached(model, draft, draft_vocab=ids.tolist())
    assert torch.equal(engine._core.round.worker.narrow.weight, rows)
    engine.detach()
    assert len(draft.hot_ids) == 64 and draft.lm_head.weight.shape[0] == 64  # the user's head is unchanged
    model.lm_head.bias = torch.nn.Parameter(torch.randn(VOCAB, device=DEVICE))
    engine = attached(model, random_draft(model, "eagle").to(DEVICE), draft_vocab=50)
    assert torch.equal(engine._core.round.worker.narrow.bias, model.lm_head.bias[:50])
    engine.detach()


def test_all_tokens_are_no_narrow_head():
    model = tiny_model("llama").to(DEVICE)
    engine = attached(model, random_draft(model, "eagle").to(DEVICE), draft_vocab=VOCAB)
    assert engine._core.round.worker.narrow is None
    engine.detach()


@pytest.mark.parametrize(
    ("algo", "settings", "told"),
    [
        (
            "eagle",
            {"draft_vocab": [3, 500]},
            r"draft_vocab of 2 ids: expected ids from 0 to 127, not \[500\] \(1\)",
        ),
        ("eagle", {"draft_vocab": [5, 6], "topk": 3}, "scores 2 of them; expected at least 3"),
        ("eagle", {"draft_vocab": []}, r"draft_vocab=\[\]: .* or a list of token ids of at least 0, or None for all"),
        ("eagle", {"draft_vocab": "32k"}, "draft_vocab='32k': expected .* or a list of token ids"),
        ("eagle", {"draft_vocab": 1}, "draft_vocab=1: expected an integer of at least 2"),
        ("eagle", {"draft_vocab": [1.5]}, "draft_vocab=.*expected .* or a list of token ids"),
        ("lookup", {"draft_vocab": 50}, "draft_vocab=50: expected a draft with a model"),
        (None, {"draft_vocab": 50}, "draft_vocab: plain decoding drafts nothing"),
    ],
)
def test_what_is_refused(algo, settings, told):
    model = tiny_model("llama").to(DEVICE)
    draft = random_draft(model, "eagle").to(DEVICE) if algo == "eagle" else None
    with pytest.raises(ValueError, match=told):
        attached(model, draft, algo=algo, **settings)


def test_output_heads_that_do_more_are_refused():
    model = tiny_model("gemma2").to(DEVICE)  # caps its logits
    model.config.final_logit_softcapping = 0.05
    with pytest.raises(ValueError, match="draft_vocab=50: this model's output head does more than multiply"):
        attached(model, random_draft(model, "eagle").to(DEVICE), draft_vocab=50)
