"""Recurrent models in the whole engine: the text of `generate`, with any drafts, shapes and graphs."""

from itertools import product

import pytest
import torch

import specdec
from specdec.backends.recurrent.state_pool import StatePool
from specdec.core.errors import AttachError, CapacityError
from specdec.reach.targets.hf import HFTarget
from tests.heads import random_draft
from tests.laws import assert_own_law
from tests.recurrent_models import CONFIGS, recurrent_model
from tests.state_tensors import pool_bytes, pool_tensors
from tests.test_attach import greedy, ragged_prompts
from tests.tiny_models import DEVICE, VOCAB

REFUSED = ("qwen4_exp", "inkling")  # our ops cannot express their attention
TYPES = [name for name in CONFIGS if name not in REFUSED]
KINDS = ("qwen3_next", "kimi_linear", "falcon_h1", "zamba", "lfm2")  # of recurrences, one model each
FEW = KINDS if DEVICE.type == "cuda" else ("qwen3_next", "falcon_h1", "lfm2")  # graphs are slow on a CPU
NUM_TOKENS = 16
CHAIN = {"num_steps": 3}
TREE = {"num_steps": 3, "topk": 2, "num_draft_tokens": 6}
SHAPES = pytest.mark.parametrize("shape", [CHAIN, TREE], ids=["chain", "tree"])
GRAPHS = {
    "breakable": {"prefill_graph": "breakable"},
    "whole": {"prefill_graph": "whole"},
    "piecewise": {"prefill_graph": "piecewise", "compile": True, "compiler": "eager"},
}
DRAFTS = ("eagle", "eagle3", "nextn", "standalone", "lookup")
MISFITS = {  # by draft: the types that it does not support
    "eagle3": ("mamba", "falcon_mamba", "falcon_h1"),  # the tiny models have too few layers
    "nextn": tuple(name for name in TYPES if name not in ("qwen3_next", "qwen3_5", "qwen3_5_moe", "olmo_hybrid")),
    "lookup": ("tree",),
}
COMBINATIONS = [c for c in product(TYPES, DRAFTS, ("chain", "tree")) if not set(MISFITS.get(c[1], ())) & set(c)]


def is_drawn(name, draft, shape):
    """Pick one EAGLE shape for every type, and a third of the other drafts: graphs are slow on a CPU."""
    place = TYPES.index(name) + DRAFTS.index(draft)
    is_shape = draft == "lookup" or place % 2 == (shape == "tree")
    return is_shape and (draft == "eagle" or place % 3 == 0)


def model_of(name, seed=0):
    return recurrent_model(name, seed).to(DEVICE)


def engine_of(model, draft="eagle", **settings):
    """An engine with a draft of the algorithm `draft`, or that model; states of rows are NaN until a request begins."""
    algo = draft if draft in (None, "lookup") else "auto"
    given = draft if isinstance(draft, torch.nn.Module) else None
    if isinstance(draft, str) and draft != "lookup":
        given = random_draft(model, draft).to(DEVICE)
    defaults = {"max_batch": 2, "max_seq_len": 128, "max_prefill_tokens": 7}
    engine = specdec.attach(model, given, algo=algo, **{**defaults, **settings})
    for context in (engine._core.context, engine._core.round.worker.context):
        pool = None if context is None else context.state_pool
        for tensor in () if pool is None else pool_tensors(pool, "").values():
            tensor[: engine.config.max_batch] = float("nan")
    return engine


def check_text(engine, expected):
    out = engine.generate(ragged_prompts()[: len(expected)], max_new_tokens=NUM_TOKENS)
    engine.check_integrity()
    assert out.tokens == expected
    return out


@pytest.mark.parametrize("name", TYPES if DEVICE.type == "cuda" else KINDS)
def test_every_type_equals_generate(name):
    """Prompts of several lengths in chunks of 7; rows are reused."""
    model = model_of(name)
    expected = [greedy(model, p, NUM_TOKENS) for p in ragged_prompts()]
    own = model(torch.tensor([ragged_prompts()[0]], device=DEVICE)).logits
    for shape in (None, CHAIN, TREE) if DEVICE.type == "cuda" else (None, TREE):
        engine = engine_of(model, "eagle" if shape else None, **(shape or {}))
        check_text(engine, expected)
        engine.detach()
    assert torch.equal(model(torch.tensor([ragged_prompts()[0]], device=DEVICE)).logits, own)
    assert not [n for module in model.modules() for n in vars(module) if n == "forward" or "specdec" in n]


