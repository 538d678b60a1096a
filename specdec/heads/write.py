"""Writes draft heads: config.json and model.safetensors of each layout, from a head and from nothing else."""

import json
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from specdec.checkpoints.replacing import check_free, write_checkpoint
from specdec.heads.base import DraftHead, LayerConfig
from specdec.heads.eagle import EagleConfig, EagleHead
from specdec.heads.eagle3 import Eagle3Config, Eagle3Head, default_aux_layers
from specdec.heads.layouts import AUX_IDS, AUX_LAYERS, LAYOUTS, OWN_KEY
from specdec.heads.nextn import NextNConfig, NextNHead
from specdec.heads.nextn_weights import split_experts

WRITTEN: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {"eagle": ("eagle",), "eagle3": ("eagle3", "speculators"), "nextn": ("nextn",)}
)  # layouts that can be written, by algorithm, the first by default


def save_head(
    folder: str | Path,
    head: DraftHead,
    *,
    layout: str | None = None,
    dtype: torch.dtype,
    lm_head_from_target: bool = False,
    verifier: Mapping[str, Any] | None = None,
    num_layers: int | None = None,
    overwrite: bool = False,
) -> None:
    """Write `head` to `folder` (config.json, model.safetensors), floats as `dtype`.

    layout: "eagle", "eagle3" (official), "speculators" or "nextn" (DeepSeek-V3's names); None: the official one, or
    speculators for an EAGLE-3 head that the official one cannot express. lm_head_from_target leaves out EAGLE-3's
    lm_head, whose rows must then be the target's. verifier: speculators' `speculators_config.verifier`, the target.
    num_layers: the target's, with which aux ids that are every reader's default are left out. Embeddings and output
    heads shared with the target are not stored. overwrite: take the place of a checkpoint in `folder`. ValueError names
    what a layout cannot express, or what lies in `folder`.
    """
    name = layout or default_layout(head)
    if name not in WRITTEN[head.algo]:
        raise ValueError(f"layout={name!r}: expected one of {WRITTEN[head.algo]} for a head of {head.algo!r}")
    if lm_head_from_target and not isinstance(head, Eagle3Head):
        raise ValueError(f"lm_head_from_target=True: a head of {head.algo!r} has no lm_head of its own to leave out")
    check_free(folder, overwrite)
    config = _config_json(name, head, lm_head_from_target, verifier)
    if isinstance(head, Eagle3Head):
        _without_default_ids(config, head.config, num_layers)
    state = {n: t.detach().cpu() for n, t in head.state_dict().items()}
    if lm_head_from_target:
        del state["lm_head.weight"]
    weights = dict(head.named_parameters())  # buffers that transformers keeps in fp32 stay so
    state = {n: t.to(dtype) if n in weights else t for n, t in state.items()}
    depth = head.hf_config.num_hidden_layers if isinstance(head, NextNHead) else None
    if isinstance(head, NextNHead):
        state = split_experts(state)
    named = {LAYOUTS[name].theirs(n, depth): t.contiguous() for n, t in state.items()}
    write_checkpoint(folder, config, named)


def default_layout(head: DraftHead) -> str:
    """The layout that `head` is written in if none is asked for."""
    if isinstance(head, Eagle3Head) and inexpressible(head.config):
        return "speculators"
    return WRITTEN[head.algo][0]


def inexpressible(c: Eagle3Config) -> list[str]:
    """What the official EAGLE-3 layout cannot say of a head."""
    flags = {
        "norm_before_residual": c.norm_before_residual,
        "norm_before_fc": c.norm_before_fc,
        "norm_output (recycles_normed)": c.recycles_normed,
        "sliding_window": c.layer.window is not None,
        "q_norm and k_norm (qwen3)": c.layer.qk_norm,
        f"{c.num_layers} layers": c.num_layers > 1,
    }
    return [name for name, is_set in flags.items() if is_set]


def _config_json(
    layout: str, head: DraftHead, lm_head_from_target: bool, verifier: Mapping[str, Any] | None
) -> dict[str, Any]:
    """config.json of `head` in `layout`."""
    if isinstance(head, EagleHead):
        return eagle_json(head.config)
    if isinstance(head, NextNHead):
        return nextn_json(head)
    assert isinstance(head, Eagle3Head), type(head)
    if layout == "eagle3":
        return eagle3_json(head.config, lm_head_from_target)
    ours = {"lm_head_from_target": True} if lm_head_from_target else {}
    return {**speculators_json(head.config), **ours, "speculators_config": proposal_json(verifier)}


