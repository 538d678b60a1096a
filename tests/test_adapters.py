"""Adapters on a live target, by PEFT where it is there: followed by live layers, refused by name by compiled ones."""

import pytest
import torch
from torch import nn

import specdec
from specdec.core.errors import AttachError, GraphError
from tests.adapters import with_lora
from tests.tiny_models import tiny_model

pytestmark = pytest.mark.usefixtures("one_thread")

PROMPT = [5, 17, 33, 64, 101, 12, 90, 7, 55, 23, 41]
SETTINGS = {"max_batch": 1, "max_seq_len": 64}


def endless(model):
    model.config.eos_token_id = model.generation_config.eos_token_id = None
    return model


def text_of(model):
    ids = torch.tensor([PROMPT], device=model.device)
    out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=6, do_sample=False)
    return out[0, len(PROMPT) :].tolist()


def served(engine):
    return engine.generate([PROMPT], max_new_tokens=6).tokens[0]


def test_what_is_added_to_an_attached_model_drops_nothing_out():
    model = endless(tiny_model("llama", seed=7))
    engine = specdec.attach(model, **SETTINGS)
    for layer in with_lora(model).modules():
        layer.train(layer is not model and isinstance(layer, nn.Dropout))
    texts = [served(engine) for _ in range(3)]
    model.eval()
    assert texts == [text_of(model)] * 3
    engine.detach()


def test_dropouts_in_training_mode_are_named():
    model = with_lora(tiny_model("llama"))
    model.model.layers[1].mlp.up_proj.train()
    with pytest.raises(AttachError, match=r"layers.1.mlp.up_proj.dropout.a is in training mode \(2 dropouts\); call"):
        specdec.attach(model)
    specdec.attach(model.eval()).detach()


def lora(dropout=0.3):
    peft = pytest.importorskip("peft")
    modules = ["q_proj", "v_proj", "gate_proj"]
    return peft.LoraConfig(
        r=4, lora_alpha=64, target_modules=modules, init_lora_weights=False, lora_dropout=dropout, task_type="CAUSAL_LM"
    )


def adapted():
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    wrapped = peft.get_peft_model(endless(tiny_model("llama", seed=7)), lora())
    wrapped.add_adapter("b", lora())
    return wrapped.eval()


def test_virtual_tokens_of_a_wrapper_are_refused_by_name():
    peft = pytest.importorskip("peft")
    config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
    with pytest.raises(AttachError, match=r"a PeftModelForCausalLM.*PROMPT_TUNING works in the wrapper's own forward"):
        specdec.attach(peft.get_peft_model(tiny_model("llama"), config).eval())


@pytest.mark.parametrize("mode", ["live", "compiled", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_adapters_of_peft_are_followed_or_refused_by_name(mode):
    wrapped = adapted().to("cuda" if mode == "cuda" else "cpu")
    model = wrapped.get_base_model()
    base, state = text_of(wrapped), {k: v.clone() for k, v in wrapped.state_dict().items()}
    how = {"compile": True, "compiler": "eager"} if mode == "compiled" else {}
    engine = specdec.attach(wrapped, prefix_cache=True, **SETTINGS, **how)
    assert specdec.engine_of(wrapped) is engine

    def check(told):
        if mode == "live":
            assert served(engine) == text_of(model) != base
            return
        with pytest.raises(GraphError, match=rf"layers.0.self_attn.q_proj.{told}.*detach\(\) and attach\(\) again"):
            engine.generate([PROMPT], max_new_tokens=6)

    assert served(engine) == base
    wrapped.set_adapter("b")
    check(r"_active_adapter \(\['default'\] → \['b'\]\)")
    wrapped.set_adapter("default")
    assert served(engine) == base
    with wrapped.disable_adapter():
        check(r"_disable_adapters \(False → True\)")
    assert served(engine) == base
    wrapped.add_adapter("c", lora())
    model.to(model.device).eval()
    assert served(engine) == base
    wrapped.merge_adapter(["default", "b"])
    check(r"merged_adapters \(\[\] → \['default', 'b'\]\)")
    engine.detach()
    wrapped.unmerge_adapter()
    wrapped.delete_adapter("c")
    torch.testing.assert_close(dict(wrapped.state_dict()), state)
    assert text_of(wrapped) == base and specdec.engine_of(wrapped) is None
