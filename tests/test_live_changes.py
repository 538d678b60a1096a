"""Ways to change a live model, and how engines react: each cell gives the changed model's text, or a named error."""

import asyncio
import copy
import re
from contextlib import ExitStack, contextmanager

import pytest
import torch
from torch import nn

import specdec
from specdec.core.errors import GraphError
from tests.adapters import lora_layers, with_lora
from tests.tiny_models import tiny_model

PROMPT = [5, 17, 33, 64, 101, 12, 90, 7, 55, 23, 41]
NUM_TOKENS = 6


@contextmanager
def attribute(owner, key, value):
    before = getattr(owner, key)
    setattr(owner, key, value)
    yield
    setattr(owner, key, before)


@contextmanager
def every_lora(model, key, value):
    with ExitStack() as stack:
        for layer in lora_layers(model):
            stack.enter_context(attribute(layer, key, value))
        yield


def switched(m):
    return every_lora(m, "active", ["b"])


@contextmanager
def both_active(m):
    for layer in lora_layers(m):
        layer.active.append("b")
    yield
    for layer in lora_layers(m):
        layer.active.remove("b")


def disabled(m):
    return every_lora(m, "disabled", True)


@contextmanager
def rescaled(m):
    for layer in lora_layers(m):
        layer.scaling["a"] = -4.0
    yield
    for layer in lora_layers(m):
        layer.scaling["a"] = 2.0


@contextmanager
def merged_twice(m):
    """PEFT applies an adapter once; here compiled layers would apply it twice."""
    for layer in lora_layers(m):
        layer.active.append("b")
        layer.merge()
    yield
    for layer in lora_layers(m):
        layer.merge(-1)
        layer.active.remove("b")


@contextmanager
def another_added(m):
    for layer in lora_layers(m):
        layer.add("c")
    yield


@contextmanager
def written(m, change):
    before = {name: t.detach().clone() for name, t in [*m.named_parameters(), *m.named_buffers()]}
    change(m)
    yield
    with torch.no_grad():
        for name, t in [*m.named_parameters(), *m.named_buffers()]:
            t.copy_(before[name])


@torch.no_grad()
def copied(m):
    m.model.layers[1].mlp.down_proj.weight.mul_(-3)


@torch.no_grad()
def adapter_written(m):
    for layer in lora_layers(m):
        layer.lora_B["a"].weight.mul_(-3)


@torch.no_grad()
def buffer_written(m):
    offset = lora_layers(m)[0].offset
    offset.add_(torch.linspace(-3, 3, offset.numel(), device=offset.device))


def optimizer(kind, **settings):
    def step(m):
        opt = kind(m.parameters(), lr=0.05, **settings)
        ids = torch.tensor([PROMPT], device=m.device)
        m(input_ids=ids, labels=ids, use_cache=False).loss.neg().backward()
        opt.step()
        opt.zero_grad()

    return step


def state_loaded(m):
    m.load_state_dict({k: -v if "down_proj" in k else v.clone() for k, v in m.state_dict().items()}, assign=False)


def other_like(tensor):
    return (torch.randn(tensor.shape, generator=torch.Generator().manual_seed(3)) / 4).to(tensor.device)


def parameter_replaced(m):
    linear = m.model.layers[1].mlp.down_proj
    return attribute(linear, "weight", nn.Parameter(other_like(linear.weight)))


def data_replaced(m):
    weight = m.model.layers[1].mlp.down_proj.weight
    return attribute(weight, "data", other_like(weight))


def buffer_replaced(m):
    layer = lora_layers(m)[0]
    return attribute(layer, "offset", torch.linspace(-3, 3, layer.offset.numel(), device=layer.offset.device))


@contextmanager
def hooked(m, register="register_forward_hook", hook=lambda module, args, out: out * -3):
    handle = getattr(m.model.layers[1].mlp, register)(hook)
    yield
    handle.remove()


def pre_hooked(m):
    return hooked(m, "register_forward_pre_hook", lambda module, args: (args[0] * -3,))


@contextmanager
def forward_replaced(m):
    mlp = m.model.layers[1].mlp
    own = mlp.forward
    mlp.forward = lambda x: own(x) * -3
    yield
    del mlp.forward


def mlp_replaced(m):
    other = copy.deepcopy(m.model.layers[1].mlp)
    with torch.no_grad():
        other.down_proj.weight.mul_(-3)
    return attribute(m.model.layers[1], "mlp", other)


def activation_replaced(m):
    return attribute(m.model.layers[1].mlp, "act_fn", nn.Tanh())


def ropes_rescaled(m):
    return attribute(m.model.rotary_emb, "attention_scaling", 2.0)


