"""`draft_weights="fp8"`: drafts that read half the bytes; the text is still the target's."""

from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import nn

import specdec
from specdec.backends.differences import distance
from specdec.backends.linear import fp8
from specdec.backends.linear.fp8 import CHUNK, in_blocks, times_blocks
from specdec.core.draft.head import DraftHead
from specdec.reach.heads.base import LayerConfig, OutputHead
from specdec.reach.heads.block import BlockConfig, BlockHead
from specdec.reach.heads.eagle import EagleConfig, EagleHead
from specdec.reach.heads.eagle3 import Eagle3Config, Eagle3Head
from specdec.reach.heads.nextn import NextNHead
from specdec.reach.heads.quantised import FP8Linear, fp8_head
from tests.heads import noisy, random_draft
from tests.test_attach import ragged_prompts
from tests.tiny_models import DEVICE, VOCAB, random_weights

NUM_TOKENS = 16
SHAPES = {"chain": {"num_steps": 3}, "tree": {"num_steps": 3, "topk": 3, "num_draft_tokens": 8}}
LAYER = LayerConfig(128, 256, 4, 2, 32)


def wide_model() -> Any:
    """A target in bf16 whose widths are multiples of 128."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 5, "head_dim": 32}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    config = LlamaConfig(vocab_size=VOCAB, pad_token_id=0, bos_token_id=1, eos_token_id=2, **sizes, **heads)
    return random_weights(LlamaForCausalLM(config)).bfloat16().to(DEVICE)


def wide_head(model: Any, algo: str) -> DraftHead:
    """A head for `wide_model` with random weights."""
    torch.manual_seed(0)
    if algo == "eagle":
        head: Any = EagleHead(EagleConfig(LAYER, VOCAB))
    elif algo == "eagle3":
        head = Eagle3Head(Eagle3Config(LAYER, 128, VOCAB, 64, (0, 1, 2)))
        head.set_hot_vocab(torch.randperm(VOCAB)[:64])
    elif algo == "block":
        own = {"causal": True, "predicts_next": True, "markov_rank": 128}
        head = BlockHead(BlockConfig(LAYER, 128, VOCAB, VOCAB, (0, 2), block_size=9, mask_token_id=1, **own))
        head.set_hot_vocab(torch.arange(VOCAB))
    else:
        head = NextNHead(model)
    return noisy(head).to(model.device, model.dtype)


def attached(model, draft, **settings):
    return specdec.attach(model, draft, **{"max_batch": 3, "max_seq_len": 128, **settings})


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("algo", ["eagle", "eagle3", "nextn", "block"])
def test_the_text_is_the_targets_and_drafts_are_nearly_those_of_the_head(algo, shape):
    model, prompts = wide_model(), ragged_prompts()[:3]
    head = wide_head(model, algo)
    before = {name: t.clone() for name, t in head.state_dict().items()}
    with attached(model, None) as engine:
        expected = engine.generate(prompts, max_new_tokens=NUM_TOKENS).tokens
    with attached(model, head, draft_weights="fp8", **SHAPES[shape]) as engine:
        worker = engine._core.round.worker
        assert engine.generate(prompts, max_new_tokens=NUM_TOKENS).tokens == expected
        assert worker.head is not head and worker.hot_ids.equal(head.hot_ids)
        inner = {name for name, m in worker.head.named_modules() if isinstance(m, FP8Linear)}
        states = torch.randn(5, 128, device=DEVICE).to(model.dtype)
        theirs = head.project(states, model.lm_head)
        assert 0 < distance(worker.narrow(states), theirs) < 0.05
    expected = {n for n, m in head.named_modules() if isinstance(m, nn.Linear) and not isinstance(m, OutputHead)}
    assert inner == expected
    assert all(t.equal(before[name]) for name, t in head.state_dict().items())


@pytest.mark.parametrize(("algo", "num_products"), [("eagle", 23), ("eagle3", 21), ("nextn", 23)])
def test_layers_traced_are_layers_as_they_are(algo, num_products, monkeypatch):
    """In graphs of compiled layers, where products of one input are joined, tau and text stay the same."""
    model, prompts = wide_model(), ragged_prompts()[:3]
    head, taus = wide_head(model, algo), []
    for settings in ({"compile": False}, {"compile": True, "compiler": "eager", "cuda_graph": True, "strict": True}):
        with attached(model, None, **settings) as engine:
            expected = engine.generate(prompts, max_new_tokens=NUM_TOKENS).tokens
        with attached(model, head, draft_weights="fp8", **settings) as engine:
            out = engine.generate(prompts, max_new_tokens=NUM_TOKENS)
            assert out.tokens == expected
            taus.append(out.stats.tau)
            calls = Mock(side_effect=fp8.joined_twin)  # once per product
            monkeypatch.setattr(fp8, "joined_twin", calls)
            engine.generate([5, 6, 7], max_new_tokens=2)
            monkeypatch.undo()
    if DEVICE.type == "cpu":  # elsewhere compiled layers round differently, and kernels replace the twin
        assert taus[0] == taus[1]
        # Four passes: QKV, o, gate and up, down, and fc of both inputs or of features. The output head of three steps.
        assert calls.call_count == num_products


@pytest.mark.parametrize(("N", "K"), [(16, 128), (272, 384), (CHUNK + 144, 128)])
def test_products_are_near_those_of_16_bits(N, K):
    torch.manual_seed(0)
    weight, x, bias = (torch.randn(*size, device=DEVICE).bfloat16() for size in ((N, K), (2, 3, K), (N,)))
    weights, scales = in_blocks(weight)
    assert weights.shape == (N, K) and scales.shape == (-(-N // 128), K // 128)
    theirs = nn.functional.linear(x, weight, bias)
    assert distance(times_blocks(x, (weights, scales), bias), theirs) < 0.05


@pytest.mark.parametrize(("size", "is_fp8"), [(32, True), (20, False)])
def test_what_drafts_from_fewer_tokens_is_in_fp8_where_there_is_a_kernel(size, is_fp8):
    model = wide_model()
    head = wide_head(model, "eagle3")
    with attached(model, head, draft_weights="fp8", draft_vocab=head.hot_ids[:size].tolist()) as engine:
        narrow = engine._core.round.worker.narrow
        weight = narrow.weight[0] if is_fp8 else narrow.weight
        assert len(narrow.ids) == size and weight.shape == (size, 128)
        assert weight.dtype == (torch.float8_e4m3fn if is_fp8 else torch.bfloat16)


def test_an_output_head_without_a_kernel_stays():
    model = wide_model()
    head = Eagle3Head(Eagle3Config(LAYER, 128, VOCAB, 50, (0, 1, 2)))
    head.set_hot_vocab(torch.arange(50))
    head = noisy(head).to(model.device, model.dtype)
    assert fp8_head(head).lm_head is not None
    with attached(model, head, draft_weights="fp8") as engine:
        worker = engine._core.round.worker
        assert worker.narrow is None and worker.head.lm_head.weight.equal(head.lm_head.weight)
        assert len(engine.generate(ragged_prompts()[0], max_new_tokens=4).tokens[0]) == 4


@pytest.mark.parametrize(
    ("draft", "settings", "message"),
    [
        ("float32", {}, "expected a draft in bfloat16 or float16, not torch.float32"),
        ("standalone", {}, "expected a draft head; load a draft that is a model in FP8 or 4 bits"),
        ("lookup", {"algo": "lookup"}, "expected a draft head"),
        (None, {}, "draft_weights: plain decoding drafts nothing"),
        ("capped", {}, "draft_weights='fp8': this model's output head does more than multiply"),
    ],
)
def test_refused(draft, settings, message):
    model = wide_model()
    if draft == "float32":
        source = wide_head(model.float(), "eagle3")
    elif draft == "capped":
        source, model.lm_head.weight = wide_head(model, "eagle"), nn.Parameter(model.lm_head.weight * 100)
        model.lm_head.register_forward_hook(lambda module, args, logits: logits.tanh())
    else:
        source = random_draft(model, draft) if draft == "standalone" else None
    with pytest.raises(ValueError, match=message):
        attached(model, source, draft_weights="fp8", **settings)


def test_refused_by_value_and_by_shape():
    model = wide_model()
    with pytest.raises(ValueError, match="draft_weights='int3': expected"):
        attached(model, wide_head(model, "eagle"), draft_weights="int3")
    narrow = EagleHead(EagleConfig(LayerConfig(32, 48, 4, 2, 8), VOCAB)).bfloat16()
    with pytest.raises(ValueError, match=r"expected products with N a multiple of 16 and K of 128, but .*\(48, 32\)"):
        fp8_head(narrow)
