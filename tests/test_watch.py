"""A watch over modules finds changes that graphs and cached K/V would miss, and takes microseconds."""

import copy
import sys
from collections import OrderedDict

import pytest
import torch
from torch import nn
from torch.optim.optimizer import _global_optimizer_post_hooks

import specdec
from specdec.core.errors import GraphError
from specdec.graphs import Watch
from tests.heads import random_head
from tests.recurrent_models import recurrent_model
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


def give_bias(m):
    m.lm_head.bias = nn.Parameter(torch.zeros(128))  # the forward reads it; it was None


CHANGES = [replace, set_data, move, tie, swap_module, swap_weights, swap_buffer, remove, give_bias]


@pytest.mark.parametrize("change", CHANGES)
def test_changes_are_seen_and_named(change):
    model = tiny_model("llama")
    watch = Watch({"": model})
    model.lm_head.weight.data.mul_(2)  # changes no version counter
    assert watch.changes() == []
    change(model)
    found = watch.changes()
    assert found and all(change.name.startswith(("model.", "lm_head.")) for change in found)
    watch.accept(found)
    assert watch.changes() == []


def test_a_tensor_of_one_equal_number_is_another():
    module = nn.Module()
    module.register_buffer("one", torch.ones(1))
    watch = Watch({"": module})
    module.one = torch.ones(1)
    assert [str(change) for change in watch.changes()] == ["one (another tensor)"]


def test_additions_do_not_count_nor_do_they_when_they_go():
    model = tiny_model("llama")
    watch = Watch({"": model})
    for _ in range(2):
        model.extra, model.note = nn.Linear(2, 2), {"a": 1}
        assert watch.changes() == []
        with torch.no_grad():
            model.lm_head.weight.add_(1)
        watch.accept(watch.changes())
        del model.extra, model.note
        assert watch.changes() == []


def _hook_in_other_hooks(m):
    m.model.norm._forward_hooks = OrderedDict()
    m.model.norm.register_forward_hook(lambda *_: None)


PLAIN = {
    "other hooks": _hook_in_other_hooks,
    "own forward": lambda m: setattr(m.model.norm, "forward", lambda x: x),
    "value": lambda m: setattr(m.model.norm, "variance_epsilon", 1.0),
    "no value": lambda m: delattr(m.model.norm, "variance_epsilon"),
    "in place": lambda m: m.marks.append(2),
    "new in config": lambda m: setattr(m.config, "something", 1),
    "gone from config": lambda m: delattr(m.config, "rms_norm_eps"),
    "emptied": lambda m: m.model.layers[0].mlp._modules.clear(),
}


@pytest.mark.parametrize("change", PLAIN.values(), ids=PLAIN)
@pytest.mark.parametrize("is_refreshed", [False, True])
def test_changes_of_plain_attributes_are_seen(change, is_refreshed):
    model = tiny_model("llama")
    model.marks = [1]
    watch = Watch({"": model})
    if is_refreshed:
        with torch.no_grad():
            model.lm_head.weight.add_(1)
        watch.accept(watch.changes())
    assert watch.changes() == []
    change(model)
    assert watch.changes()
    assert watch.changes()


def test_what_is_put_back_is_no_change():
    model = tiny_model("llama")
    watch = Watch({"": model})
    handle = model.model.norm.register_forward_hook(lambda *_: None)
    assert [str(change) for change in watch.changes()] == ["model.norm.forward_hooks (other hooks)"]
    handle.remove()
    assert watch.changes() == []


def test_writes_are_seen_once_by_optimizers_too_until_the_watch_is_closed():
    layer, other = nn.Linear(2, 2), nn.Linear(2, 2)
    watch = Watch({"": layer}, tensors=[("beside", other.bias)])
    for module, name in ((layer, "weight (written)"), (other, "beside (written)")):
        for p in module.parameters():
            p.grad = torch.ones_like(p)
        optimizer = torch.optim.SGD(module.parameters(), 0.1, fused=True)
        optimizer.step()
        found = watch.changes()
        assert name in map(str, found) and watch.changes() == found, "until it is accepted"
        watch.accept(found)
        assert watch.changes() == []
    watch.close()
    optimizer.step()
    assert watch.changes() == []


@pytest.mark.parametrize("fused", [True, False])
def test_steps_are_seen_beside_tensors_that_have_no_memory(fused):
    """torchao's weights, beside trained tensors: mostly adapters."""
    torchao = pytest.importorskip("torchao.quantization")
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
    torchao.quantize_(model[0], torchao.Int8WeightOnlyConfig())
    model[0].requires_grad_(False)
    watch, optimizer = Watch({"": model}), torch.optim.AdamW(model.parameters(), fused=fused)
    assert watch.changes() == []
    model(torch.ones(1, 32)).sum().backward()
    optimizer.step()
    found = watch.changes()
    assert {"1.weight", "1.bias"} <= {change.name for change in found}
    watch.accept(found)
    assert watch.changes() == []
    watch.close()


def test_a_dropped_watch_leaves_no_hook_behind():
    before = len(_global_optimizer_post_hooks)
    watch = Watch({"": nn.Linear(2, 2)})
    assert len(_global_optimizer_post_hooks) == before + 1
    del watch
    assert len(_global_optimizer_post_hooks) == before