def epsilon(m):
    return attribute(m.model.layers[0].input_layernorm, "variance_epsilon", 500.0)


def attention_rescaled(m):
    return attribute(m.model.layers[0].self_attn, "scaling", 3.0)


def attention_replaced(m):
    other = copy.deepcopy(m.model.layers[1].self_attn)
    with torch.no_grad():
        other.o_proj.weight.mul_(-3)
    return attribute(m.model.layers[1], "self_attn", other)


@contextmanager
def window_set(m):
    m.config.sliding_window = 2
    yield
    del m.config.sliding_window


def converted(m):
    return attribute(m.lm_head.weight, "data", m.lm_head.weight.data.double())


@contextmanager
def compiled(m):
    before = m._compiled_call_impl
    m.compile(backend="eager")
    yield
    m._compiled_call_impl = before


@contextmanager
def training(m):
    m.train()
    yield
    m.eval()


FOLLOWED, REFUSED = "", "refused"
# the change, then for live and for baked layers: followed, or what the error names
WAYS = {
    "adapter switched": (switched, FOLLOWED, r"up_proj.active \(\['a'\] → \['b'\]\)"),
    "two adapters active": (both_active, FOLLOWED, r"up_proj.active \(\['a'\] → \['a', 'b'\]\)"),
    "adapters disabled": (disabled, FOLLOWED, r"disabled \(False → True\)"),
    "adapters rescaled": (rescaled, FOLLOWED, r"scaling \({'a': 2.0, 'b': 2.0} → {'a': -4.0, 'b': 2.0}\)"),
    "adapters merged": (merged_twice, FOLLOWED, r"v_proj.merged \(\[\] → \['a', 'b'\]\)"),
    "adapter added": (another_added, FOLLOWED, FOLLOWED),
    "adapter written": (lambda m: written(m, adapter_written), FOLLOWED, FOLLOWED),
    "weight written": (lambda m: written(m, copied), FOLLOWED, FOLLOWED),
    "buffer written": (lambda m: written(m, buffer_written), FOLLOWED, FOLLOWED),
    "SGD": (lambda m: written(m, optimizer(torch.optim.SGD)), FOLLOWED, FOLLOWED),
    "AdamW, foreach": (lambda m: written(m, optimizer(torch.optim.AdamW, foreach=True)), FOLLOWED, FOLLOWED),
    "AdamW, fused": (lambda m: written(m, optimizer(torch.optim.AdamW, fused=True)), FOLLOWED, FOLLOWED),
    "SGD, fused": (lambda m: written(m, optimizer(torch.optim.SGD, fused=True)), FOLLOWED, FOLLOWED),
    "Adagrad, fused": (lambda m: written(m, optimizer(torch.optim.Adagrad, fused=True)), FOLLOWED, FOLLOWED),
    "state loaded": (lambda m: written(m, state_loaded), FOLLOWED, FOLLOWED),
    "parameter replaced": (parameter_replaced, FOLLOWED, r"layers.1.mlp.down_proj.weight \(another tensor\)"),
    "data replaced": (data_replaced, FOLLOWED, r"layers.1.mlp.down_proj.weight \(moved\)"),
    "buffer replaced": (buffer_replaced, FOLLOWED, r"offset \(another tensor\)"),
    "hook": (hooked, FOLLOWED, r"layers.1.mlp.forward_hooks \(other hooks\)"),
    "pre-hook": (pre_hooked, FOLLOWED, r"layers.1.mlp.forward_pre_hooks \(other hooks\)"),
    "forward replaced": (forward_replaced, FOLLOWED, "layers.1.mlp.forward"),
    "module replaced": (mlp_replaced, FOLLOWED, r"layers.1.mlp \(another module\)"),
    "activation replaced": (activation_replaced, FOLLOWED, r"mlp.act_fn \(another module\)"),
    "ropes rescaled": (ropes_rescaled, FOLLOWED, r"rotary_emb.attention_scaling \(1.0 → 2.0\)"),
    "epsilon": (epsilon, FOLLOWED, r"variance_epsilon \(1e-06 → 500.0\)"),
    "training mode": (training, FOLLOWED, FOLLOWED),
    "compiled": (compiled, FOLLOWED, FOLLOWED),
    "attention rescaled": (attention_rescaled, r"self_attn.scaling \(0.25 → 3.0\)", r"self_attn.scaling"),
    "attention replaced": (attention_replaced, r"layers.1.self_attn \(another module\)", r"layers.1.self_attn"),
    "window": (window_set, r"config.sliding_window \(nothing → 2\)", r"config.sliding_window"),
    "converted": (converted, "lm_head.weight .torch.float32 on (cpu|cuda:0) → torch.float64", "lm_head.weight"),
}
# Llama reads no window; a converted model cannot run.
UNCHANGED = {"adapter added", "training mode", "compiled", "window", "converted"}
CAPTURED = {"cuda_graph": True, "graph_sampling": "greedy", "prefill_graph": "off"}
MODES = {
    "cpu": {"live": {}, "captured": CAPTURED, "compiled": {"compile": True, "compiler": "eager"}},
    "cuda": {
        "live": {"cuda_graph": False, "compile": False},
        "captured": CAPTURED | {"compile": False},
        "compiled": {"compile": True},
    },
}
TEXTS = {}


