"""Attention over latents (MLA): text of tiny models of every type, products of heads, and when latents are expanded."""

import pytest
import torch
import transformers as tf
from torch import nn

import specdec
from specdec.backends.linear import latents as ops
from specdec.core.errors import GraphError
from tests.heads import random_draft
from tests.recurrent_models import CONFIGS as RECURRENT
from tests.test_attach import greedy
from tests.tiny_models import _BASE, DEVICE, random_weights

pytest.importorskip("triton")
from specdec.backends.triton.linear import latents as kernels

PROMPTS = [[5, 6, 7, 8, 9, 10, 11], [20, 21, 22]]
HEADS, RANK, ROTARY, KEYS, VALUES = 4, 32, 8, 16, 12
SIZES = {"num_attention_heads": HEADS, "num_key_value_heads": HEADS, "q_lora_rank": 24, "kv_lora_rank": RANK}
SIZES |= {"qk_nope_head_dim": KEYS, "qk_rope_head_dim": ROTARY, "v_head_dim": VALUES}
EXPERTS = {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1, "moe_intermediate_size": 16}
EXPERTS |= {"first_k_dense_replace": 1, "n_shared_experts": 1}
LONGCAT = {"num_layers": 2, "head_dim": ROTARY, "ffn_hidden_size": 64, "moe_topk": 2, "n_routed_experts": 4}
LONGCAT |= {"zero_expert_num": 2, "expert_ffn_hidden_size": 16}
TYPES = ("deepseek_v2", "deepseek_v3", "glm4_moe_lite", "minicpm3", "youtu", "axk1", "longcat_flash", "kimi_linear")
WAYS = {
    "plain": {},
    "chain": {"algo": "lookup", "num_steps": 3},
    "tree": {"num_steps": 3, "topk": 2, "num_draft_tokens": 6, "cuda_graph": True},
    "chunks": {"max_prefill_tokens": 4},
    "compiled": {"compile": True, "compiler": "eager", "algo": "lookup", "num_steps": 2},
}


def latent_model(kind, **settings):
    if kind == "kimi_linear":
        config = RECURRENT[kind]()
    else:
        given = {**_BASE, **SIZES, **(LONGCAT if kind == "longcat_flash" else EXPERTS), **settings}
        config = tf.AutoConfig.for_model(kind, **given)
    model = random_weights(tf.AutoModelForCausalLM.from_config(config)).to(DEVICE)
    model.generation_config.eos_token_id = None
    return model


EXPANDED = HEADS * (KEYS + ROTARY + VALUES)


def slot_size(engine):
    """Return the elements per slot, equal in all layers; `report` says whether they are latents."""
    (size,) = {shape.slot_size for shape in engine._core.context.pool.layers}
    assert (size != EXPANDED) == bool(engine.report().latents) == ("layers of latents" in str(engine.report()))
    return size


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", TYPES)
def test_text_is_that_of_generate(kind, way):
    if (kind, way) == ("longcat_flash", "compiled"):
        pytest.skip("its router reads on the host, so it runs uncompiled, with a warning")
    model, settings = latent_model(kind), dict(WAYS[way])
    if DEVICE.type != "cuda":
        settings.pop("cuda_graph", None)
    draft = (random_draft(model, "standalone"),) if way == "tree" else ()
    expected = [greedy(model, prompt, 16) for prompt in PROMPTS]
    with specdec.attach(model, *draft, max_batch=2, max_seq_len=64, **settings) as engine:
        assert engine.generate(PROMPTS, max_new_tokens=16).tokens == expected
        assert slot_size(engine) == (20 if kind == "kimi_linear" else RANK + ROTARY)
        assert (way == "compiled") == engine.report().compiled.startswith("compiled")
    assert [greedy(model, prompt, 16) for prompt in PROMPTS] == expected, "keys and values are expanded again"


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_shared_prefixes_share_pages_of_latents(backend):
    model = latent_model("glm4_moe_lite")
    shared = [[*range(5, 25), 30 + i] for i in range(3)]
    expected = [greedy(model, prompt, 6) for prompt in shared]
    settings = {"backend": backend, "algo": "lookup", "num_steps": 2, "page_size": 4, "prefix_cache": True}
    with specdec.attach(model, max_batch=2, max_seq_len=64, **settings) as engine:
        outs = [engine.generate([prompt], max_new_tokens=6) for prompt in shared]
        engine.check_integrity()
    assert [out.tokens[0] for out in outs] == expected
    assert [out.stats.num_cached_tokens for out in outs] == [0, 20, 20]


def test_latents_are_expanded_where_that_is_asked_for():
    model = latent_model("deepseek_v2")
    expected = [greedy(model, prompt, 8) for prompt in PROMPTS]
    with specdec.attach(model, latents=False, algo="lookup", max_batch=2, max_seq_len=64) as engine:
        assert slot_size(engine) == EXPANDED
        assert engine.generate(PROMPTS, max_new_tokens=8).tokens == expected


def test_latents_are_expanded_where_requests_choose_adapters(tmp_path):
    """Adapters may change what would expand the latents, a different one for each row."""
    peft = pytest.importorskip("peft")
    model = latent_model("minicpm3")
    config = peft.LoraConfig(r=4, lora_alpha=400, target_modules=["kv_b_proj"], init_lora_weights=False)
    peft.get_peft_model(latent_model("minicpm3"), config).save_pretrained(tmp_path)
    expected = [greedy(model, prompt, 8) for prompt in PROMPTS]
    with specdec.attach(model, adapters={"a": tmp_path}, max_batch=2, max_seq_len=64) as engine:
        assert slot_size(engine) == EXPANDED
        assert engine.generate(PROMPTS, max_new_tokens=8).tokens == expected
        adapted = engine.generate(PROMPTS, max_new_tokens=8, adapter="a").tokens
    own = peft.PeftModel.from_pretrained(model, tmp_path)
    assert adapted == [greedy(own, prompt, 8) for prompt in PROMPTS] != expected


