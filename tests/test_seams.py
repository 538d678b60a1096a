"""Models that need special adapters: attention in own methods, modules called several times, counted positions."""

import pytest
import torch
from torch import nn

import specdec
from specdec.core.errors import AttachError
from specdec.reach.targets.adapters.attention import Attention
from specdec.reach.targets.admission.masks import Reach, classify_mask
from specdec.reach.targets.admission.probe import probe
from specdec.reach.targets.hf import HFTarget
from specdec.reach.targets.marks import LayerTurns, layer_id, number_layers
from tests.heads import random_draft, random_head
from tests.test_attach import CONFIGS, greedy, ragged_prompts
from tests.tiny_models import COUNTED, DEVICE, OWN_METHODS, REPEATED, WINDOW, tiny_model

ALL = (*OWN_METHODS, *REPEATED, *COUNTED)
NUM_TOKENS = 12
TWO_ANSWERS = "ignore:RobertaForCausalLM numbers positions in two ways"
pytestmark = pytest.mark.filterwarnings(TWO_ANSWERS)


def draft_of(model):
    """Return a head that fits: HRM runs layers several times, so EAGLE-3 could not read their outputs."""
    return random_draft(model, "eagle") if model.config.model_type == "hrm_text" else random_head(model)


@pytest.mark.parametrize("name", ALL)
def test_engine_equals_generate(name):
    model, prompts = tiny_model(name).to(DEVICE), ragged_prompts()[:3]
    expected = [greedy(model, p, NUM_TOKENS) for p in prompts]
    for config in CONFIGS:
        head = draft_of(model).to(DEVICE) if config else None
        engine = specdec.attach(model, head, max_batch=4, max_prefill_tokens=16, **(config or {}))
        out = engine.generate(prompts, max_new_tokens=NUM_TOKENS)
        engine.check_integrity()
        engine.detach()
        assert out.tokens == expected, config


@pytest.mark.parametrize("name", ALL)
def test_detach_leaves_the_model_as_it_was(name):
    model = tiny_model(name)
    ids = torch.tensor([ragged_prompts()[0]])
    before = model(ids, output_hidden_states=True).logits
    state = [{key: id(value) for key, value in vars(m).items()} for m in model.modules()]
    engine = specdec.attach(model, draft_of(model))
    engine.generate(ids, max_new_tokens=8)
    assert torch.equal(model(ids).logits, before), "usable while attached"
    engine.detach()
    assert torch.equal(model(ids).logits, before)
    assert [{key: id(value) for key, value in vars(m).items()} for m in model.modules()] == state


TRACED = {"compiler": "eager", "compile": True}


@pytest.mark.parametrize(
    ("name", "mode", "settings"),
    [
        ("gptj", "whole", {}),
        ("diffllama", "breakable", {}),
        ("diffllama", "piecewise", TRACED),
        *([("gptj", "piecewise", TRACED)] if DEVICE.type == "cuda" else []),
        ("bart", "off", TRACED),
    ],
)
def test_graphs_and_traces_replay_the_same_text(name, mode, settings):
    model, prompts = tiny_model(name).to(DEVICE), [p for p in ragged_prompts() if len(p) > 8]
    expected = [greedy(model, p, 8) for p in prompts]
    graphs = {"cuda_graph": True, "graph_batches": (4,), "max_batch": 4, "graph_sampling": "greedy"}
    engine = specdec.attach(
        model,
        random_head(model).to(DEVICE),
        num_steps=2,
        prefill_graph=mode,
        prefill_buckets=(128,),
        **graphs,
        **settings,
    )
    assert engine.generate(prompts, max_new_tokens=8).tokens == expected
    assert engine.report().runners["round"]["replays"] and (engine.report().compile_seconds > 0) == bool(settings)
    engine.detach()


@pytest.mark.parametrize("name", REPEATED)
def test_calls_of_one_module_have_layers_of_their_own(name):
    model = tiny_model(name)
    target = HFTarget(model)
    assert [layer_id(module) for module in target.spec.modules] == list(range(8))
    layer_id(target.spec.modules[0])  # as in a forward that failed
    with target.routed():
        assert [layer_id(module) for module in target.spec.modules] == list(range(8))
    target.detach()


def test_turns_begin_again():
    a, b = nn.Linear(1, 1), nn.Linear(1, 1)
    turns = number_layers([a, b, a])
    assert [layer_id(m) for m in (a, b, a, a, b, a)] == [0, 1, 2, 0, 1, 2]
    layer_id(a)
    for t in turns:
        t.begin()
    assert layer_id(a) == 0 and isinstance(turns[0], LayerTurns)


def test_the_windows_and_scalings_of_own_methods_are_known():
    layers = {name: probe(tiny_model(name)).layers for name in OWN_METHODS}
    assert [s.window for s in layers["gpt_neo"]] == [None, WINDOW] * 2
    assert {s.scaling for s in layers["gpt_neo"]} == {1.0}
    assert {(s.scaling, s.window) for name in ("gptj", "openai_gpt") for s in layers[name]} == {(0.25, None)}


def test_own_methods_that_are_replaced_or_overridden_are_left_alone():
    model = tiny_model("gpt_neo")
    replaced, overridden, *others = (block.attn.attention for block in model.transformer.h)
    replaced._attn = lambda *args: None
    cls = type(overridden)

    class Late(cls):
        def _attn(self, query, key, value, attention_mask=None):
            return super()._attn(query, key * (1 + (torch.arange(key.shape[2]) >= 200))[:, None], value, attention_mask)

    overridden.__class__ = Late
    assert list(Attention(model).own) == others
    del replaced._attn
    with pytest.raises(AttachError, match="3 attention calls for 4 layers"):
        specdec.attach(model)


def test_answers_nest_and_are_taken_back():
    model = tiny_model("gpt_neo")
    module, attention = model.transformer.h[0].attn.attention, Attention(model)
    q = torch.zeros(1, 1, 2, 4)

    def adding(amount):
        return attention.answered(
            f"test_{amount}", lambda module, q, k, v, mask, **_: (q.transpose(1, 2) + amount, None)
        )

    with adding(1):
        with adding(2):
            assert module._attn(q, q, q)[0].unique() == 2
        assert module._attn(q, q, q)[0].unique() == 1
    assert "_attn" not in vars(module)


def test_roberta_is_warned_about():
    with pytest.warns(UserWarning, match="numbers positions in two ways"):
        specdec.attach(tiny_model("roberta")).detach()


def test_masks_of_texts_without_images_are_seen_far_out():
    def of_blocks(blocks):
        def inner(b, h, q, kv):
            return (blocks[b, q] == blocks[b, kv]) & (blocks[b, q] >= 0)

        masks = (inner, lambda b, h, q, kv: kv <= q)
        return lambda b, h, q, kv: masks[0](b, h, q, kv) | masks[1](b, h, q, kv)

    device = torch.device("cpu")
    assert classify_mask(of_blocks(torch.full((1, 12), -1)), device) == Reach()
    assert "cannot be evaluated alone" in classify_mask(of_blocks(torch.zeros(1, 12)), device)