def text_of(model):
    """Return the model's own text in eval mode."""
    ids, was_training = torch.tensor([PROMPT], device=model.device), model.training
    model.eval()
    out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=NUM_TOKENS, do_sample=False)
    model.train(was_training)
    return out[0, len(PROMPT) :].tolist()


@pytest.fixture(
    scope="module",
    ids=lambda case: " ".join(map(str, case)),
    params=[
        pytest.param((device, mode, kept), marks=[pytest.mark.gpu] if device == "cuda" else [])
        for device in MODES
        for kept in (True, False)
        for mode in MODES[device]
    ],
)
def attached(request):
    device, mode, kept = request.param
    model = with_lora(tiny_model("llama", seed=7)).to(device)
    model.config.eos_token_id = model.generation_config.eos_token_id = None
    base = text_of(model)
    engine = specdec.attach(model, max_batch=1, max_seq_len=32, prefix_cache=kept, **MODES[device][mode])
    engine.generate([PROMPT], max_new_tokens=1)  # to have something that can become stale
    yield model, engine, base, mode != "live"
    runners = engine.report().runners
    assert any(r["replays"] for r in runners.values()) == (mode == "captured" or (device, mode) == ("cuda", "compiled"))
    engine.detach()
    assert text_of(model) == base


def directly(engine):
    return engine.generate([PROMPT], max_new_tokens=NUM_TOKENS, ignore_eos=True).tokens[0]


def in_a_task(engine):
    return asyncio.run(engine.agenerate([PROMPT], max_new_tokens=NUM_TOKENS, ignore_eos=True)).tokens[0]


@pytest.mark.parametrize(
    ("way", "ask"),
    [(way, directly) for way in WAYS]
    + [(way, in_a_task) for way in ("state loaded", "parameter replaced", "attention replaced", "converted")],
)
def test_a_changed_model_gives_its_own_text_or_a_named_error(attached, way, ask):
    model, engine, base, is_baked = attached
    change, live, baked = WAYS[way]
    if way == "Adagrad, fused" and model.device.type == "cuda":
        pytest.skip("torch has no fused Adagrad for CUDA")

    with change(model):
        if (model.device, way) not in TEXTS:  # the same for all engines
            TEXTS[model.device, way] = base if way in UNCHANGED else text_of(model)
        expected = TEXTS[model.device, way]
        try:
            outcome = ask(engine)
        except GraphError as error:
            outcome = str(error)
    assert (expected == base) == (way in UNCHANGED), "a change that changes nothing tests nothing"
    if told := baked if is_baked else live:
        assert re.search(rf"{told}.*detach\(\) and attach\(\) again", str(outcome))
    else:
        assert outcome == expected
    assert ask(engine) == base, "what was put back is served again"


def test_autocast_that_the_models_forward_switches_on_later_is_refused_by_name():
    model = tiny_model("llama")
    engine = specdec.attach(model, algo="lookup", max_seq_len=64, cuda_graph=False)
    before = engine.generate(PROMPT, max_new_tokens=NUM_TOKENS).tokens
    own, model.forward = model.forward, torch.autocast("cpu", torch.bfloat16)(model.forward)
    with pytest.raises(GraphError, match=r"forward runs in torch.autocast\(dtype=torch.bfloat16\) since attach\(\)"):
        engine.generate(PROMPT, max_new_tokens=NUM_TOKENS)
    engine.check_integrity()
    model.forward = own
    assert engine.generate(PROMPT, max_new_tokens=NUM_TOKENS).tokens == before
    engine.detach()
    model.to(torch.bfloat16).forward = torch.autocast("cpu", torch.bfloat16)(own)  # the fix that the message names
    with specdec.attach(model, algo="lookup", max_seq_len=64, cuda_graph=False) as engine:
        assert len(engine.generate(PROMPT, max_new_tokens=NUM_TOKENS, ignore_eos=True).tokens[0]) == NUM_TOKENS
