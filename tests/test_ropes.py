"""Rotary embeddings that change with the longest sequence: constant up to a limit, which the engine keeps."""

import pytest
import torch
import transformers as tf

import specdec
from specdec.backends.rope import rope_tables
from specdec.backends.triton.attention import tables
from specdec.reach.targets.shape import rope_limit
from tests.heads import random_head
from tests.test_attach import greedy
from tests.tiny_models import _BASE, VOCAB, random_weights

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LIMIT = 64
LONGROPE = {"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [4.0] * 8}


def longrope():
    own = {"rope_parameters": {"rope_theta": 1e4, **LONGROPE}, "original_max_position_embeddings": LIMIT}
    return tf.Phi3Config(**_BASE, **own)


def dynamic():
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    return tf.LlamaConfig(**{**_BASE, "max_position_embeddings": LIMIT}, rope_parameters=rope)


def anew():
    """A model that computes its frequencies in every forward, on the host."""
    scales = {"short_mscale": 1.2, "long_mscale": 1.4, "original_max_position_embeddings": LIMIT}
    rope = {"rope_theta": 1e4, **LONGROPE, **scales}
    return tf.PhimoeConfig(**_BASE, num_local_experts=2, rope_parameters=rope)


TRACED = {"compile": True, "compiler": "eager"}


@pytest.mark.parametrize(("config", "settings"), [(longrope, TRACED), (dynamic, {}), (anew, {})])
def test_text_within_the_limit_is_the_models_own(config, settings):
    """Also after transformers has seen a longer text and changed the frequencies, while the engine is attached."""
    model, prompt = random_weights(tf.AutoModelForCausalLM.from_config(config())), list(range(3, 33))
    longer = torch.arange(LIMIT + 30).remainder(VOCAB - 3)[None] + 3
    expected = greedy(model, prompt, 16)
    beyond = model(longer).logits
    engine = specdec.attach(model, random_head(model), num_steps=3, **settings)
    assert engine.config.max_seq_len == LIMIT
    for _ in range(2):
        assert engine.generate([prompt], max_new_tokens=16).tokens == [expected]
        assert torch.equal(model(longer).logits, beyond)
    engine.detach()
    assert not [name for module in model.modules() for name in vars(module) if name == "forward"]
    kind = model.config.rope_parameters["rope_type"]
    with pytest.raises(
        ValueError, match=rf"max_seq_len=65: .* up to 64 \(beyond, rope type '{kind}' rotates all tokens"
    ):
        specdec.attach(model, max_seq_len=LIMIT + 1)


def test_the_limit_is_that_of_the_first_rope_to_change():
    config = tf.LlamaConfig(**_BASE)
    assert rope_limit(config) is None
    early = {**LONGROPE, "original_max_position_embeddings": 32}
    config.rope_parameters = {"full_attention": early, "sliding_attention": {"rope_type": "dynamic"}}
    assert rope_limit(config) == (32, "longrope")


@pytest.mark.parametrize("is_doubled", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_kernel_of_tables_is_its_twin(is_doubled, dtype):
    positions = torch.tensor([[0, 1, 77, 4095, 131071]], device=DEVICE)
    frequencies = 1e4 ** -(torch.arange(24, device=DEVICE) / 24)
    for ours, theirs in zip(
        tables.rope_tables(positions, frequencies, 1.25, is_doubled, dtype),
        rope_tables.twin(positions, frequencies, 1.25, is_doubled, dtype),
        strict=True,
    ):
        assert ours.shape == theirs.shape == (1, 5, 48 if is_doubled else 24) and ours.dtype == dtype
        torch.testing.assert_close(ours, theirs, atol=1e-6 if dtype == torch.float32 else 8e-3, rtol=0)
