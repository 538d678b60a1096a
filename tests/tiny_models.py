"""Tiny random targets of many architectures, so small that a CPU runs hundreds of forwards per second."""

import os

import torch
import transformers as tf

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
VOCAB = 128
WINDOW = 8
HEAD_DIM = int(os.environ.get("SPECDEC_TEST_HEAD_DIM", "16"))  # 64 where kernels need it: see tests/attention.py
# With this seed no token of the tests' greedy texts is a near-tie (0.009 standard deviations apart, with the default
# 0.00004), which attention in 16 bits would decide differently.
SEEDS_64 = {"llama": 24}

_BASE = dict(
    vocab_size=VOCAB,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=512,
    tie_word_embeddings=False,
    bos_token_id=1,
    eos_token_id=2,
    pad_token_id=0,
)
_MOE = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=48)
_WINDOWED = ["sliding_attention", "full_attention"] * 2

CONFIGS = {
    "llama": lambda: tf.LlamaConfig(**_BASE, head_dim=HEAD_DIM),
    "llama64": lambda: tf.LlamaConfig(**_BASE, head_dim=64),
    "qwen2_windowed": lambda: tf.Qwen2Config(
        **_BASE, head_dim=HEAD_DIM, use_sliding_window=True, sliding_window=WINDOW, layer_types=_WINDOWED
    ),
    "qwen3": lambda: tf.Qwen3Config(**_BASE, head_dim=HEAD_DIM),
    "gemma2": lambda: tf.Gemma2Config(**_BASE, head_dim=HEAD_DIM, sliding_window=WINDOW, layer_types=_WINDOWED),
    "gemma3": lambda: tf.Gemma3TextConfig(**_BASE, head_dim=HEAD_DIM, sliding_window=WINDOW, layer_types=_WINDOWED),
    "gpt_oss": lambda: tf.GptOssConfig(
        **_BASE,
        head_dim=HEAD_DIM,
        sliding_window=WINDOW,
        layer_types=_WINDOWED,
        num_local_experts=4,
        num_experts_per_tok=2,
    ),
    "qwen3_moe": lambda: tf.Qwen3MoeConfig(**_BASE, head_dim=HEAD_DIM, **_MOE),
    "deepseek_v3": lambda: tf.DeepseekV3Config(
        **{**_BASE, "num_key_value_heads": 4},
        q_lora_rank=24,
        kv_lora_rank=32,
        qk_rope_head_dim=8,
        qk_nope_head_dim=16,
        v_head_dim=12,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_group=2,
        topk_group=1,
        n_shared_experts=1,
        moe_intermediate_size=48,
        first_k_dense_replace=1,
    ),
    "qwen3_next": lambda: tf.Qwen3NextConfig(
        **_BASE,
        head_dim=HEAD_DIM,
        **_MOE,
        shared_expert_intermediate_size=48,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=16,
        linear_value_head_dim=16,
    ),
    "llama4": lambda: tf.Llama4TextConfig(
        **_BASE,
        head_dim=HEAD_DIM,
        attention_chunk_size=16,
        num_local_experts=2,
        intermediate_size_mlp=96,
        floor_scale=8,
        attn_scale=1.0,
    ),
    "rwkv": lambda: tf.RwkvConfig(vocab_size=VOCAB, context_length=64, hidden_size=32, num_hidden_layers=2),
    "gptj": lambda: tf.GPTJConfig(vocab_size=VOCAB, n_positions=256, n_embd=64, n_layer=4, n_head=4, rotary_dim=16),
    "gpt_neo": lambda: tf.GPTNeoConfig(
        vocab_size=VOCAB,
        hidden_size=64,
        num_layers=4,
        num_heads=4,
        attention_types=[[["global", "local"], 2]],
        window_size=WINDOW,
        max_position_embeddings=256,
    ),
    "openai_gpt": lambda: tf.OpenAIGPTConfig(vocab_size=VOCAB, n_positions=128, n_embd=64, n_layer=4, n_head=4),
    "diffllama": lambda: tf.DiffLlamaConfig(**_BASE, head_dim=HEAD_DIM),
    "hrm_text": lambda: tf.HrmTextConfig(
        **{**_BASE, "num_hidden_layers": 8}, head_dim=HEAD_DIM, num_layers_per_stack=2, H_cycles=2, L_cycles=1
    ),
    "bart": lambda: tf.BartConfig(
        vocab_size=VOCAB,
        d_model=64,
        decoder_layers=4,
        encoder_layers=4,
        decoder_attention_heads=4,
        decoder_ffn_dim=96,
        max_position_embeddings=256,
        is_decoder=True,
        is_encoder_decoder=False,
        forced_eos_token_id=None,
    ),
    "roberta": lambda: tf.RobertaConfig(**_BASE, is_decoder=True),
    "gemma3_composite": lambda: tf.Gemma3Config(  # the config of its text part makes its masks
        text_config=CONFIGS["gemma3"](),
        vision_config=dict(
            **dict(hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2),
            **dict(image_size=28, patch_size=14),
        ),
        mm_tokens_per_image=4,
    ),
}
ADMITTED = ("llama", "qwen2_windowed", "qwen3", "gemma2", "gemma3", "gpt_oss", "qwen3_moe", "deepseek_v3")
CHUNKED = ("llama4",)  # served by the torch backend only
# They attend in their own method, not through AttentionInterface; gptj before transformers 5.24.
OWN_METHODS = ("gptj", "gpt_neo", "openai_gpt")
REPEATED = ("diffllama", "hrm_text")  # their attention modules are called several times per forward
COUNTED = ("bart", "roberta")  # their positions are counted, or numbered in two ways
REFUSED = ("rwkv",)


def tiny_model(name: str, seed: int = 0, dtype: torch.dtype = torch.float32) -> tf.PreTrainedModel:
    """A random model of `name` in eval mode whose greedy text varies (weights scaled up from HF's tiny init)."""
    seed += SEEDS_64.get(name, 0) if HEAD_DIM == 64 else 0
    torch.manual_seed(seed)
    return random_weights(tf.AutoModelForCausalLM.from_config(CONFIGS[name]()), seed).to(dtype)


def model_of(name: str = "llama", seed: int = 0, dtype: torch.dtype = torch.float32) -> tf.PreTrainedModel:
    """Return `tiny_model` on the tests' device."""
    return tiny_model(name, seed, dtype).to(DEVICE)


def random_weights(model: tf.PreTrainedModel, seed: int = 0) -> tf.PreTrainedModel:
    """Return `model` in eval mode with random matrices, scaled up from HF's tiny init."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        if parameter.dim() >= 2:
            scale = 0.6 / parameter.shape[-1] ** 0.5 if parameter.shape[0] != VOCAB else 0.3
            parameter.data = torch.randn(parameter.shape, generator=generator) * scale
    model.generation_config.eos_token_id = 2
    model.generation_config.pad_token_id = 0
    return model.eval()
