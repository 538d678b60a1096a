"""Models that need a seam of their own: attention in own methods, modules called several times, counted positions."""

import pytest
import torch
from torch import nn

import specdec
from specdec.errors import AttachError
from specdec.targets.hf import HFTarget
from specdec.targets.marks import Turns, layer_id, number_layers
from specdec.targets.masks import Reach, classify_mask
from specdec.targets.own_attention import Measure, find_own_attention, own_replaced
from specdec.targets.probe import probe
from tests.heads import random_draft, random_head
from tests.test_attach import CONFIGS, greedy, ragged_prompts
from tests.tiny_models import COUNTED, OWN_METHODS, REPEATED, WINDOW, tiny_model

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
ALL = (*OWN_METHODS, *REPEATED, *COUNTED)
NUM_TOKENS = 12
TWO_ANSWERS = "ignore:RobertaForCausalLM has two answers"
pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.filterwarnings(TWO_ANSWERS)]


def draft_of(model):
    """A head that fits: layers of HRM run several times, so it has none whose output EAGLE-3 could read."""
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
    layer_id(target.spec.modules[0])  # as of a forward that failed
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
    assert layer_id(a) == 0 and isinstance(turns[0], Turns)


def test_the_windows_and_scalings_of_own_methods_are_measured():
    layers = {name: probe(tiny_model(name)).layers for name in OWN_METHODS}
    assert [s.window for s in layers["gpt_neo"]] == [None, WINDOW] * 2
    assert {s.scaling for s in layers["gpt_neo"]} == {1.0}
    assert {(s.scaling, s.window) for name in ("gptj", "openai_gpt") for s in layers[name]} == {(0.25, None)}


class Attending(nn.Module):
    """Softmax attention over what `visible` shows, times `strength` from position `late` on."""

    def __init__(self, scaling=0.3, late=1 << 30, is_causal=True):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))
        self.scaling, self.late, self.is_causal = scaling, late, is_causal

    def _attn(self, query, key, value, attention_mask=None):
        scores = query @ key.mT * self.scaling
        if self.is_causal:
            scores = scores.masked_fill(torch.ones(scores.shape[-2:]).triu(1).bool(), -torch.inf)
        scores = scores * (1 + (torch.arange(scores.shape[-2]) >= self.late))[:, None]
        return scores.softmax(-1) @ value, None


@pytest.mark.parametrize(
    ("settings", "num_positions", "expected"),
    [
        ({}, 64, Measure(0.3, None)),
        ({"late": 60}, 64, "something else"),
        ({"is_causal": False}, 64, "something else"),
        ({}, 100_000, "cannot be judged"),
        ({}, None, "cannot be judged"),
    ],
)
def test_what_a_method_computes_far_out_decides(settings, num_positions, expected):
    (own,) = find_own_attention(Attending(**settings), num_positions)
    measured = own.measure(8, is_masked=False)
    if isinstance(expected, str):
        assert expected in measured
    else:
        assert measured.scaling == pytest.approx(0.3, rel=1e-4) and measured.sliding_window is None


def test_the_scaling_is_the_exact_one_where_products_are_rounded():
    """As where a user has put fp32 products on TF32: weights come back with 11 bits."""

    class Rounding(Attending):
        def _attn(self, query, key, value, attention_mask=None):
            weights = super()._attn(query, key, torch.eye(key.shape[2]), attention_mask)[0]
            return (weights.view(torch.int32) + 0x1000 & ~0x1FFF).view(torch.float32) @ value, None

    for scaling in (8**-0.5, 1 / 8, 1.0):
        (own,) = find_own_attention(Rounding(scaling), 64)
        first, *_, measured = own._scalings(8, is_masked=False)
        assert first == scaling and measured == pytest.approx(scaling, abs=2e-4)
    (own,) = find_own_attention(Attending(8**-0.5 + 1e-4), 64)
    assert own.measure(8, is_masked=False).scaling == pytest.approx(8**-0.5 + 1e-4, rel=1e-6), "seen to be another one"


def test_own_methods_that_are_replaced_or_of_another_form_are_left_alone():
    module = Attending()
    module._attn = lambda *args: None
    assert find_own_attention(module, 64) == ()

    class Other(Attending):
        def _attn(self, hidden, mask):
            return hidden

    assert find_own_attention(Other(), 64) == ()


def test_replacements_nest_and_are_taken_back():
    module = Attending()
    (own,) = find_own_attention(module, 64)
    q = torch.zeros(1, 1, 2, 4)
    with own_replaced([own], lambda module, q, k, v, mask: q + 1):
        with own_replaced([own], lambda module, q, k, v, mask: q + 2):
            assert module._attn(q, q, q)[0].unique() == 2
        assert module._attn(q, q, q)[0].unique() == 1
    assert "_attn" not in vars(module)


def test_a_window_beyond_the_probe_is_refused_where_the_method_differs():
    model = tiny_model("gptj")
    attention = model.transformer.h[1].attn
    cls = type(attention)

    class Late(cls):
        def _attn(self, query, key, value, attention_mask=None):
            return super()._attn(query, key * (1 + (torch.arange(key.shape[2]) >= 200))[:, None], value, attention_mask)

    attention.__class__ = Late
    with pytest.raises(AttachError, match="something else than causal softmax attention"):
        specdec.attach(model)


def test_roberta_is_warned_about():
    with pytest.warns(UserWarning, match="two answers to a text"):
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
