"""Quantised targets: their texts equal their own generate(); checks between tokens still find faults."""

from collections import Counter
from contextlib import nullcontext
from unittest.mock import patch

import pytest
import torch
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    BitsAndBytesConfig,
    CompressedTensorsConfig,
    GptOssConfig,
    LlamaConfig,
    LlamaForCausalLM,
    QuantoConfig,
    Qwen3MoeConfig,
    TorchAoConfig,
)

import specdec
from specdec.core.errors import AttachError
from specdec.graphs.compile import pieces
from specdec.reach.targets.adapters import experts as adapted
from specdec.reach.targets.admission.quantised import quantised_linears, stand_ins
from tests import quantised_models
from tests.heads import random_draft
from tests.test_attach import greedy, ragged_prompts

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
CHAIN, TREE = {"num_steps": 3}, {"num_steps": 3, "topk": 3, "num_draft_tokens": 8}
GRAPHS = {"cuda_graph": True, "graph_sampling": "greedy"}
WAYS = {
    "plain": {"num_steps": 0},
    "chain": {**CHAIN, **GRAPHS, "prefill_graph": "breakable"},
    "tree": {**TREE, "cuda_graph": False},
    "compiled": {**CHAIN, **GRAPHS, "compile": True, "compiler": "eager"},
}
ROUNDS_ROWS = {"fp8": 8, "channels": 8, "w8a8": 3, "optimized": 8}  # texts diverge where two tokens are equally likely
KINDS = ("nf4", "int8", "torchao", "quanto", "fp8", "channels", "gptq", "awq", "w4a16", "w8a8", "optimized")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    torch.manual_seed(0)
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 8, "num_key_value_heads": 4}
    config = LlamaConfig(**sizes, vocab_size=160, num_hidden_layers=4, initializer_range=0.1, eos_token_id=2)
    path = tmp_path_factory.mktemp("plain")
    LlamaForCausalLM(config).save_pretrained(path)
    return path


@pytest.fixture(autouse=True)
def kernels_in_torch():
    with quantised_models.without_the_hub():
        yield


def load(folder, kind, threshold=0.0, dtype=torch.float32):
    if kind == "like nf4":
        model = LlamaForCausalLM.from_pretrained(folder, dtype=dtype)
        return quantised_models.quantised(model.to(DEVICE), quantised_models.nf4)
    if kind in ("fp8", "channels", "gptq", "awq"):
        model = LlamaForCausalLM.from_pretrained(folder, dtype=dtype)
        return quantised_models.quantised(model, getattr(quantised_models, kind)).to(DEVICE)
    if kind in ("w4a16", "w8a8", "optimized"):
        pytest.importorskip("compressed_tensors")
        into, is_fp8 = folder.parent / kind, kind != "w4a16"
        if not into.exists():
            quantised_models.compressed(LlamaForCausalLM.from_pretrained(folder), into, is_fp8)
        optimized = {"quantization_config": CompressedTensorsConfig(use_optimized_inference=True)}
        how = optimized if kind == "optimized" else {}
        hopper = patch.multiple("torch.cuda", is_available=lambda: True, get_device_capability=lambda *_: (9, 0))
        with hopper if how else nullcontext():
            return AutoModelForCausalLM.from_pretrained(into, dtype=dtype, **how).to(DEVICE)
    if kind in ("nf4", "int8"):
        pytest.importorskip("bitsandbytes")
        ways = {
            "nf4": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": torch.float32},
            "int8": {"load_in_8bit": True, "llm_int8_threshold": threshold},
        }
        how = BitsAndBytesConfig(**ways[kind])
    elif kind == "torchao":
        how = TorchAoConfig(pytest.importorskip("torchao.quantization").Int8WeightOnlyConfig())
    else:
        pytest.importorskip("optimum.quanto")
        how = QuantoConfig(weights="int8")
    model = AutoModelForCausalLM.from_pretrained(folder, quantization_config=how, dtype=torch.float32)
    return model.to(DEVICE) if kind in ("torchao", "quanto") else model


