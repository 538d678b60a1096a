"""Twins of the products and norms of a layer: their rounding is transformers'."""

from collections.abc import Sequence

import torch
from torch.nn import functional as F

from specdec.backends.gates import gate_twin


def product_twin(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, activation: str | None
) -> torch.Tensor:
    """See `linear`, and `gated_linear` for an activation."""
    product = F.linear(x, weight, bias)
    return product if activation is None else gate_twin(product, activation)


def joined_twin(parts: Sequence[torch.Tensor], bias: Sequence[torch.Tensor], activation: str) -> torch.Tensor:
    """Return products side by side, each with its bias if there are some, or the gate of the first over the second."""
    parts = [part + b for part, b in zip(parts, bias, strict=True)] if bias else parts
    product = torch.cat(list(parts), -1)
    return gate_twin(product, activation) if activation else product


def rms_norm_twin(x: torch.Tensor, weight: torch.Tensor, eps: float, offset: float, is_late: bool) -> torch.Tensor:
    """See `rms_norm`."""
    wide = x.float()
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    if is_late:
        return (normed * (offset + weight.float())).to(x.dtype).contiguous()
    return (normed.to(x.dtype) * weight).to(x.dtype).contiguous()


def add_rms_norm_twin(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, offset: float, is_late: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `add_rms_norm`."""
    total = (x + residual).contiguous()
    return rms_norm_twin(total, weight, eps, offset, is_late), total


def gated_rms_norm_twin(x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """See `gated_rms_norm`."""
    normed = rms_norm_twin(x, weight, eps, 0.0, False)
    return (normed * F.silu(gate.reshape(x.shape).float())).to(x.dtype)
