"""Block drafters: the worker's drafts equal the head over [context, block], in rounds and in training; trees from a
trellis equal those of a best-first search."""

import heapq
import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import specdec
from specdec import SamplingParams
from specdec.backends.rope import rotate
from specdec.core.errors import CheckpointError
from specdec.core.functional import torch_ops, trellis
from specdec.reach.heads.fresh import block_config
from specdec.reach.heads.load import detect_algo, inspect, load_head, save_head
from specdec.reach.targets.shape import TargetShape
from specdec.tools.train.blocks import block_states
from tests.heads import poison, random_block
from tests.test_attach import greedy, ragged_prompts
from tests.test_round_graphs import past_prefill
from tests.tiny_models import DEVICE, tiny_model

CHAIN, TREE = {"num_steps": 4}, {"num_steps": 4, "topk": 3, "num_draft_tokens": 14}
KINDS = {
    "dspark": {},
    "gated": {"markov_gated": True, "has_mask_embedding": True},
    "dflash": {"causal": False, "predicts_next": False, "markov_rank": 0},
    "narrow": {"draft_vocab_size": 40, "own_head": True},
    "own": {"own_embedding": True, "own_head": True, "markov_rank": 0},
}
EVERY_KIND = pytest.mark.parametrize("kind", KINDS)


def naive_states(head, model, tokens, num_steps):
    """Normed states [S, h_d] of the block after `tokens`, which end with its root, by one explicit softmax."""
    known, first = torch.tensor(tokens, device=DEVICE), 0 if head.predicts_next else 1
    num, context = num_steps + first, len(tokens) - 1
    out = model.model(known[:-1].unsqueeze(0), output_hidden_states=True)
    features = head.fuse(torch.cat([out.hidden_states[i + 1][0] for i in head.aux_layers], -1))
    ids = torch.tensor([tokens[-1], *[head.mask_token_id] * (num - 1)], device=DEVICE)
    embeds = (head.embed_tokens or model.get_input_embeddings())(ids).clone()
    if head.mask_embedding is not None:
        embeds[1:] = head.mask_embedding
    before, own = head.rope(torch.arange(context, device=DEVICE)), torch.arange(context, context + num, device=DEVICE)
    seen = torch.ones(num, num, dtype=torch.bool, device=DEVICE)
    seen = torch.cat([seen.new_ones(num, context), seen.tril() if head.causal else seen], 1)
    injected = list(head.keys_values(features))

    def attend(q, k, v, rope, layer):
        q, k = rotate(q, rope), torch.cat([rotate(injected[layer][0], before), rotate(k, rope)])
        v, group = torch.cat([injected[layer][1], v]), q.shape[1] // k.shape[1]
        scores = torch.einsum("qhd,khd->hqk", q, k.repeat_interleave(group, 1)) * q.shape[2] ** -0.5
        weights = scores.masked_fill(~seen, float("-inf")).softmax(-1)
        return torch.einsum("hqk,khd->qhd", weights, v.repeat_interleave(group, 1))

    return head.normed(head(embeds, head.rope(own), attend))[first:]


def logits_after(head, model, state, token):
    """Return logits over the head's own vocabulary, from one row's normed state, after `token`."""
    logits = head.project(state[None], model.get_output_embeddings())
    if head.markov is not None:
        logits = logits + head.markov.bias(head.markov.after(torch.tensor([token], device=DEVICE), state[None]))
    return logits[0]


def after_rounds(kind, shape):
    """Return a model, its head, an engine some rounds past its prompts, and each request's tokens up to the root."""
    with torch.inference_mode(False):
        model = tiny_model("llama").to(DEVICE)
        head = random_block(model, **KINDS[kind]).to(DEVICE)
    engine = specdec.attach(model, head, max_batch=5, max_seq_len=128, max_prefill_tokens=16, cuda_graph=False, **shape)
    core, rows = past_prefill(engine, SamplingParams(), num_rounds=3)
    lens, requests = core.state.seq_lens[rows].tolist(), core.scheduler.decoding()
    batch = core.round.batch("greedy", rows, 96)
    core.delivery.read(0)
    texts = [[*r.prompt_ids, *r.tokens][: n + 1] for r, n in zip(requests, lens, strict=True)]
    return model, head, core, batch, texts


