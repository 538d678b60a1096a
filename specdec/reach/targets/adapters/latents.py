"""Attention over latents (MLA): modules do not expand a latent to keys and values; their queries attend to it instead.

Found by transformers' names: `expand_kv`, which gets latents and rotated keys, and `kv_b_proj`, a linear layer.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import nn

from specdec.backends import LayerSpec, attention
from specdec.backends.linear.latents import latent_queries, latent_values

EXPAND, EXPANSION = "expand_kv", "kv_b_proj"


def latent_modules(model: nn.Module) -> dict[nn.Module, nn.Module]:
    """Return the attention modules of `model` that attend over latents, each with the layer that would expand them."""
    return {m: getattr(m, EXPANSION) for m in model.modules() if hasattr(m, EXPAND) and _is_plain(m)}


def _is_plain(module: Any) -> bool:
    """Return whether the layer that expands latents only multiplies by its weight."""
    layer = getattr(module, EXPANSION, None)
    if type(layer) is not nn.Linear or layer.bias is not None or "forward" in vars(layer):
        return False
    return not layer._forward_hooks and not layer._forward_pre_hooks


def kept(latent: torch.Tensor, rotated: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Replace a module's `expand_kv`: its attention call gets latents [1, 1, T, R] and the keys' rotated columns."""
    return latent, rotated


def is_latent(module: nn.Module) -> bool:
    """Return whether `module` calls `kept` now."""
    return vars(module).get(EXPAND) is kept


def attend(module: Any, q: torch.Tensor, latent: torch.Tensor, rotated: torch.Tensor, layer_id: int) -> torch.Tensor:
    """Attend by our op: q [1, H, T, N + rotary], latent [1, 1, T, R], rotated [1, 1, T, rotary]; [T, H, V]."""
    weight, num_rotary = getattr(module, EXPANSION).weight, rotated.shape[3]
    queries = latent_queries(q[0].transpose(0, 1), weight, num_rotary)
    keys = torch.cat([latent[0], rotated[0]], -1).transpose(0, 1)
    found = attention(queries, keys, keys[..., : latent.shape[3]], layer_id)
    return latent_values(found, weight, q.shape[3] - num_rotary)


def latent_spec(module: Any, spec: LayerSpec, rank: int) -> tuple[LayerSpec, int]:
    """Return the spec of attention over latents of `rank` columns, and the columns of the module's values.

    spec: made of the arguments of `attend`, as if latents were keys and their rotated columns values.
    """
    num_values = getattr(module, EXPANSION).weight.shape[0] // spec.num_heads - (spec.qk_dim - spec.v_dim)
    return replace(spec, qk_dim=rank + spec.v_dim, v_dim=rank, v_in_k=True), num_values
