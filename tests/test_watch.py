"""A watch over modules sees what graphs would miss, and costs microseconds."""

import copy

import pytest
import torch
from torch import nn

import specdec
from specdec.errors import GraphError
from specdec.graphs import ModuleWatch
from tests.heads import random_head
from tests.tiny_models import tiny_model


def replace(m):
    m.model.layers[1].mlp.up_proj.weight = nn.Parameter(m.model.layers[1].mlp.up_proj.weight.detach().clone())


def set_data(m):
    m.model.layers[0].self_attn.q_proj.weight.data = m.model.layers[0].self_attn.q_proj.weight.data.clone()


def move(m):
    m.to(torch.float64)


def tie(m):
    m.lm_head.weight = m.model.embed_tokens.weight


def swap_module(m):
    m.model.layers[2].mlp.act_fn = nn.ReLU()


def swap_weights(m):
    m.model.layers[2].mlp = copy.deepcopy(m.model.layers[2].mlp)


def swap_buffer(m):
    m.model.rotary_emb.inv_freq = m.model.rotary_emb.inv_freq.clone()


def remove(m):
    del m.model.norm.weight


@pytest.mark.parametrize("change", [replace, set_data, move, tie, swap_module, swap_weights, swap_buffer, remove])
def test_changes_are_seen_and_named(change):
    model = tiny_model("llama")
    watch = ModuleWatch([model])
    model.lm_head.weight.data.mul_(2)  # in place: graphs see it
    assert watch.is_intact() and watch.moved() == []
    change(model)
    assert not watch.is_intact()
    assert watch.moved()


def test_a_tensor_of_one_equal_number_is_another():
    module = nn.Module()
    module.register_buffer("one", torch.ones(1))
    watch = ModuleWatch([module])
    module.one = torch.ones(1)
    assert not watch.is_intact() and watch.moved() == ["one"]


def test_additions_do_not_count():
    model = tiny_model("llama")
    watch = ModuleWatch([model])
    model.extra = nn.Linear(2, 2)
    model.lm_head.bias = nn.Parameter(torch.zeros(128))
    assert watch.is_intact()


@pytest.mark.parametrize("where", ["target", "module", "draft"])
def test_an_engine_with_graphs_refuses_to_go_on(where):
    model = tiny_model("llama")
    engine = specdec.attach(
        model, random_head(model), max_batch=1, cuda_graph=True, graph_sampling="greedy", num_steps=1
    )
    if where == "target":
        replace(model)
    elif where == "module":
        swap_module(model)
    else:
        weight = next(engine.draft_module.parameters())
        weight.data = weight.data.clone()
    expected = "module model.layers.2.mlp.act_fn moved" if where == "module" else "moved since round was captured"
    with pytest.raises(GraphError, match=expected):
        engine.generate([[3, 4]], max_new_tokens=2)


def test_an_engine_without_graphs_takes_what_is_there():
    model = tiny_model("llama")
    engine = specdec.attach(model)
    replace(model)
    assert engine.generate([[3, 4]], max_new_tokens=2).tokens