@pytest.mark.parametrize(
    ("name", "draft", "shape"), COMBINATIONS if DEVICE.type == "cuda" else [c for c in COMBINATIONS if is_drawn(*c)]
)
def test_every_type_and_algorithm_in_graphs(name, draft, shape):
    """All combinations, each forward replayed; a standalone draft is another model of the same type."""
    model = model_of(name)
    expected = [greedy(model, p, NUM_TOKENS) for p in ragged_prompts()]
    given = model_of(name, seed=3) if draft == "standalone" else draft
    settings = {
        "cuda_graph": True,
        "graph_sampling": "greedy",
        "prefill_graph": "breakable",
        "prefill_buckets": (1, 2, 4, 8),
        "max_prefill_tokens": 8,
    }
    engine = engine_of(model, given, **(CHAIN if shape == "chain" else TREE), **settings, strict=True)
    check_text(engine, expected)
    runners = engine.report().runners
    assert runners["round"]["replays"] and not any(runner["eager"] for runner in runners.values())
    engine.detach()


@pytest.mark.parametrize(
    ("name", "graphs"),
    [*((name, "whole") for name in FEW), ("qwen3_next", "breakable"), *((name, "piecewise") for name in FEW[2:])],
)
def test_every_graph_replays(name, graphs):
    """With whole graphs, of a recurrent draft too."""
    model = model_of(name)
    expected = [greedy(model, p, NUM_TOKENS) for p in ragged_prompts()[:3]]
    settings = {"cuda_graph": True, "prefill_buckets": (8, 16), "max_prefill_tokens": 16, **GRAPHS[graphs]}
    settings |= {"graph_sampling": "greedy"}
    engine = engine_of(model, model_of(name, seed=3) if graphs == "whole" else "eagle", **TREE, **settings)
    check_text(engine, expected)
    runners = engine.report().runners
    assert runners["round"]["replays"] and not runners["round"]["eager"]
    prefill = runners["whole_prefill" if graphs == "whole" else "target_prefill"]
    assert prefill["replays"] and not prefill["eager"]
    if graphs == "piecewise":
        assert engine.report().compiled.startswith("compiled")
    engine.detach()


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["qwen3_next", "qwen3_5_moe"])
def test_nextn_layers_compile(name):
    """Inductor compiles the pieces, which is stricter about graphs than torch."""
    model = model_of(name)
    expected = [greedy(model, p, NUM_TOKENS) for p in ragged_prompts()]
    engine = engine_of(model, "nextn", **CHAIN, compile=True, compiler="inductor", cuda_graph=True, strict=True)
    assert engine._core.models.how_draft_compiled.startswith("compiled")
    check_text(engine, expected)
    engine.detach()


@SHAPES
@pytest.mark.parametrize("name", FEW)
def test_a_draft_that_is_the_same_model_is_always_right(name, shape):
    """Its states after draft, extend and prefill are those of the text: it accepts all S drafts."""
    model, draft = model_of(name), model_of(name)
    for m in (model, draft):  # so confident that trees contain its best path
        m.get_output_embeddings().weight.mul_(50)
    engine = engine_of(model, draft, **shape)
    prompts = ragged_prompts()[:2]
    out = engine.generate(prompts, max_new_tokens=1 + 4 * 5, ignore_eos=True)
    assert out.stats.tau == 4
    engine.detach()


@pytest.mark.parametrize("name", ["qwen3_next", "zamba2"])
def test_sampled_tokens_follow_the_targets_own_law(name):
    """Chi-square test over 1000 seeds of the second token, drafted and verified, given the first."""
    model, prompt = model_of(name), ragged_prompts()[1]
    engine = engine_of(model, "eagle", num_steps=1, max_batch=250, max_seq_len=32, max_prefill_tokens=1024)
    assert_own_law(engine, model, prompt)
    engine.detach()


