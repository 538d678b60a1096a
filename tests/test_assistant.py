"""Assistants of Gemma 4: drafts equal those in transformers, on the K/V of the engine's target."""

from inspect import signature

import pytest
import torch
import transformers as tf
from transformers.generation.candidate_generator import SinglePositionMultiTokenCandidateGenerator as Generator

import specdec
from specdec import SamplingParams
from specdec.core.errors import CheckpointError
from specdec.reach.heads.load import detect_algo, inspect, load_head
from specdec.reach.targets.assistant import unscored_bytes
from specdec.reach.targets.shape import TargetShape
from specdec.tools.doctor.examine import examine
from tests.gemma4 import KINDS, pair
from tests.heads import poison
from tests.laws import assert_own_law
from tests.test_algorithms import GRAPHS, check_tree
from tests.test_attach import greedy, ragged_prompts
from tests.test_round_graphs import past_prefill
from tests.tiny_models import DEVICE, VOCAB, tiny_model
from tests.waits import forbid_waits

CHAIN, TREE = {"num_steps": 3}, {"num_steps": 3, "topk": 2, "num_draft_tokens": 7}
SHAPES = pytest.mark.parametrize("shape", [CHAIN, TREE], ids=["chain", "tree"])
CENTROIDS = pytest.mark.parametrize("has_centroids", [False, True], ids=["plain", "centroids"])
NUM_TOKENS = 8


def pair_of(*args, **kwargs):
    return tuple(model.to(DEVICE) for model in pair(*args, **kwargs))


def engine_of(target, draft, shape=CHAIN, **settings):
    given = {"max_batch": 3, "max_seq_len": 128, "max_prefill_tokens": 16, **shape, **settings}
    return specdec.attach(target, draft, **given)


def committed(target, ids):
    """A target forward over `ids` without the last, the root, with the outputs that transformers gives assistants."""
    return target(ids[:, :-1], use_cache=False, output_hidden_states=True, return_shared_kv_states=True)


def generator_of(target, draft, ids, num_steps):
    """Return transformers' candidate generator, which drafts `num_steps` tokens."""
    config = tf.GenerationConfig(max_length=500, eos_token_id=None)
    draft.generation_config.num_assistant_tokens = num_steps
    draft.generation_config.num_assistant_tokens_schedule = "constant"
    draft.generation_config.eos_token_id = None
    first, last = ((ids,), ({},)) if "input_ids" in signature(Generator).parameters else ((), ())  # until 5.23
    return Generator(*first, draft, target.get_input_embeddings(), config, *last)


class FromScratch:
    """An assistant's predictions after `tokens` in transformers, on the K/V of one target forward."""

    algo = "standalone"  # it scores every token

    def __init__(self, target, draft, tokens):
        self.target, self.draft, self.ids = target, draft, torch.tensor([tokens], device=DEVICE)

    @torch.no_grad()
    def logits(self, path):
        """Return the logits after the tokens and the drafted `path`."""
        out, embed = committed(self.target, self.ids), self.target.get_input_embeddings()
        state, position = out.hidden_states[-1][:, -1:], torch.tensor([[self.ids.shape[1] - 1]], device=DEVICE)
        for token in [int(self.ids[0, -1]), *path]:
            given = torch.cat([embed(torch.tensor([[token]], device=DEVICE)), state], -1)
            said = self.draft(inputs_embeds=given, position_ids=position, shared_kv_states=out.shared_kv_states)
            state = said.last_hidden_state
        return said.logits[0, -1]


def after_rounds(engine, num_rounds=3):
    """Return an engine's core some rounds past five prompts, a batch, and each request's tokens up to the root."""
    core, rows = past_prefill(engine, SamplingParams(), num_rounds)
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()
    lens, batch = core.state.seq_lens[rows].tolist(), core.round.batch("greedy", rows, 96)
    requests = core.scheduler.decoding()
    core.delivery.read(0)  # results that the host has not read yet
    return core, batch, [[*r.prompt_ids, *r.tokens][: n + 1] for r, n in zip(requests, lens, strict=True)]