def eagle_json(c: EagleConfig) -> dict[str, Any]:
    """config.json of the EAGLE-1/2 layout: an ordinary Llama config, and `bias` of fc."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "num_hidden_layers": c.num_layers,
        **_layer_json(c.layer),
        "vocab_size": c.vocab_size,
        "bias": c.fc_bias,
        "qkv_bias": c.layer.qkv_bias,
        "tie_word_embeddings": False,
    }


def eagle3_json(c: Eagle3Config, lm_head_from_target: bool) -> dict[str, Any]:
    """config.json of the official EAGLE-3 layout, as SpecForge writes it. ValueError names what it cannot express."""
    flags = inexpressible(c)
    if flags:
        raise ValueError(f"the official EAGLE-3 layout cannot express {', '.join(flags)}; keep it in speculators'")
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "num_hidden_layers": 1,
        "target_hidden_size": c.target_hidden_size,
        **_layer_json(c.layer),
        "attention_bias": c.layer.qkv_bias,
        "vocab_size": c.vocab_size,
        "draft_vocab_size": c.draft_vocab_size,
        "tie_word_embeddings": False,
        "fc_norm": c.fc_norm,
        "lm_head_from_target": lm_head_from_target,
        "eagle_config": {**_aux_ids(c), "use_aux_hidden_state": True},
        AUX_LAYERS: list(c.aux_layers),
    }


def speculators_json(c: Eagle3Config) -> dict[str, Any]:
    """config.json of speculators' EAGLE-3 layout, but for `proposal_json`."""
    layer = {
        "model_type": "qwen3" if c.layer.qk_norm else "llama",
        "num_hidden_layers": c.num_layers,
        **_layer_json(c.layer),
        "attention_bias": c.layer.qkv_bias,
        "vocab_size": c.vocab_size,
        "tie_word_embeddings": False,
    }
    if c.layer.window is not None:
        kinds = ["sliding_attention"] * c.num_layers
        layer.update(sliding_window=c.layer.window, use_sliding_window=True, layer_types=kinds)
    return {
        "architectures": ["Eagle3DraftModel"],
        "speculators_model_type": "eagle3",
        "transformer_layer_config": layer,
        "draft_vocab_size": c.draft_vocab_size,
        "target_hidden_size": None if c.target_hidden_size == c.layer.hidden_size else c.target_hidden_size,
        "norm_before_residual": c.norm_before_residual,
        "norm_before_fc": c.norm_before_fc,
        "fc_norm": c.fc_norm,
        "norm_output": c.recycles_normed,
        "embed_requires_grad": False,
        **_aux_ids(c),
        AUX_LAYERS: list(c.aux_layers),
    }


def proposal_json(verifier: Mapping[str, Any] | None) -> dict[str, Any]:
    """`speculators_config`: how to draft, and for which target ({"name_or_path", "architectures"})."""
    greedy = {"proposal_type": "greedy", "speculative_tokens": 3, "verifier_accept_k": 1, "accept_tolerance": 0.0}
    return {
        "algorithm": "eagle3",
        "default_proposal_method": "greedy",
        "proposal_methods": [greedy],
        "verifier": dict(verifier or {"name_or_path": None, "architectures": []}),
    }


def nextn_json(head: NextNHead) -> dict[str, Any]:
    """config.json of an MTP layer alone: the target's own, and ours where the head is not like DeepSeek-V3's."""
    c, plain = head.config, NextNConfig()
    whole = json.loads(head.hf_config.to_json_string(use_diff=False))
    of_a_file = {"_name_or_path", "_model_name_or_path", "quantization_config", "dtype", "architectures"}
    config = {name: value for name, value in whole.items() if name not in of_a_file}
    keys = ("hidden_first", "recycles_normed")
    own = {key: getattr(c, key) for key in keys if getattr(c, key) != getattr(plain, key)}
    return {**config, "num_nextn_predict_layers": c.num_layers, **({OWN_KEY: own} if own else {})}


def _aux_ids(c: Eagle3Config) -> dict[str, list[int]]:
    """Aux ids as files count them: the residual stream after k layers is the output of layer k-1."""
    return {AUX_IDS: [i + 1 for i in c.aux_layers]}


def _without_default_ids(config: dict[str, Any], c: Eagle3Config, num_layers: int | None) -> None:
    """Leave the paper's layers of a target of `num_layers` out, which every reader takes by itself: where ids stand,
    SGLang counts them otherwise than vLLM does."""
    if num_layers is not None and num_layers > 7 and c.aux_layers == default_aux_layers(num_layers):
        config.get("eagle_config", config).pop(AUX_IDS)


def _layer_json(c: LayerConfig) -> dict[str, Any]:
    scaling = {"rope_scaling": c.rope_scaling} if c.rope_scaling is not None else {}
    return {
        "hidden_size": c.hidden_size,
        "intermediate_size": c.intermediate_size,
        "num_attention_heads": c.num_heads,
        "num_key_value_heads": c.num_kv_heads,
        "head_dim": c.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": c.rms_norm_eps,
        "rope_theta": c.rope_theta,
        **scaling,
    }
