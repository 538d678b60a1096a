"""Twins of products: their rounding is transformers'."""

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