@pytest.mark.parametrize("name", ["qwen3_next", "mamba2"])
def test_states_do_not_drift(name):
    """Folded round by round, the states after a long text equal those of one forward over it."""
    num_tokens = 4096 if DEVICE.type == "cuda" else 150
    model = model_of(name)
    engine = engine_of(model, "lookup", num_steps=3, max_seq_len=num_tokens + 64, max_batch=1)
    prompt = ragged_prompts()[0]
    text = engine.generate([prompt], max_new_tokens=num_tokens, ignore_eos=True).tokens[0]
    state = [layer.state[0].clone() for layer in engine._core.context.state_pool.layers]
    engine.detach()
    logits = model(torch.tensor([prompt + text], device=DEVICE), use_cache=False).logits[0, len(prompt) - 1 : -1]
    chosen = logits[torch.arange(num_tokens), text]
    assert (logits.amax(1) - chosen).max() < 1e-3 * logits.abs().max(), "a token that is not its best, nor a near-tie"
    engine = engine_of(model, None, max_seq_len=num_tokens + 64, max_batch=1, max_prefill_tokens=4096)
    engine.generate([(prompt + text)[: int(len(prompt) + num_tokens - 1)]], max_new_tokens=1, ignore_eos=True)
    for kept, layer in zip(state, engine._core.context.state_pool.layers, strict=True):
        assert (kept - layer.state[0]).abs().max() <= 1e-3 * layer.state[0].abs().max()
    engine.detach()


def test_requests_that_are_dropped_leave_nothing_behind():
    model, prompts = model_of("qwen3_next"), ragged_prompts()[:2]
    expected = [greedy(model, p, NUM_TOKENS) for p in prompts]
    engine = engine_of(model, "eagle", **TREE)
    dropped = engine.submit(ragged_prompts()[2:4], max_new_tokens=40, ignore_eos=True)
    for _ in range(4):
        engine.step()
    engine.abandon(dropped)
    check_text(engine, expected)
    engine.detach()


def test_prompts_in_chunks_leave_the_same_states():
    model, prompt = model_of("kimi_linear"), torch.randint(3, VOCAB, (90,)).tolist()
    states = []
    for size in (128, 16):
        engine = engine_of(model, None, max_prefill_tokens=size, max_batch=1)
        engine.generate([prompt], max_new_tokens=1, ignore_eos=True)
        states.append([layer.state[0].clone() for layer in engine._core.context.state_pool.layers])
        engine.detach()
    for whole, parts in zip(*states, strict=True):
        assert (whole - parts).abs().max() <= 1e-5 * whole.abs().max()


def test_another_model_of_the_class_is_left_alone():
    model, other = model_of("bamba"), model_of("bamba", seed=5)
    expected = [greedy(m, ragged_prompts()[1], NUM_TOKENS) for m in (model, other)]
    engine = engine_of(model, "eagle")
    for _ in range(2):
        assert greedy(other, ragged_prompts()[1], NUM_TOKENS) == expected[1]
        assert engine.generate([ragged_prompts()[1]], max_new_tokens=NUM_TOKENS).tokens == expected[:1]
    assert greedy(model, ragged_prompts()[1], NUM_TOKENS) == expected[0], "its own generate, while attached"
    engine.detach()


def test_what_is_kept_is_told_and_counted(monkeypatch):
    model = model_of("qwen3_next")
    target = HFTarget(model)
    specs = target.spec.recurrent
    target.detach()
    engine = engine_of(model, "eagle", **TREE)
    pool = engine._core.context.state_pool
    assert pool_bytes(pool) == StatePool.bytes_for(specs, 3, 6, torch.float32)
    assert len(specs) == 6 and target.shape.num_layers == 4
    engine.detach()
    monkeypatch.setattr("specdec.reach.assembly.memory.free_bytes", lambda device: 1 << 10)
    with pytest.raises(CapacityError, match="states of recurrent layers"):
        engine_of(model, "eagle")


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(name):
    with pytest.raises(AttachError):
        specdec.attach(model_of(name))
