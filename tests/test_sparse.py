"""DeepSeek Sparse Attention: dense for texts of up to index_topk tokens; longer ones are not served."""

import pytest
import torch
import transformers as tf

import specdec
from tests.heads import random_draft
from tests.test_attach import greedy
from tests.tiny_models import _BASE, random_weights

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TYPES = ("deepseek_v32", "glm_moe_dsa", "axk2", "hy_v4")
PROMPTS = [[5, 6, 7, 8, 9, 10, 11], [20, 21, 22]]
PICKED = 40
SIZES = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8}
SIZES |= {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1, "moe_intermediate_size": 16}
SIZES |= {"first_k_dense_replace": 1, "index_topk": PICKED, "index_n_heads": 2, "index_head_dim": 8}


def sparse_model(kind):
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4}
    config = tf.AutoConfig.for_model(kind, **{**_BASE, **heads, **SIZES})
    return random_weights(tf.AutoModelForCausalLM.from_config(config)).to(DEVICE)


@pytest.mark.parametrize("way", ["plain", "tree", "chunks", "compiled"])
@pytest.mark.parametrize("kind", TYPES)
def test_text_is_that_of_generate(kind, way):
    model = sparse_model(kind)
    settings = {
        "plain": {},
        "tree": {"num_steps": 3, "topk": 2, "num_draft_tokens": 6},
        "chunks": {"max_prefill_tokens": 4},
        "compiled": {"compile": True, "compiler": "eager", "algo": "lookup", "num_steps": 2},
    }[way]
    draft = (random_draft(model, "standalone"),) if way == "tree" else ()
    expected = [greedy(model, prompt, 16) for prompt in PROMPTS]
    with specdec.attach(model, *draft, max_batch=2, **settings) as engine:
        assert engine.config.max_seq_len == PICKED
        assert engine.generate(PROMPTS, max_new_tokens=16, ignore_eos=True).tokens == expected
    assert [greedy(model, prompt, 16) for prompt in PROMPTS] == expected, "indexers pick again"


def test_longer_texts_are_refused_by_name():
    with pytest.raises(ValueError, match=f"index_topk={PICKED} tokens that an indexer picks"):
        specdec.attach(sparse_model("deepseek_v32"), max_seq_len=PICKED + 1)
