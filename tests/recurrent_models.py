"""Tiny random models of every type in transformers with recurrent layers, with all their kinds of layers."""

from collections.abc import Callable
from typing import Any

import torch
import transformers as tf

from tests.tiny_models import VOCAB, random_weights

_BASE = dict(
    vocab_size=VOCAB,
    hidden_size=32,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    intermediate_size=48,
    max_position_embeddings=8192,
    tie_word_embeddings=False,
    bos_token_id=1,
    eos_token_id=2,
    pad_token_id=0,
)
_MOE = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24)
_SHARED = dict(shared_expert_intermediate_size=24)
_LINEAR = dict(linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=8, linear_value_head_dim=12)
_SPARSE = dict(indexer_n_heads=2, indexer_kv_heads=1, indexer_head_dim=8, indexer_budget=8, indexer_compress_ratio=4)
_KIMI = dict(linear_num_heads=2, linear_head_dim=12)
_SSD = dict(mamba_n_heads=8, mamba_n_groups=2, mamba_d_state=6, mamba_d_head=8, mamba_chunk_size=16)
_S6 = dict(mamba_d_state=6, mamba_dt_rank=4)
_DELTA_LAYERS = ["linear_attention", "full_attention", "linear_attention", "linear_attention"]
_LATENT = dict(kv_lora_rank=16, qk_rope_head_dim=4, qk_nope_head_dim=8, v_head_dim=6, num_key_value_heads=4)


def _config(cls: str, *parts: dict[str, Any], **rest: Any) -> Callable[[], Any]:
    given: dict[str, Any] = dict(_BASE)
    for part in parts:
        given |= part
    return lambda: getattr(tf, cls)(**given | rest)


CONFIGS: dict[str, Callable[[], Any]] = {
    "qwen3_next": _config("Qwen3NextConfig", _MOE, _SHARED, _LINEAR, head_dim=8, layer_types=_DELTA_LAYERS),
    "qwen3_5": _config("Qwen3_5TextConfig", _LINEAR, head_dim=8, layer_types=_DELTA_LAYERS),
    "qwen3_5_moe": _config("Qwen3_5MoeTextConfig", _MOE, _SHARED, _LINEAR, head_dim=8, layer_types=_DELTA_LAYERS),
    "olmo_hybrid": _config("OlmoHybridConfig", _LINEAR, linear_num_key_heads=4, layer_types=_DELTA_LAYERS),
    "qwen4_exp": _config(
        "Qwen4ExpTextConfig",
        _MOE,
        _SHARED,
        _LINEAR,
        _SPARSE,
        head_dim=8,
        layer_types=_DELTA_LAYERS,
        hc_count=2,
        hc_lowrank=8,
    ),
    "kimi_linear": _config(
        "KimiLinearConfig",
        _LATENT,
        _KIMI,
        num_local_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=24,
        layer_types=_DELTA_LAYERS,
    ),
    "mamba2": _config("Mamba2Config", num_heads=8, head_dim=8, state_size=6, n_groups=2, chunk_size=16),
    "bamba": _config("BambaConfig", _SSD, attn_layer_indices=[1]),
    "granitemoehybrid": _config(
        "GraniteMoeHybridConfig",
        _SSD,
        num_local_experts=4,
        shared_intermediate_size=24,
        layer_types=["mamba", "attention", "mamba", "mamba"],
    ),
    "falcon_h1": _config("FalconH1Config", _SSD, mamba_d_ssm=64, num_hidden_layers=3),
    "nemotron_h": _config(
        "NemotronHConfig",
        layers_block_type=["linear_attention", "attention", "moe", "linear_attention"],
        head_dim=8,
        ssm_state_size=6,
        mamba_num_heads=8,
        mamba_head_dim=8,
        n_groups=2,
        chunk_size=16,
        n_routed_experts=4,
        moe_intermediate_size=24,
        moe_shared_expert_intermediate_size=24,
    ),
    "zamba2": _config(
        "Zamba2Config",
        layers_block_type=["mamba", "hybrid", "mamba", "hybrid"],
        mamba_d_state=6,
        n_mamba_heads=8,
        mamba_ngroups=2,
        chunk_size=16,
        num_mem_blocks=1,
        num_key_value_heads=4,
    ),
    "mamba": _config("MambaConfig", state_size=6, num_hidden_layers=3),
    "falcon_mamba": _config("FalconMambaConfig", state_size=6, num_hidden_layers=3),
    "jamba": _config("JambaConfig", _S6, num_experts=4, attn_layer_period=2, attn_layer_offset=1),
    "zamba": _config(
        "ZambaConfig",
        _S6,
        n_mamba_heads=2,
        layers_block_type=["mamba", "hybrid", "mamba", "hybrid"],
        num_key_value_heads=4,
    ),
    "lfm2": _config("Lfm2Config", layer_types=["conv", "full_attention", "conv", "conv"], conv_bias=True),
    "lfm2_moe": _config(
        "Lfm2MoeConfig", _MOE, layer_types=["conv", "full_attention", "conv", "conv"], num_dense_layers=2
    ),
    "inkling": _config(
        "InklingTextConfig",
        head_dim=8,
        swa_num_attention_heads=4,
        swa_num_key_value_heads=2,
        swa_head_dim=8,
        sliding_window_size=8,
        d_rel=4,
        rel_extent=16,
        moe_intermediate_size=24,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_shared_experts=1,
        unpadded_vocab_size=VOCAB,
    ),
}


def recurrent_model(name: str, seed: int = 0, dtype: torch.dtype = torch.float32, **changes: Any) -> tf.PreTrainedModel:
    """Return a random model of `name` in eval mode whose recurrent states affect the logits; changes: to its config."""
    torch.manual_seed(seed)
    config = CONFIGS[name]()
    for key, value in changes.items():
        setattr(config, key, value)
    model = random_weights(tf.AutoModelForCausalLM.from_config(config), seed)
    for parameter_name, parameter in model.named_parameters():
        if parameter_name.endswith("A_log"):  # decay rates, which are matrices in some types
            parameter.data = torch.rand(parameter.shape) * 2 - 1
    return model.to(dtype).requires_grad_(False)
