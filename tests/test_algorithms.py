"""Every algorithm in the whole engine: the target's text, and drafts that equal the draft model's own predictions."""

import copy
from dataclasses import replace

import pytest
import torch

import specdec
from specdec import SamplingParams
from specdec.backends.rope import rotate
from specdec.reach.assembly.algorithms import algorithms
from specdec.reach.targets.shape import LAST
from tests.heads import ALGOS, MODULES, poison, random_draft
from tests.laws import assert_own_law
from tests.test_attach import greedy, ragged_prompts
from tests.test_round_graphs import past_prefill
from tests.tiny_models import DEVICE, VOCAB, tiny_model

NUM_TOKENS = 16
CHAIN = {"num_steps": 3}
TREE = {"num_steps": 4, "topk": 3, "num_draft_tokens": 12}
SHAPES = pytest.mark.parametrize("shape", [CHAIN, TREE], ids=["chain", "tree"])
EVERY_ALGO = pytest.mark.parametrize("algo", [*ALGOS, MODULES])
KINDS = ("greedy", "filtered")
GRAPHS = {
    "eager": {"cuda_graph": False},
    "graphs": {"cuda_graph": True, "prefill_graph": "breakable", "strict": False, "graph_sampling": KINDS},
}


def engine_of(model, algo, shape, **settings):
    draft = random_draft(model, algo).to(DEVICE)
    engine = specdec.attach(model, draft, **{"max_batch": 3, "max_seq_len": 128, **shape, **settings})
    if (prefill := engine._core.prefill).mode != "off":
        prefill.target_runner.device_bound_from = None  # it is measured: do not measure beside other tests
    return engine


def test_all_algorithms_are_tested():
    assert {*ALGOS, "assistant"} == {name for name, row in algorithms().items() if row.has_model}  # see test_assistant


@pytest.mark.parametrize("graphs", GRAPHS)
@SHAPES
@EVERY_ALGO
def test_greedy_text_is_that_of_generate(algo, shape, graphs):
    model, prompts = tiny_model("llama").to(DEVICE), ragged_prompts()
    expected = [greedy(model, p, NUM_TOKENS) for p in prompts]
    engine = engine_of(model, algo, shape, max_prefill_tokens=16, **{**GRAPHS[graphs], "graph_sampling": "greedy"})
    out = engine.generate(prompts, max_new_tokens=NUM_TOKENS)
    engine.check_integrity()
    report = engine.report()
    engine.detach()
    assert out.tokens == expected
    assert report.draft["algo"] == algo.split()[0]
    for name in ("round", "target_prefill", "draft_prefill", *(["draft_begin"] if algo == "standalone" else [])):
        counts = report.runners[name]
        assert bool(counts["replays"]) == (graphs == "graphs") and bool(counts["eager"]) == (graphs == "eager"), name


@pytest.mark.parametrize("algo", [*ALGOS, MODULES] if DEVICE.type == "cuda" else ["eagle3", "standalone"])
def test_trees_of_more_nodes_than_a_word_has_bits(algo):
    """Masks of two words in the draft's steps (17 nodes, 4 times) and in verify: in graphs, greedy and sampled."""
    model, prompts = tiny_model("llama").to(DEVICE), ragged_prompts()
    shape = {"num_steps": 5, "topk": 17, "num_draft_tokens": 100}
    engine = engine_of(model, algo, shape, **GRAPHS["graphs"])
    assert engine.generate(prompts, max_new_tokens=NUM_TOKENS).tokens == [greedy(model, p, NUM_TOKENS) for p in prompts]
    sampled = engine.generate(prompts, max_new_tokens=NUM_TOKENS, do_sample=True, top_k=0, seed=1).tokens
    engine.detach()
    eager = engine_of(model, algo, shape, **GRAPHS["eager"])
    assert eager.generate(prompts, max_new_tokens=NUM_TOKENS, do_sample=True, top_k=0, seed=1).tokens == sampled
    eager.detach()