@torch.inference_mode()
@CENTROIDS
@pytest.mark.parametrize("kind", KINDS)
def test_drafts_are_those_of_transformers(kind, has_centroids):
    """After rounds with accepted and rejected drafts: the same tokens, and the same logits at the root."""
    with torch.inference_mode(False):
        target, draft = pair_of(kind, has_centroids, torch.float64)
    with pytest.warns(UserWarning, match="synthetic_acceptance"):
        engine = engine_of(target, draft, max_batch=5, cuda_graph=False, synthetic_acceptance=[0.7, 0.6, 0.5])
    core, batch, texts = after_rounds(engine)
    drafted = core.round.worker.draft(batch).tree.tokens.tolist()
    worker = core.round.worker
    logits = worker.score(worker.hidden[batch.rows])
    assert len({len(text) - n for text, n in zip(texts, map(len, ragged_prompts()), strict=True)}) > 1
    for i, text in enumerate(texts):
        ids = torch.tensor([text], device=DEVICE)
        generator = generator_of(target, draft, ids, CHAIN["num_steps"])
        given = {"model_kwargs": {}, "model_outputs": committed(target, ids), "is_first_iteration": False}
        candidates, scores = generator.get_candidates(ids, n_last_matches=len(text) - 2, **given)
        assert [text[-1], *candidates[0, len(text) :].tolist()] == drafted[i]
        torch.testing.assert_close(logits[i], scores[0, 0], atol=1e-9, rtol=1e-9)


@CENTROIDS
def test_rounds_are_those_of_assisted_generation(has_centroids, monkeypatch):
    """Compares each round with `generate(assistant_model=)`, which in 5.17 gives an assistant the first token's state
    after a prefill, and K/V of a rejected draft; here it gets the last token's state, and K/V of the text."""
    target, draft = pair_of(has_centroids=has_centroids, dtype=torch.float64)
    theirs, ours, propose = [], [], Generator.get_candidates

    def candidates(self, input_ids, *args, is_first_iteration, **kwargs):
        if not is_first_iteration:
            kwargs |= {"model_outputs": committed(target, input_ids), "n_last_matches": input_ids.shape[1] - 2}
        found = propose(self, input_ids, *args, is_first_iteration=is_first_iteration, **kwargs)
        theirs.append(found[0][0, input_ids.shape[1] - 1 :].tolist())
        return found

    prompt = ragged_prompts()[0]
    with engine_of(target, draft, max_batch=1, cuda_graph=False) as engine:
        worker = engine._core.round.worker
        propose_ours = worker.draft

        def drafted(batch):
            found = propose_ours(batch)
            ours.append(found.tree.tokens[0].tolist())
            return found

        worker.draft = drafted
        text = engine.generate([prompt], max_new_tokens=16).tokens[0]
    monkeypatch.setattr(Generator, "get_candidates", candidates)
    ids = torch.tensor([prompt], device=DEVICE)
    generator_of(target, draft, ids, CHAIN["num_steps"])  # sets how many tokens it drafts
    out = target.generate(ids, assistant_model=draft, max_new_tokens=16, do_sample=False)
    assert out[0, len(prompt) :].tolist() == text
    shared = [pair for pair in zip(theirs[1:], ours, strict=False) if len(pair[0]) == CHAIN["num_steps"] + 1]
    assert len(shared) > 8 and all(a == b for a, b in shared)


@pytest.mark.parametrize("graphs", GRAPHS)
@CENTROIDS
@SHAPES
def test_greedy_text_is_that_of_generate(shape, has_centroids, graphs):
    target, draft = pair_of(has_centroids=has_centroids)
    expected = [greedy(target, p, NUM_TOKENS) for p in ragged_prompts()[:3]]
    engine = engine_of(target, draft, shape, **{**GRAPHS[graphs], "graph_sampling": "greedy"})
    out = engine.generate(ragged_prompts()[:3], max_new_tokens=NUM_TOKENS)
    engine.check_integrity()
    report = engine.report()
    engine.detach()
    assert out.tokens == expected
    assert report.draft["algo"] == "assistant" and report.draft["draft_kv_bytes"] == 0
    for name in ("round", "target_prefill", "draft_begin"):
        counts = report.runners[name]
        assert bool(counts["replays"]) == (graphs == "graphs") and bool(counts["eager"]) == (graphs == "eager"), name