@torch.inference_mode()
@EVERY_KIND
def test_a_block_is_one_forward_over_context_and_block(kind):
    model, head, core, batch, texts = after_rounds(kind, CHAIN)
    states, drafted = core.round.worker.states(batch), core.round.worker.draft(batch).tree.tokens.tolist()
    shorter = core.round.worker.states(replace(batch, shape=batch.shape._replace(num_steps=2)))
    for i, text in enumerate(texts):
        expected = naive_states(head, model, text, CHAIN["num_steps"])
        torch.testing.assert_close(states[i], expected, atol=1e-4, rtol=1e-4)
        path = [text[-1]]
        for state in expected:
            path.append(int(head.hot_ids[logits_after(head, model, state, path[-1]).argmax()]))
        assert drafted[i] == path
    if head.causal:  # a shorter block is the beginning of a longer one
        torch.testing.assert_close(shorter, states[:, :2], atol=1e-5, rtol=1e-5)


@torch.inference_mode()
@EVERY_KIND
def test_a_tree_holds_the_best_paths(kind):
    model, head, core, batch, texts = after_rounds(kind, TREE)
    tree, k = core.round.worker.draft(batch).tree, TREE["topk"]
    for i, text in enumerate(texts):
        states = naive_states(head, model, text, TREE["num_steps"])
        unary = [logits_after(head, model, states[0], text[-1])]
        unary += [head.project(s[None], model.get_output_embeddings())[0] for s in states[1:]]
        laws = [logits.log_softmax(-1).topk(k) for logits in unary]
        names = [head.hot_ids[law.indices].tolist() for law in laws]
        moves = []
        for state, law, before in zip(states[1:], laws[1:], names, strict=False):
            rows = []
            for token in before:
                bias = torch.zeros(k, device=DEVICE)
                if head.markov is not None:
                    full = head.markov.bias(head.markov.after(torch.tensor([token], device=DEVICE), state[None]))[0]
                    bias = full[law.indices]
                others = 1 - law.values.exp().sum()
                weights = (law.values + bias).exp()
                rows.append((weights / (weights.sum() + others)).log().tolist())
            moves.append(rows)
        best = best_first(names, laws[0].values.tolist(), moves, TREE["num_draft_tokens"] - 1)
        assert paths_of(tree.tokens[i].tolist(), tree.parents[i].tolist()) == best


def paths_of(tokens, parents):
    """Return the set of the tokens on every node's path."""
    paths = [()]
    for node in range(1, len(tokens)):
        paths.append((*paths[parents[node]], tokens[node]))
    return set(paths[1:])


def best_first(names, first, moves, num):
    """Return the `num` best paths, with a heap, as DDTree searches."""
    heap = [(-score, (s,)) for s, score in enumerate(first)]
    heapq.heapify(heap)
    found = set()
    while len(found) < num:
        score, path = heapq.heappop(heap)
        found.add(tuple(names[d][s] for d, s in enumerate(path)))
        for child, move in enumerate(moves[len(path) - 1][path[-1]]) if len(path) < len(names) else ():
            heapq.heappush(heap, (score - move, (*path, child)))
    return found


@pytest.mark.parametrize("num_nodes", [2, 9, 24, 64])
def test_walks_are_best_first_searches(num_nodes):
    random = torch.Generator().manual_seed(num_nodes)
    bs, steps, k = 3, 5, 6
    scores = torch.randn(bs, steps, k, generator=random).mul(2).log_softmax(-1).sort(-1, descending=True).values
    names = torch.stack([torch.randperm(50, generator=random)[:k] for _ in range(bs * steps)]).view(bs, steps, k)
    moves = trellis.transitions(scores - 0.3, torch.randn(bs, steps - 1, k, k, generator=random))
    assert bool((moves.exp().sum(-1) <= 1 + 1e-5).all())
    width = trellis.width_of(num_nodes)
    tokens, cumulative, parents = trellis.walk(torch_ops.TORCH_OPS, names, scores[:, 0], moves, width)
    depths = trellis.depths(steps, k, width)
    assert depths.shape == tokens.shape[1:]
    roots = torch.zeros(bs, dtype=torch.int64)
    tree = torch_ops.TORCH_OPS.build(
        roots, tokens, cumulative, parents, depths, num_draft_tokens=num_nodes, num_steps=steps
    )
    for i in range(bs):
        expected = best_first(names[i].tolist(), scores[i, 0].tolist(), moves[i].tolist(), num_nodes - 1)
        assert paths_of(tree.tokens[i].tolist(), tree.parents[i].tolist()) == expected