@pytest.mark.parametrize("algo", [*ALGOS, MODULES] if DEVICE.type == "cuda" else [MODULES])
def test_compiled_layers_feed_every_draft_alike(algo):
    """Traced layers in rounds and prefills: the same text, and the same drafts accepted."""
    model, prompts, outs = tiny_model("llama").to(DEVICE), ragged_prompts(), []
    traced = {"compile": True, "compiler": "eager", "prefill_graph": "piecewise", "cuda_graph": True}
    for settings in (GRAPHS["eager"], traced):
        engine = engine_of(model, algo, CHAIN, **settings)
        outs.append(engine.generate(prompts, max_new_tokens=NUM_TOKENS))
        report, worker = engine.report(), engine._core.round.worker
        norms = [name for name in worker.compiled if name == "norm"]
        assert bool(norms) == (settings is traced and algo == "eagle3")  # others have none, or within their states
        engine.detach()
        assert not worker.compiled and (report.compile_seconds > 0) == (settings is traced)
        assert report.draft.get("layers", "").startswith("compiled" if settings is traced else "")
    assert outs[0].tokens == outs[1].tokens == [greedy(model, p, NUM_TOKENS) for p in prompts]
    assert outs[0].stats.acceptance == outs[1].stats.acceptance


@SHAPES
@EVERY_ALGO
def test_poisoned_pools_change_nothing(algo, shape):
    model, prompts = tiny_model("llama").to(DEVICE), ragged_prompts()
    engine = engine_of(model, algo, shape)
    expected = engine.generate(prompts, max_new_tokens=NUM_TOKENS)
    poison(engine)
    again = engine.generate(prompts, max_new_tokens=NUM_TOKENS)
    assert again.tokens == expected.tokens and again.stats.acceptance == expected.stats.acceptance


@SHAPES
@EVERY_ALGO
def test_sampled_text_depends_on_neither_batch_nor_graphs(algo, shape):
    model, prompts = tiny_model("llama").to(DEVICE), ragged_prompts()
    law, texts = SamplingParams(temperature=0.9, top_k=30, seed=5), []
    for settings in ({"max_batch": 1, **GRAPHS["eager"]}, {"max_batch": 5, **GRAPHS["graphs"]}):
        engine = engine_of(model, algo, shape, **settings)
        texts.append(engine.generate(prompts, max_new_tokens=10, sampling=law).tokens)
        engine.detach()
    assert texts[0] == texts[1] and len({tuple(t) for t in texts[0]}) > 1


@SHAPES
@pytest.mark.parametrize("algo", ["eagle3", "standalone", MODULES])
def test_no_random_number_is_used_twice(algo, shape):
    """Draws of drafts and of verification must be independent: each (seed, counter, stream) is used once."""
    model, prompts, used = tiny_model("llama").to(DEVICE), ragged_prompts(), []
    engine = engine_of(model, algo, shape, **GRAPHS["eager"])
    played = engine._core.round
    ops = played.ops

    def uniforms(seeds, counters, first_stream, num):
        streams = range(first_stream, first_stream + num)
        used.extend((s, c, n) for s, c in zip(seeds.tolist(), counters.tolist(), strict=True) for n in streams)
        return ops.uniforms(seeds, counters, first_stream, num)

    played.ops = played.worker.ops = replace(ops, uniforms=uniforms)
    engine.generate(prompts, max_new_tokens=10, do_sample=True, seed=11, ignore_eos=True)
    engine.detach()
    assert len(used) > 100 and len(used) == len(set(used))


LAW_SHAPES = {"chain": {"num_steps": 1}, "tree": {"num_steps": 2, "topk": 3, "num_draft_tokens": 7}}


@pytest.mark.parametrize("shape", LAW_SHAPES)
@pytest.mark.parametrize("draws", [True, False], ids=["drawn", "greedy drafts"])
@EVERY_ALGO
def test_texts_sample_the_targets_own_law(algo, draws, shape):
    """Chi-square test over 1000 seeds of the second token, drafted and verified, given the first."""
    model, prompt = tiny_model("llama").to(DEVICE), ragged_prompts()[1]
    engine = engine_of(model, algo, LAW_SHAPES[shape], max_batch=250, max_seq_len=32, sample_drafts=draws)
    assert shape == "chain" or bool(engine._core.round.worker.draws_chains) == draws
    assert_own_law(engine, model, prompt)