@SHAPES
def test_compiled_steps_draft_the_same(shape):
    (target, draft), outs = pair_of(), []
    traced = {"compile": True, "compiler": "eager", "prefill_graph": "piecewise", "cuda_graph": True}
    for settings in ({"cuda_graph": False}, traced):
        engine = engine_of(target, draft, shape, max_batch=5, **settings)
        worker, report = engine._core.round.worker, engine.report()
        assert bool(worker.compiled) == (settings is traced)
        assert report.draft.get("layers", "").startswith("compiled" if settings is traced else "")
        with torch.inference_mode():
            _, batch, texts = after_rounds(engine)
            outs.append((texts, worker.draft(batch).tree.tokens.tolist(), worker.score(worker.hidden[batch.rows])))
        engine.detach()
        assert not worker.compiled
    assert outs[0][:2] == outs[1][:2]
    torch.testing.assert_close(outs[0][2], outs[1][2], atol=1e-4, rtol=1e-4)


@torch.inference_mode()
@CENTROIDS
def test_trees_hold_the_best_children(has_centroids):
    with torch.inference_mode(False):
        target, draft = pair_of(has_centroids=has_centroids)
    core, batch, texts = after_rounds(engine_of(target, draft, TREE, max_batch=5, cuda_graph=False))
    tree = core.round.worker.draft(batch).tree
    for i, text in enumerate(texts):
        check_tree(FromScratch(target, draft, text), tree.tokens[i].tolist(), tree.parents[i].tolist(), TREE)


@SHAPES
def test_replays_draft_what_eager_rounds_do(shape):
    """Sampled texts too, in batches of any size; pools hold NaN where nothing may be read."""
    target, draft = pair_of()
    law, outs = SamplingParams(temperature=0.9, top_k=30, seed=5), []
    for settings in ({"max_batch": 1, **GRAPHS["eager"]}, {"max_batch": 5, **GRAPHS["graphs"]}):
        engine = engine_of(target, draft, shape, **settings)
        poison(engine)
        outs.append([engine.generate(ragged_prompts(), max_new_tokens=10, sampling=how) for how in (None, law)])
        engine.detach()
    for ours, theirs in zip(*outs, strict=True):
        assert ours.tokens == theirs.tokens and ours.stats.acceptance == theirs.stats.acceptance


@CENTROIDS
@SHAPES
def test_texts_sample_the_targets_own_law(shape, has_centroids):
    target, draft = pair_of(has_centroids=has_centroids)
    engine = engine_of(target, draft, {**shape, "num_steps": 2}, max_batch=250, max_seq_len=32)
    assert engine._core.round.worker.draws_chains
    assert_own_law(engine, target, ragged_prompts()[1])


def test_cached_prefixes_change_no_draft():
    target, draft = pair_of()
    prompt, outs = list(range(3, 63)), []
    for cached in (True, False):
        with engine_of(target, draft, prefix_cache=cached) as engine:
            outs.append([engine.generate([prompt + tail], max_new_tokens=12) for tail in ([7], [9, 11])])
            found = engine.report().prefix_cache
            assert found["found"] >= 48 if cached else not found
    for ours, theirs in zip(*outs, strict=True):
        assert ours.tokens == theirs.tokens and ours.stats.acceptance == theirs.stats.acceptance


def test_rounds_of_any_shape():
    target, draft = pair_of()
    with engine_of(target, draft, {"num_steps": "auto"}) as engine:
        numbers, policy = iter(range(10**6)), engine._core.launcher.tiers.policy
        policy.choose = lambda batch, context: next(numbers) % len(engine.config.shapes)
        out = engine.generate(ragged_prompts(), max_new_tokens=24)
        assert all(tier["rounds"] for tier in engine.report().policy["tiers"].values())
    assert out.tokens == [greedy(target, p, 24) for p in ragged_prompts()]


def test_the_triton_backend_drafts_the_same():
    pytest.importorskip("triton")
    target, draft = pair_of()
    prompts, outs = [ragged_prompts()[0][:12], [7, 30, 2, 90]], []
    for backend in ("torch", "triton"):
        with engine_of(target, draft, backend=backend, max_batch=2, max_seq_len=64, check_kernels=True) as engine:
            core, play = engine._core, engine._core.round.worker.draft
            drafts = []
            core.round.worker.draft = lambda batch, play=play, drafts=drafts: drafts.append(play(batch)) or drafts[-1]
            outs.append((engine.generate(prompts, max_new_tokens=4).tokens, [d.tree.tokens.tolist() for d in drafts]))
    assert outs[0] == outs[1]