@torch.inference_mode()
@EVERY_KIND
def test_training_sees_the_rows_of_a_round(kind):
    with torch.inference_mode(False):
        model = tiny_model("llama").to(DEVICE)
        head = random_block(model, **KINDS[kind]).to(DEVICE)
    tokens, steps = torch.randint(3, 90, (2, 14), device=DEVICE, generator=None), 3
    out = model.model(tokens[:, :10], output_hidden_states=True)
    features = torch.cat([out.hidden_states[i + 1] for i in head.aux_layers], -1)
    states = block_states(head, model.get_input_embeddings(), tokens, features, steps)
    for i in (0, 4, 9):
        expected = naive_states(head, model, tokens[1, : i + 2].tolist(), steps)
        torch.testing.assert_close(head.normed(torch.stack(states)[:, 1, i]), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("graphs", ["whole", "breakable", "off"])
@pytest.mark.parametrize("kind", ["dspark", "dflash"])
def test_text_is_that_of_generate(kind, graphs):
    model, prompts = tiny_model("llama").to(DEVICE), ragged_prompts()
    head = random_block(model, **KINDS[kind]).to(DEVICE)
    settings = {"cuda_graph": graphs != "off", "prefill_graph": graphs, "prefix_cache": True}
    engine = specdec.attach(
        model, head, max_batch=3, max_seq_len=128, max_prefill_tokens=16, graph_sampling="greedy", **CHAIN, **settings
    )
    poison(engine)
    expected = [greedy(model, p, 12) for p in prompts]
    assert engine.generate(prompts, max_new_tokens=12).tokens == expected
    assert engine.generate(prompts, max_new_tokens=12).tokens == expected  # from the prefix cache
    engine.check_integrity()
    report = engine.report()
    engine.detach()
    assert report.draft["causal"] == (kind == "dspark")
    for name in ("round", "whole_prefill" if graphs == "whole" else "draft_prefill"):
        assert bool(report.runners[name]["replays"]) == (graphs != "off"), name


@pytest.mark.parametrize("kind", ["dspark", "dflash"])
def test_compiled_heads_draft_the_same(kind):
    model, prompts = tiny_model("llama").to(DEVICE), ragged_prompts()
    taus = []
    for compile in (False, True):
        head = random_block(model, **KINDS[kind]).to(DEVICE)
        settings = {"compile": compile, "compiler": "eager", "cuda_graph": True, "graph_sampling": "greedy"}
        with specdec.attach(model, head, max_batch=3, max_seq_len=128, **CHAIN, **settings) as engine:
            out = engine.generate(prompts, max_new_tokens=12)
            assert out.tokens == [greedy(model, p, 12) for p in prompts]
            assert engine.report().draft.get("layers", "").startswith("compiled" if compile else "")
            taus.append(out.stats.tau)
    assert taus[0] == taus[1]


@pytest.mark.parametrize("shape", [{"num_steps": 3}, {"num_steps": 2, "topk": 3, "num_draft_tokens": 6}])
@pytest.mark.parametrize("kind", ["dspark", "dflash"])
def test_the_triton_backend_drafts_the_same(kind, shape):
    pytest.importorskip("triton")
    model, prompts = tiny_model("llama").to(DEVICE), [[5, 9, 17, 3, 44, 8], [7, 30, 2, 90]]
    outs = []
    for backend in ("torch", "triton"):
        head = random_block(model, **KINDS[kind]).to(DEVICE)
        with specdec.attach(model, head, backend=backend, max_batch=2, max_seq_len=64, **shape) as engine:
            outs.append(engine.generate(prompts, max_new_tokens=4))
    assert outs[0].tokens == outs[1].tokens == [greedy(model, p, 4) for p in prompts]
    assert outs[0].stats.acceptance == outs[1].stats.acceptance


def test_auto_rounds_with_a_block():
    model, prompts = tiny_model("llama").to(DEVICE), ragged_prompts()
    head = random_block(model).to(DEVICE)
    with specdec.attach(model, head, max_batch=3, max_seq_len=128, num_steps="auto") as engine:
        assert engine.generate(prompts, max_new_tokens=12).tokens == [greedy(model, p, 12) for p in prompts]


@pytest.mark.parametrize(("num_layers", "expected"), [(1, (0,)), (2, (0, 1)), (28, (1, 7, 13, 19, 25))])
def test_a_new_head_reads_layers_that_the_target_has(num_layers, expected):
    config = tiny_model("llama").config
    config.num_hidden_layers = num_layers
    model = AutoModelForCausalLM.from_config(config)
    assert block_config(model, None).aux_layers == expected


def test_settings_that_a_block_cannot_have():
    model = tiny_model("llama")
    with pytest.raises(ValueError, match=r"num_steps=9: .* blocks of 9 rows; expected at most 8, also in auto_steps"):
        specdec.attach(model, random_block(model, predicts_next=False), num_steps=9)
    with pytest.raises(ValueError, match="num_draft_tokens=99: 2 steps of a block give 80 candidates; expected at mo"):
        specdec.attach(model, random_block(model), num_steps=2, topk=16, num_draft_tokens=99)


@pytest.mark.parametrize("kind", KINDS)
def test_a_saved_head_is_the_same_head(kind, tmp_path):
    model = tiny_model("llama")
    head = random_block(model, **KINDS[kind])
    target = TargetShape.of(model)
    for layout in ("speculators-block", *(() if kind == "narrow" else ("dflash",))):
        folder = tmp_path / layout
        save_head(folder, head, layout=layout, dtype=torch.float32)
        assert detect_algo(folder) == "block"
        assert not any("problem" in note for note in inspect(folder).notes)
        again = load_head(folder, target, torch.float32, torch.device("cpu"))
        assert again.config == head.config
        for name, tensor in head.state_dict().items():
            assert torch.equal(again.state_dict()[name], tensor), name


def rewritten(folder, change, tensors=lambda t: t):
    """Change config.json and the tensors of a saved head, to match another trainer's files."""
    config = json.loads((folder / "config.json").read_text())
    change(config)
    (folder / "config.json").write_text(json.dumps(config))
    stored = load_file(folder / "model.safetensors")
    save_file(tensors(stored), folder / "model.safetensors")


def test_files_of_other_trainers(tmp_path):
    """z-lab's top-level keys and mask by layer type; DeepSpec's frozen copies and confidence head."""
    model = tiny_model("llama")
    target, cpu = TargetShape.of(model), torch.device("cpu")

    def older(config):
        del config["dflash_config"]["causal"], config["sample_from_anchor"]
        config["block_size"] = None
        config["dflash_config"]["block_size"] = 9

    dflash = random_block(model, **KINDS["dflash"])
    save_head(tmp_path / "zlab", dflash, layout="dflash", dtype=torch.float32)
    rewritten(tmp_path / "zlab", older)
    assert load_head(tmp_path / "zlab", target, torch.float32, cpu).config == dflash.config

    def deepspec(config):
        config["architectures"] = ["Qwen3DSparkModel"]
        own = config.pop("dflash_config")
        config |= {"target_layer_ids": own["target_layer_ids"], "mask_token_id": own["mask_token_id"]}
        del config["sample_from_anchor"]

    def frozen(tensors):
        copies = {
            "embed_tokens.weight": model.get_input_embeddings().weight,
            "lm_head.weight": model.get_output_embeddings().weight,
        }
        confidence = {"confidence_head.proj.weight": torch.zeros(1, 8)}
        return tensors | confidence | {name: t.detach().clone().contiguous() for name, t in copies.items()}

    dspark = random_block(model, causal=False)
    save_head(tmp_path / "deepspec", dspark, layout="dflash", dtype=torch.float32)
    rewritten(tmp_path / "deepspec", deepspec, frozen)
    assert load_head(tmp_path / "deepspec", target, torch.float32, cpu).config == dspark.config


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("block_size", None, "lacks 'block_size'"),
        ("logit_scale", 2.0, "logit_scale=2.0: expected 1"),
        ("markov_head_type", "rnn", "markov_head_type='rnn': expected one of"),
        ("dflash_config", {"target_layer_ids": [0, 2]}, "lacks 'mask_token_id'"),
        ("dflash_config", {"target_layer_ids": [0, 9], "mask_token_id": 1}, r"target layers \[0, 9\] do not fit 4"),
        ("dflash_config", {"target_layer_ids": [0], "mask_token_id": 1}, "fc reads"),
        ("sliding_window", 16, "a bidirectional block with a sliding window"),
    ],
)
def test_configs_that_cannot_be_read(key, value, message, tmp_path):
    model = tiny_model("llama")
    save_head(tmp_path, random_block(model, causal=False), layout="dflash", dtype=torch.float32)
    rewritten(tmp_path, lambda config: config.update({key: value}))
    if isinstance(value, dict):
        rewritten(tmp_path, lambda config: config["dflash_config"].setdefault("causal", False))
    with pytest.raises(CheckpointError, match=message):
        load_head(tmp_path, TargetShape.of(model), torch.float32, torch.device("cpu"))