def test_what_a_sequential_gets_counts_and_what_a_list_gets_does_not():
    root = nn.ModuleDict({"runs": nn.Sequential(nn.Linear(2, 2)), "holds": nn.ModuleList([nn.Linear(2, 2)])})
    watch = Watch({"": root})
    root["holds"].append(nn.Linear(2, 2))
    assert not watch.changes()
    root["runs"].append(nn.ReLU())
    assert [str(change) for change in watch.changes()] == ["runs.1 (another module)"]


def test_a_look_at_a_model_of_many_modules_runs_no_python_loop():
    """It runs before every call of `generate`: 0.2 ms for the 423 modules of an 8B."""
    model = tiny_model("llama")
    watch = Watch({"": model})
    calls = []
    sys.setprofile(lambda frame, event, arg: calls.append(frame.f_code.co_name) if event == "call" else None)
    try:
        found = watch.changes()
    finally:
        sys.setprofile(None)
    assert found == [] and len(calls) < 8 < len(list(model.modules()))


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
    expected = {
        "target": "up_proj.weight .another tensor",
        "module": "act_fn .another module",
        "draft": "weight .moved",
    }
    with pytest.raises(GraphError, match=expected[where]):
        engine.generate([[3, 4]], max_new_tokens=2)


@pytest.mark.parametrize("cuda_graph", [False, True])
@pytest.mark.parametrize("converted", ["target", "head", "standalone"])
def test_converted_parameters_are_named(converted, cuda_graph):
    """The KV pool keeps the dtype of attach(); detach() leaves the model as it is by then."""
    model = tiny_model("llama")
    draft = tiny_model("llama", seed=1) if converted == "standalone" else random_head(model)
    settings = {"graph_sampling": "greedy", "max_batch": 1, "num_steps": 1, "max_seq_len": 64}
    engine = specdec.attach(model, draft, cuda_graph=cuda_graph, **settings)
    (model if converted == "target" else engine.draft_module).bfloat16()
    told = r"(: |the draft's )(model.embed_tokens|fc).weight \(torch.float32 on cpu → torch.bfloat16 on cpu\)"
    prompt = torch.tensor([[3, 4]])
    with engine.install():
        calls = [
            lambda: engine.generate([[3, 4]]),
            lambda: engine.score([[3, 4]], [[5]]),
            lambda: engine.submit([3, 4]),
        ]
        for call in (*calls, lambda: model.generate(prompt, max_new_tokens=2)):
            with pytest.raises(GraphError, match=told):
                call()
    engine.detach()
    assert model.generate(prompt, max_new_tokens=2).shape == (1, 4)
    dtype = torch.bfloat16 if converted == "target" else torch.float32
    assert {p.dtype for p in model.parameters()} == {dtype}


def test_an_engine_without_graphs_takes_what_is_there():
    model = tiny_model("llama")
    engine = specdec.attach(model)
    replace(model)
    assert engine.generate([[3, 4]], max_new_tokens=2).tokens


def _swap(path):
    """Return a function that replaces the module at `path` by that of another model."""

    def swap(model, other):
        parent, _, name = path.rpartition(".")
        setattr(model.get_submodule(parent), name, other.get_submodule(path))

    return swap


def _shorten(model, other):
    del model.model.layers[1]


@pytest.mark.parametrize(
    ("name", "change", "told"),
    [
        ("llama", _swap("model.layers.0.self_attn"), r"model.layers.0.self_attn \(another module\)"),
        ("llama", _swap("model.layers.1"), r"model.layers.1 \(another module\).*detach\(\) and attach\(\) again"),
        ("llama", _shorten, "model.layers.1 .another module., model.layers.2"),
        ("mamba2", _swap("backbone.layers.0.mixer"), "backbone.layers.0.mixer .another module"),
        ("qwen3_next", _swap("model.layers.0.linear_attn"), "model.layers.0.linear_attn .another module"),
    ],
    ids=["attention", "layer", "fewer layers", "mamba2", "qwen3_next"],
)
def test_a_module_that_calls_our_ops_is_missed_without_graphs(name, change, told):
    """The new module would run its own attention, without a cache."""
    make = tiny_model if name == "llama" else recurrent_model
    model, other = make(name), make(name, seed=1)
    engine = specdec.attach(model, max_seq_len=64)
    assert not engine.report().graphs and not engine.report().compile_seconds
    change(model, other)
    for call in (lambda: engine.generate([[3, 4]], max_new_tokens=2), lambda: engine.score([[3, 4]], [[5]])):
        with pytest.raises(GraphError, match=told):
            call()
    engine.detach()


def test_modules_that_call_no_op_of_ours_may_change_without_graphs():
    model, other = tiny_model("llama"), tiny_model("llama", seed=1)
    engine = specdec.attach(model, max_seq_len=64)
    model.model.layers[1].mlp = other.model.layers[1].mlp
    ids = torch.tensor([[3, 4]])
    expected = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=6, do_sample=False)
    assert engine.generate([[3, 4]], max_new_tokens=6).tokens[0] == expected[0, 2:].tolist()
