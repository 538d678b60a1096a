"""Gates of MLPs and experts: the activation of one half of a product, times the other half."""

from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType

import torch
from torch.nn import functional as F

ACTIVATIONS: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = MappingProxyType(
    {"silu": F.silu, "gelu": F.gelu, "gelu_tanh": partial(F.gelu, approximate="tanh")}
)


def swigluoai(product: torch.Tensor) -> torch.Tensor:
    """Return the gate of GPT-OSS, whose gate and up columns alternate. Traces are compared with this expression."""
    gate, up = product[..., ::2], product[..., 1::2]
    gate = gate.clamp(min=None, max=7.0)
    up = up.clamp(min=-7.0, max=7.0)
    return (up + 1) * (gate * torch.sigmoid(gate * 1.702))


def apply_gate_twin(gate: torch.Tensor, up: torch.Tensor, activation: str) -> torch.Tensor:
    """See `specdec.backends.linear.apply_gate`."""
    active = torch.sigmoid(gate) if activation == "sigmoid" else ACTIVATIONS[activation](gate)
    return active.reshape(up.shape) * up


def gate_twin(product: torch.Tensor, activation: str) -> torch.Tensor:
    """Return activation(gate) * up [..., N] of product [..., 2*N]; rounded after each step, as in transformers."""
    if activation == "swigluoai":
        return swigluoai(product)
    gate, up = product.chunk(2, -1)
    return apply_gate_twin(gate, up, activation)
