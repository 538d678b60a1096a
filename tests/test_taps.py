"""Features are the outputs of the layers that they are named after, whatever transformers counts in its own lists."""

import pytest
import torch
import transformers as tf

import specdec
from specdec.reach.targets.taps import Taps
from specdec.tools.train.batches import Batch
from specdec.tools.train.target import Teacher
from tests.heads import random_head
from tests.tiny_models import tiny_model

AUX = (0, 1, 2)
IDS = [5, 9, 3, 77, 12, 6]
_IDS = dict(bos_token_id=1, eos_token_id=2)
_GPT = dict(vocab_size=128, n_embd=64, n_layer=4, n_head=4, n_positions=64, rotary_dim=8, **_IDS)
# transformers' own list for these is one entry longer than for others (5.17).
BUILD = {
    "llama": lambda: tiny_model("llama"),
    "gptj": lambda: tf.GPTJForCausalLM(tf.GPTJConfig(**_GPT)).eval(),
    "codegen": lambda: tf.CodeGenForCausalLM(tf.CodeGenConfig(**_GPT)).eval(),
    "openai-gpt": lambda: tf.OpenAIGPTLMHeadModel(tf.OpenAIGPTConfig(**_GPT)).eval(),  # layers return lists
}


def layers_of(model):
    return next(m for m in model.modules() if isinstance(m, torch.nn.ModuleList))


def outputs_of(model, ids):
    """Return the outputs [T, h] of all layers."""
    seen = []
    handles = [layer.register_forward_hook(lambda *given: seen.append(given[2])) for layer in layers_of(model)]
    with torch.no_grad():
        model(torch.tensor([ids]), use_cache=False)
    for handle in handles:
        handle.remove()
    return [(out if isinstance(out, torch.Tensor) else out[0])[0] for out in seen]


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("name", BUILD)
def test_features_are_outputs_of_the_named_layers(name, compiled):
    model = BUILD[name]()
    wanted = torch.cat([outputs_of(model, IDS)[i] for i in AUX], -1)
    engine = specdec.attach(model, random_head(model, aux=AUX), compile=compiled, compiler="eager", max_seq_len=64)
    assert bool(engine._core.target.compiled) is compiled
    seen, draft = [], engine._core.prefill.draft
    engine._core.prefill.draft = lambda metadata, ids, aux: (seen.append(aux), draft(metadata, ids, aux))[1]
    engine.submit(IDS, max_new_tokens=1)
    engine.step()
    torch.testing.assert_close(seen[0], wanted, atol=1e-5, rtol=1e-5)
    engine.detach()
    assert not any(m._forward_hooks for m in model.modules())


@pytest.mark.parametrize("name", ["llama", "gptj"])
def test_a_head_is_trained_on_the_same(name):
    model = BUILD[name]()
    wanted = torch.cat([outputs_of(model, IDS)[i] for i in AUX[:2]], -1)
    none = torch.tensor([])
    batch = Batch(torch.tensor([IDS]), none, none, none, len(IDS), len(IDS))
    torch.testing.assert_close(Teacher(model, AUX[:2]).read(batch).features[0], wanted)
    assert not any(m._forward_hooks for m in model.modules())


def test_a_model_whose_layers_do_not_run_in_their_order_has_no_features():
    """The first layer runs twice: which of its outputs is meant?"""
    model = tiny_model("llama")
    model.model.layers[1] = model.model.layers[0]
    with pytest.raises(specdec.AttachError, match="layers do not each run once, in the order of their list"):
        specdec.attach(model, random_head(model))
    specdec.attach(model, algo="lookup").detach()
    with pytest.raises(ValueError, match="layers do not each run once"):
        Teacher(model, (0, 1))


def test_a_hook_of_the_users_comes_first():
    model = tiny_model("llama")
    taps = Taps([model.model.layers[1]])
    with taps.reading():
        pass
    model.model.layers[1].register_forward_hook(lambda module, args, out: torch.zeros_like(out))
    with torch.no_grad(), taps.reading():
        model(torch.tensor([IDS]))
        assert not taps.take().any()
    assert len(model.model.layers[1]._forward_hooks) == 1