class FromScratch:
    """The draft's predictions after `tokens`, recomputed in one causal pass; uses nothing of the engine."""

    def __init__(self, model, draft, algo, tokens):
        self.model, self.draft, self.algo, self.tokens = model, draft, algo, tokens

    @torch.no_grad()
    def logits(self, path):
        """Return logits over draft ids, after the tokens and the drafted `path`."""
        if self.algo == "standalone":
            return self.draft(torch.tensor([[*self.tokens, *path]], device=DEVICE)).logits[0, -1]
        head, known = self.draft, torch.tensor(self.tokens, device=DEVICE)
        self.keys, self.values = {}, {}
        states = self.run(known[1:], head.fuse(self.features(known[:-1])), 0)
        modules = min(len(path), head.num_modules - 1)
        for m in range(1, modules + 1):  # each over all positions, on the previous one's states, one position later
            ids = torch.cat([known[1:], torch.tensor(path[:m], device=DEVICE)])
            states = self.run(ids, torch.cat([states.new_zeros(1, states.shape[1]), states]), 0, m)
        for i in range(modules, len(path)):
            ids = torch.tensor([path[i]], device=DEVICE)
            states = self.run(ids, states[-1:], len(known) - 1 + i, modules)
        return head.project(head.normed(states[-1:], modules), self.model.get_output_embeddings())[-1]

    def features(self, ids):
        out = self.model.model(ids.unsqueeze(0), output_hidden_states=True)
        if self.draft.aux_layers == (LAST,):
            return out.last_hidden_state[0]
        return torch.cat([out.hidden_states[i + 1][0] for i in self.draft.aux_layers], -1)

    def run(self, ids, hidden, start, module=0):
        positions = torch.arange(start, start + len(ids), device=DEVICE)
        embeds = self.model.get_input_embeddings()(ids)
        return self.draft(embeds, hidden, self.draft.rope(positions), self.attend, module)

    def attend(self, q, k, v, rope, layer):
        if rope is not None:
            q, k = rotate(q, rope), rotate(k, rope)
        k = self.keys[layer] = torch.cat([self.keys[layer], k]) if layer in self.keys else k
        v = self.values[layer] = torch.cat([self.values[layer], v]) if layer in self.values else v
        group = q.shape[1] // k.shape[1]
        scores = torch.einsum("qhd,khd->hqk", q, k.repeat_interleave(group, 1)) * q.shape[2] ** -0.5
        late = torch.ones(q.shape[0], k.shape[0], dtype=torch.bool, device=q.device).triu(k.shape[0] - q.shape[0] + 1)
        weights = scores.masked_fill(late, float("-inf")).softmax(-1)
        return torch.einsum("hqk,khd->qhd", weights, v.repeat_interleave(group, 1))


@torch.inference_mode()
@SHAPES
@pytest.mark.parametrize("algo", [*(algo for algo in ALGOS if algo != "block"), MODULES])  # see test_block.py
def test_drafts_are_what_the_draft_says_from_scratch(algo, shape):
    """After rounds with accepted and rejected drafts: each drafted child is in the top K of a pass over all tokens."""
    with torch.inference_mode(False):
        model = tiny_model("llama").to(DEVICE)
        draft = random_draft(model, algo).to(DEVICE)
    engine = specdec.attach(
        model, draft, max_batch=5, max_seq_len=128, max_prefill_tokens=16, cuda_graph=False, **shape
    )
    core, rows = past_prefill(engine, SamplingParams(), num_rounds=3)
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()
    roots, lens = core.state.roots[rows].tolist(), core.state.seq_lens[rows].tolist()
    tree = core.round.worker.draft(core.round.batch("greedy", rows, 96)).tree
    requests = core.scheduler.decoding()
    core.delivery.read(0)  # results that the host has not read yet
    for i, request in enumerate(requests):
        tokens = [*request.prompt_ids, *request.tokens][: lens[i] + 1]
        assert tokens[-1] == roots[i] == int(tree.tokens[i, 0])
        check_tree(FromScratch(model, draft, algo, tokens), tree.tokens[i].tolist(), tree.parents[i].tolist(), shape)


def check_tree(scratch, tokens, parents, shape):
    """Check that each drafted node is among the top K after its parent's path; in a chain it is the best."""
    hot = list(range(VOCAB)) if scratch.algo == "standalone" else scratch.draft.hot_ids.tolist()
    paths = {0: []}
    for node in range(1, len(tokens)):
        paths[node] = [*paths[parents[node]], tokens[node]]
    for parent in set(parents[1:]):
        best = scratch.logits(paths[parent]).topk(shape.get("topk", 1)).indices.tolist()
        children = {tokens[n] for n in range(1, len(tokens)) if parents[n] == parent}
        assert children <= {hot[b] for b in best}, (parent, children)


def test_a_copy_of_the_target_has_every_draft_accepted():
    model = tiny_model("llama").to(DEVICE)
    twin = copy.deepcopy(model)
    engine = specdec.attach(model, twin, max_batch=3, max_seq_len=128, **CHAIN)
    out = engine.generate(ragged_prompts(), max_new_tokens=1 + 5 * (CHAIN["num_steps"] + 1), ignore_eos=True)
    engine.detach()
    assert out.stats.tau == CHAIN["num_steps"] + 1
    assert not hasattr(twin, "_specdec_attached"), "detach leaves the draft as it was, too"