def test_a_layer_that_does_more_than_multiply_expands_by_itself():
    peft = pytest.importorskip("peft")
    model = latent_model("minicpm3")
    config = peft.LoraConfig(r=4, lora_alpha=400, target_modules=["kv_b_proj"], init_lora_weights=False)
    with specdec.attach(model, max_batch=2, max_seq_len=64) as engine:
        adapted = peft.get_peft_model(model, config)
        with pytest.raises(GraphError, match=r"kv_b_proj \(another module\).*detach\(\) and attach\(\) again"):
            engine.generate(PROMPTS, max_new_tokens=8)
    expected = [greedy(adapted, prompt, 8) for prompt in PROMPTS]
    with specdec.attach(model, max_batch=2, max_seq_len=64) as engine:
        assert slot_size(engine) == EXPANDED
        assert engine.generate(PROMPTS, max_new_tokens=8).tokens == expected


CHANGES = {
    "forward_hooks": lambda layer: layer.register_forward_hook(lambda module, given, out: 3 * out),
    "forward_pre_hooks": lambda layer: layer.register_forward_pre_hook(lambda module, given: 3 * given[0]),
    "forward": lambda layer: setattr(layer, "forward", lambda x: 3 * nn.functional.linear(x, layer.weight)),
    "bias": lambda layer: setattr(layer, "bias", nn.Parameter(torch.ones(len(layer.weight), device=DEVICE))),
}


@pytest.mark.parametrize("way", CHANGES)
def test_what_is_added_to_such_a_layer_is_not_passed_over(way):
    model = latent_model("minicpm3")
    before = [greedy(model, prompt, 8) for prompt in PROMPTS]
    with specdec.attach(model, max_batch=2, max_seq_len=64) as engine:
        CHANGES[way](model.model.layers[0].self_attn.kv_b_proj)
        with pytest.raises(GraphError, match=rf"kv_b_proj.{way} .*detach\(\) and attach\(\) again"):
            engine.generate(PROMPTS, max_new_tokens=8)
    expected = [greedy(model, prompt, 8) for prompt in PROMPTS]
    with specdec.attach(model, max_batch=2, max_seq_len=64) as engine:
        assert engine.generate(PROMPTS, max_new_tokens=8).tokens == expected != before
        assert engine.report().latents == len(model.model.layers) - 1


def random(*shape, dtype=torch.bfloat16, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("sizes", [(1, 3, 16, 8, 24, 12), (70, 2, 72, 0, 80, 130)])
def test_products_equal_their_twins_and_rows_alone_equal_rows_together(sizes, dtype):
    num_rows, heads, keys, rotary, rank, values = sizes
    weight = random(heads * (keys + values), rank, dtype=dtype)
    q = random(heads, num_rows, keys + rotary, dtype=dtype, seed=1).transpose(0, 1)  # as in modules
    x = random(num_rows, heads, rank, dtype=dtype, seed=2)
    for ours, twin, given, number in (
        (kernels.latent_queries, ops.latent_queries.twin, q, rotary),
        (kernels.latent_values, ops.latent_values.twin, x, keys),
    ):
        found, want = ours(given, weight, number), twin(given, weight, number)
        assert found.shape == want.shape and found.is_contiguous()
        bits = {torch.float16: 2**-10, torch.bfloat16: 2**-7}[dtype]  # the interpreter rounds bf16 to zero
        torch.testing.assert_close(found.float(), want.float(), rtol=2 * bits, atol=2 * bits)
        assert ours(given[-1:], weight, number).equal(found[-1:])
    assert kernels.latent_queries(q, weight, rotary)[..., rank:].equal(q[..., keys:])


@pytest.mark.gpu
@pytest.mark.parametrize("num_rows", [2, 16, 17, 64, 65, 300])
def test_bits_of_a_row_are_its_own_at_the_sizes_of_glm_flash(num_rows):
    weight = random(20 * (192 + 256), 512)
    q, x = random(num_rows, 20, 256, seed=1), random(num_rows, 20, 512, seed=2)
    for op, given, number in ((ops.latent_queries, q, 64), (ops.latent_values, x, 192)):
        together = op(given, weight, number)
        assert all(op(given[i : i + 1], weight, number).equal(together[i : i + 1]) for i in range(num_rows))


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [{"num_steps": 3}, {"num_steps": 3, "topk": 2, "num_draft_tokens": 8}])
def test_bits_of_a_model_do_not_depend_on_what_ran_beside(shape):
    """Prefills, plain steps, chains and trees, at GLM-Flash's ranks, in compiled layers."""
    sizes = {"num_attention_heads": 20, "num_key_value_heads": 20, "kv_lora_rank": 512, "qk_rope_head_dim": 64}
    sizes |= {"qk_nope_head_dim": 192, "v_head_dim": 256, "max_position_embeddings": 2048}
    model = latent_model("youtu", **sizes).bfloat16()
    with specdec.attach(model, random_draft(model, "standalone"), max_batch=4, max_seq_len=500, **shape) as engine:
        assert engine.report().bits == "equal"
