"""A fresh EAGLE-3 head for a target, started so that it says something sensible before its first step."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from specdec.models.draft_head import LayerConfig
from specdec.models.eagle3 import Eagle3Config, Eagle3Head, default_aux_layers
from specdec.train.teacher import target_shape

FC_NOISE = 1e-3  # std; small beside the identity, enough to part the columns of the lower features
QUIET_OUT = 0.1  # share of the usual std for projections that add to the residual stream


def head_config(
    model: PreTrainedModel,
    draft_vocab_size: int,
    aux_layers: Sequence[int] | None = None,
    intermediate_size: int | None = None,
) -> Eagle3Config:
    """The shape of a head for `model`: its attention heads and rope, an MLP of `intermediate_size` (default: twice)."""
    shape = target_shape(model)
    config = model.config.get_text_config()
    layers = tuple(aux_layers) if aux_layers else default_aux_layers(shape.num_layers)
    if len(layers) != 3:
        raise ValueError(f"aux_layers={layers}: expected three layers, low to high")
    layer = LayerConfig(
        hidden_size=shape.hidden_size,
        intermediate_size=intermediate_size or 2 * config.intermediate_size,
        num_heads=config.num_attention_heads,
        num_kv_heads=getattr(config, "num_key_value_heads", None) or config.num_attention_heads,
        head_dim=getattr(config, "head_dim", None) or shape.hidden_size // config.num_attention_heads,
        rms_norm_eps=float(getattr(config, "rms_norm_eps", 1e-5)),
        rope_theta=_rope_theta(config),
    )
    return Eagle3Config(
        layer=layer,
        target_hidden_size=shape.hidden_size,
        vocab_size=shape.vocab_size,
        draft_vocab_size=min(draft_vocab_size, shape.vocab_size),
        aux_layers=layers,
    )


@torch.no_grad()
def new_head(model: PreTrainedModel, config: Eagle3Config, hot_ids: torch.Tensor, seed: int) -> Eagle3Head:
    """A head in fp32 on the target's device. hot_ids [dv] int64.

    lm_head and norm are the target's, fc passes the highest feature through, attention and MLP add little: at the start
    the head reads the target's highest tapped layer through the target's own output head.
    """
    if hot_ids.numel() != config.draft_vocab_size:
        raise ValueError(f"hot_ids has {hot_ids.numel()} ids: expected draft_vocab_size={config.draft_vocab_size}")
    head = Eagle3Head(config)
    head.set_hot_vocab(hot_ids)
    random = torch.Generator().manual_seed(seed)
    for name, module in head.midlayer.named_modules():
        if isinstance(module, nn.Linear):
            quiet = QUIET_OUT if name.endswith(("o_proj", "down_proj")) else 1.0
            nn.init.normal_(module.weight, std=quiet * module.in_features**-0.5, generator=random)
    nn.init.normal_(head.fc.weight, std=FC_NOISE, generator=random)
    head.fc.weight[:, -config.layer.hidden_size :] += torch.eye(config.layer.hidden_size)
    head.norm.weight.copy_(_final_norm_weight(model, config.layer.hidden_size))
    lm_head = model.get_output_embeddings().weight
    head.lm_head.weight.copy_(lm_head[head.hot_ids.to(lm_head.device)])
    head.lm_head.requires_grad_(False)
    return head.to(lm_head.device)


def _final_norm_weight(model: PreTrainedModel, size: int) -> torch.Tensor:
    """[size]: what the decoder's final norm multiplies by; an RMS norm shows it on ones, 1+w styles too."""
    norm = getattr(model.get_decoder(), "norm", None)
    if norm is None:
        return torch.ones(size)
    weight = next(norm.parameters(), torch.ones(size))
    shown = norm(torch.ones(1, size, dtype=weight.dtype, device=weight.device))[0].float()
    return shown if bool(shown.abs().sum() > 0) else torch.ones(size)  # a norm that centres shows nothing


def _rope_theta(config: Any) -> float:
    """The base of the target's rotary embedding; of its full-attention layers where layers differ."""
    parameters = getattr(config, "rope_parameters", None) or {}
    parameters = parameters.get("full_attention", parameters)
    return float(parameters.get("rope_theta") or getattr(config, "rope_theta", None) or 10000.0)