def test_a_folder_is_told_apart_by_its_tensors(tmp_path):
    target, draft = pair(has_centroids=True)
    draft.save_pretrained(tmp_path)
    assert detect_algo(tmp_path) == "assistant" and inspect(tmp_path).notes == ["attends to the target's K/V"]
    with pytest.raises(ValueError, match=r"algo='standalone', but .* is a draft for 'assistant'"):
        specdec.attach(target, tmp_path, algo="standalone")
    with pytest.raises(CheckpointError, match="it is a whole model, not a head"):
        load_head(tmp_path, TargetShape.of(target), torch.float32, DEVICE)


def test_a_saved_assistant_is_the_same_assistant(tmp_path):
    target, draft = pair_of(has_centroids=True)
    draft.save_pretrained(tmp_path)
    with engine_of(target, tmp_path) as engine:
        out, loaded = engine.generate(ragged_prompts()[:2], max_new_tokens=8), engine.draft_module.state_dict()
    assert out.tokens == [greedy(target, p, 8) for p in ragged_prompts()[:2]]
    assert loaded.keys() == draft.state_dict().keys()
    assert all(loaded[name].equal(tensor) for name, tensor in draft.state_dict().items())


def test_what_does_not_fit_is_refused_by_name():
    target, draft = pair()
    with pytest.raises(
        ValueError, match=r"attends to K/V of \['sliding_attention', 'full_attention'\] layers; the target, a Llama"
    ):
        specdec.attach(tiny_model("llama"), draft)
    with pytest.raises(ValueError, match=r"has dtype torch\.float64 where the target has torch\.float32"):
        specdec.attach(target, pair()[1].double())
    draft.config.backbone_hidden_size = 48
    with pytest.raises(ValueError, match="has hidden size 48 where the target has 64"):
        specdec.attach(target, draft)
    draft.config.backbone_hidden_size = 64
    draft.model.layers[2].self_attn.head_dim = 16
    with pytest.raises(
        ValueError, match="full_attention layers have 8 query heads of 16, the target's K/V 2 heads of 32"
    ):
        specdec.attach(target, draft)


def test_few_tokens_are_proposed_if_rows_of_the_head_stand_for_it():
    with pytest.raises(ValueError, match="draft_vocab=40: this model's output head does more than multiply"):
        specdec.attach(*pair(has_centroids=True), draft_vocab=40)
    target, draft = pair_of()
    with engine_of(target, draft, draft_vocab=40) as engine:
        assert engine.report().draft["draft_vocab_size"] == 40
        out = engine.generate(ragged_prompts(), max_new_tokens=8)
    assert out.tokens == [greedy(target, p, 8) for p in ragged_prompts()]


def test_the_doctor_measures_it():
    target, draft = pair_of(has_centroids=True)
    found = examine(target, draft, [list(range(3, 13))], max_new_tokens=8, gb_s=50)
    assert found["equal"] and found["tau"] >= 1 and found["draft_vocab"] == VOCAB and "agreement" not in found
    assert unscored_bytes(draft) == (VOCAB - 4 * VOCAB // 16) * 32 * 4  # 4 of 16 centroids are scored
    assert unscored_bytes(target) == unscored_bytes(pair()[1]) == 0


@pytest.mark.gpu
@CENTROIDS
@SHAPES
def test_a_round_never_waits_for_the_host(shape, has_centroids):
    target, draft = pair_of(has_centroids=has_centroids)
    engine = engine_of(target, draft, shape, strict=True)
    expected = [greedy(target, p, 24) for p in ragged_prompts()]
    engine.generate(ragged_prompts(), max_new_tokens=4)  # allocations of a first round may synchronise
    forbid_waits(engine._core.launcher, "round")
    assert engine.generate(ragged_prompts(), max_new_tokens=24).tokens == expected
    assert engine.report().runners["round"]["replays"]
