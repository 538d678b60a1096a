"""The engine reads the weights that an optimizer writes: texts are those of the updated model, in every mode."""

import importlib.util
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

import specdec
from tests.heads import random_draft
from tests.test_attach import greedy, ragged_prompts
from tests.tiny_models import DEVICE, tiny_model

EXAMPLE = Path(__file__).parents[1] / "examples" / "rollouts.py"
COMPILED = {"cuda_graph": True, "compile": True, "compiler": "eager", "prefill_graph": "piecewise"}
MODES = {"eager": {"cuda_graph": False}, "graphs": {"cuda_graph": True}, "compiled": COMPILED}


@pytest.fixture(scope="module")
def example():
    spec = importlib.util.spec_from_file_location("rollouts", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("algo", ["eagle3", "nextn"] if torch.cuda.is_available() else ["nextn"])
def test_texts_follow_the_weights(example, mode, algo):
    """In each step: sampled rollouts, an update large enough to change the greedy text, and that text."""
    model = tiny_model("llama").to(DEVICE).requires_grad_(True)
    addresses = {name: p.data_ptr() for name, p in model.named_parameters()}
    draft = random_draft(model, algo).to(DEVICE)
    engine = specdec.attach(model, draft, max_batch=8, max_seq_len=96, logprobs=1, **MODES[mode])
    inside = {name: p.data_ptr() for name, p in model.named_parameters()}
    prompts, texts = ragged_prompts()[:2], []
    for row in example.rollouts(engine, prompts, steps=3, samples=4, new_tokens=24, lr=5.0):
        assert row["largest_gap"] < 1e-3
        texts.append(engine.generate(prompts, max_new_tokens=12).tokens)
        assert texts[-1] == [greedy(model, p, 12) for p in prompts]
    assert any(a != b for a, b in pairwise(texts)), "the updates must change what is said"
    assert {name: p.data_ptr() for name, p in model.named_parameters()} == inside, "nothing was moved or copied"
    if mode != "compiled":  # it joins products, so that weights move once, at attach
        assert inside == addresses
    engine.detach()


@pytest.mark.parametrize("mode", ["eager", "graphs"])
def test_nothing_is_dropped_out_between_steps_of_training(mode):
    """model.train() is up to the trainer: the engine decodes in eval mode and leaves the mode unchanged."""
    dropped = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.5)
    ids = {"bos_token_id": 1, "eos_token_id": 1, "pad_token_id": 0}
    config = GPT2Config(n_layer=2, n_head=2, n_embd=32, vocab_size=128, n_positions=128, **ids, **dropped)
    model = GPT2LMHeadModel(config).to(DEVICE).eval()
    engine = specdec.attach(model, algo="lookup", num_steps=2, max_seq_len=64, max_batch=1, **MODES[mode])
    before = engine.generate([[3, 4, 5]], max_new_tokens=12).tokens, engine.score([[3, 4]], [[5]])
    model.train()
    model.gradient_checkpointing_enable()
    assert (engine.generate([[3, 4, 5]], max_new_tokens=12).tokens, engine.score([[3, 4]], [[5]])) == before
    assert all(module.training for module in model.modules())
    assert model(torch.tensor([[3, 4]], device=DEVICE)).logits.requires_grad
    engine.detach()