def experts(kind, dtype=torch.float32):
    """Return a model with quantised experts."""
    sizes = {"hidden_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2}
    sizes |= {"vocab_size": 160, "head_dim": 32, "num_experts_per_tok": 2, "eos_token_id": 2, "initializer_range": 0.2}
    torch.manual_seed(0)
    if kind == "fp8":
        config = Qwen3MoeConfig(**sizes, moe_intermediate_size=128, num_experts=4)
        return quantised_models.fp8_experts(AutoModelForCausalLM.from_config(config, dtype=dtype)).to(DEVICE)
    config = GptOssConfig(**sizes, intermediate_size=96, num_local_experts=4)
    return quantised_models.mxfp4(AutoModelForCausalLM.from_config(config, dtype=dtype).to(DEVICE))


def assert_equal_texts(model, texts, expected, may_tie=True):
    """Compare texts of `ragged_prompts`; may_tie: on a GPU, whose sums differ, near ties may differ."""
    for prompt, text, own in zip(ragged_prompts(), texts, expected, strict=False):
        at = next((i for i, (a, b) in enumerate(zip(text, own, strict=True)) if a != b), None)
        if at is not None:
            assert may_tie and DEVICE.type == "cuda", (text, own)
            logits = model(torch.tensor([prompt + own[:at]], device=DEVICE)).logits[0, -1].float()
            assert logits[own[at]] - logits[text[at]] < 0.05 * logits.std(), (text, own)


@pytest.mark.filterwarnings("ignore:.*not compiled")
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", ["fp8", "mxfp4"])
def test_text_of_experts_is_that_of_generate(kind, way):
    model, settings = experts(kind), dict(WAYS[way])
    expected = [greedy(model, p, 8) for p in ragged_prompts()]
    draft = random_draft(model, "eagle3").to(DEVICE) if settings["num_steps"] else None
    if draft is None:
        del settings["num_steps"]
    with specdec.attach(model, draft, max_batch=3, max_seq_len=128, **settings) as engine:
        assert_equal_texts(model, engine.generate(ragged_prompts(), max_new_tokens=8).tokens, expected)


@pytest.mark.filterwarnings("ignore:.*not compiled")
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", KINDS)
def test_text_is_that_of_generate(folder, kind, way):
    model, settings = load(folder, kind), dict(WAYS[way])
    count = ROUNDS_ROWS.get(kind, 16)
    expected = [greedy(model, p, count) for p in ragged_prompts()]
    draft = random_draft(model, "eagle3").to(DEVICE) if settings["num_steps"] else None
    if draft is None:
        del settings["num_steps"]
    with specdec.attach(model, draft, max_batch=3, max_seq_len=128, **settings) as engine:
        texts = engine.generate(ragged_prompts(), max_new_tokens=count).tokens
        assert_equal_texts(model, texts, expected, may_tie=kind in ROUNDS_ROWS)
        engine.check_integrity()
    assert [greedy(model, p, count) for p in ragged_prompts()[:1]] == expected[:1]


@pytest.fixture
def by_ops(monkeypatch):
    """Run quantised layers by our ops' twins on CPUs too; count the ops of flat graphs."""
    for module in ("quantised", "experts"):
        monkeypatch.setattr(f"specdec.reach.targets.adapters.{module}.has_kernels", lambda like: True)
    found, cut = Counter(), pieces.cut

    def spy(graph, at):
        names = [str(n.target).split(".")[1] for n in graph.graph.nodes if str(n.target).startswith("specdec.")]
        found.update(names, gated=sum(len(n.args) > 4 and n.args[-1] == "silu" for n in graph.graph.nodes))
        return cut(graph, at)

    monkeypatch.setattr("specdec.graphs.compile.trace.cut", spy)
    return found


@pytest.mark.filterwarnings("error:.*uncompiled")
@pytest.mark.parametrize("kind", ["fp8", "channels", "gptq", "awq", "w4a16", "like nf4"])
def test_layers_are_of_our_ops(folder, kind, by_ops):
    """Q, K and V are one product of a layer, gate and up another; text stays, live and compiled, and weights are read
    again after writes."""
    dtype = torch.float32 if kind == "channels" else torch.bfloat16  # with one scale per row, less changes the text
    model = load(folder, kind, dtype=dtype)
    with specdec.attach(model, max_batch=3, max_seq_len=64, compile=True, compiler="eager") as engine:
        names = ("fp8_linear", "gated_linear_fp8", "packed_linear", "gated", "quantise", "rms_norm_fp8")
        expected = {"fp8": [12, 4, 0, 4, 4, 1], "channels": [16, 0, 0, 4, 8, 1]}.get(kind, [0, 0, 16, 4, 0, 0])
        assert [by_ops[name] for name in names] == expected
        assert by_ops["add_rms_norm_fp8"] == (7 if kind in ("fp8", "channels") else 0)
        compiled = engine.generate(ragged_prompts()[:2], max_new_tokens=5).tokens
        may_tie = kind in ("like nf4", "channels")  # a GPU's `scaled_mm` is off by 1e-4 in fp32, our sums by 1e-7
        assert_equal_texts(model, compiled, [greedy(model, p, 5) for p in ragged_prompts()[:2]], may_tie)
        layer = model.model.layers[0].mlp.down_proj
        written = {"w4a16": ("weight", "weight_scale"), "gptq": ("scales",), "awq": ("scales",)}.get(kind, ())
        with torch.no_grad():
            [getattr(layer, name).mul_(-8) for name in written]
        again = engine.generate(ragged_prompts()[:2], max_new_tokens=5).tokens
        assert_equal_texts(model, again, [greedy(model, p, 5) for p in ragged_prompts()[:2]], may_tie)
        assert (again == compiled) == (not written)


@pytest.mark.parametrize("kind", KINDS)
def test_a_fault_between_tokens_is_still_found(folder, kind):
    """Keys that are smaller when the engine runs the model: rounding of quantised products does not hide them."""
    model = load(folder, kind)
    layer = model.model.layers[1].self_attn

    def shrunk(module, args, output):
        return output * 0.7 if model.config._attn_implementation == "specdec" else output

    with layer.k_proj.register_forward_hook(shrunk), pytest.raises(AttachError, match="its logits differ from its own"):
        specdec.attach(model)


@pytest.mark.filterwarnings("error:.*uncompiled")
@pytest.mark.parametrize(("kind", "op"), [("fp8", "grouped_fp8"), ("mxfp4", "grouped_mxfp4")])
def test_experts_are_of_our_ops(kind, op, by_ops):
    model = experts(kind, torch.float32 if kind == "fp8" else torch.bfloat16)  # FP8 rows change with less
    with specdec.attach(model, max_batch=3, max_seq_len=64, compile=True, compiler="eager") as engine:
        assert (by_ops[op], by_ops["gated"]) == (8, 4 if kind == "fp8" else 0)
        texts = engine.generate(ragged_prompts()[:2], max_new_tokens=5).tokens
        assert_equal_texts(model, texts, [greedy(model, p, 5) for p in ragged_prompts()[:2]])


@pytest.mark.filterwarnings("ignore:.*not compiled")
def test_faults_of_models_with_experts_in_fp8_are_found(monkeypatch):
    """A fault between tokens, and one in the product with experts."""
    model = experts("fp8")
    layer = model.model.layers[1].self_attn

    def shrunk(module, args, output):
        return output * 0.7 if model.config._attn_implementation == "specdec" else output

    with layer.k_norm.register_forward_hook(shrunk), pytest.raises(AttachError, match="its logits differ from its own"):
        specdec.attach(model)
    own = adapted.grouped_fp8
    monkeypatch.setattr(adapted, "grouped_fp8", lambda *given: own(*given) * 1.1)
    with pytest.raises(AttachError, match="its experts in FP8 give what differs by"):
        specdec.attach(model)


def test_stand_ins_leave_no_trace(folder):
    model = load(folder, "nf4")
    layers, ids = quantised_linears(model), torch.tensor([ragged_prompts()[0]], device=DEVICE)
    before = model(ids).logits
    with stand_ins(model):
        assert not torch.allclose(model(ids).logits, before)
    assert len(layers) == 28 and torch.equal(model(ids).logits, before)
    assert not any("forward" in layer.__dict__ for layer in layers if "_old_forward" not in layer.__dict__)


def test_a_new_weight_is_packed_where_it_may_be_attached_again(folder):
    """bitsandbytes packs a CPU weight in its layer's next forward, such as after PEFT has merged an adapter."""
    bitsandbytes, model = pytest.importorskip("bitsandbytes"), load(folder, "nf4")
    layer, prompt = model.model.layers[1].mlp.up_proj, ragged_prompts()[0]
    with specdec.attach(model, max_batch=1, max_seq_len=64, cuda_graph=False, compile=False) as engine:
        new = bitsandbytes.nn.Params4bit(torch.randn(256, 128) / 8, quant_type="nf4", compress_statistics=False)
        layer.weight = new.to(DEVICE)
        text = engine.generate([prompt], max_new_tokens=8).tokens[0]
    assert text == greedy(model, prompt, 8)
    specdec.attach(model, max_seq_len=64, cuda_graph=False, compile=False).detach()


def test_what_cannot_be_run_is_refused(folder):
    with pytest.raises(AttachError, match=r"llm_int8_threshold=6.0\): texts would depend on those beside them"):
        specdec.attach(load(folder, "int8", threshold=6.0))
    model = load(folder, "nf4")
    model.model.register_buffer("packed", torch.zeros(4, 4, dtype=torch.uint8, device=DEVICE))
    with pytest.raises(AttachError, match=r"model\.packed is packed \(1 such tensors\) and not a linear layer's"):
        specdec.attach(model)
    model = load(folder, "nf4")
    model.model.embed_tokens.weight = nn.Parameter(model.model.embed_tokens.weight.to(torch.int32), requires_grad=False)
    with pytest.raises(AttachError, match=r"embed_tokens\.weight is packed"):
        specdec.attach(model)
