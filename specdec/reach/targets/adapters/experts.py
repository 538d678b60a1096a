"""Experts of live models through our op: what transformers calls in place of an experts module's own forward.

Gates, activations and layouts are the module's: it says how its weights lie, and gates what they give by itself.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from specdec.backends import grouped_linear
from specdec.backends.experts.choices import weighted_sum
from specdec.reach.targets.adapters.overrides import replaced


def experts_forward(
    module: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """Return the experts' outputs [T, h] on hidden_states [T, h], weighted by top_k_weights [T, k] and added up.

    top_k_index: [T, k], experts of each token; those past the last count for nothing. The sum is over k in its order,
    whatever the other tokens are, so results are deterministic.
    """
    first = _product(module, "gate_up_proj" if module.has_gate else "up_proj", hidden_states, top_k_index)
    inner = module._apply_gate(first) if module.has_gate else module.act_fn(first)
    out = _product(module, "down_proj", inner, top_k_index)
    return weighted_sum(out, top_k_weights.reshape(top_k_index.shape), hidden_states.dtype)


def _product(module: Any, name: str, x: torch.Tensor, expert_ids: torch.Tensor) -> torch.Tensor:
    """Return `x` times the weights `name` of `module`, in their dtype, with their bias if they have one."""
    weight = getattr(module, name)
    bias = getattr(module, f"{name}_bias") if module.has_bias else None
    return grouped_linear(x.to(weight.dtype), expert_ids, weight, bias, module.is_transposed)


ALL_EXPERTS_FUNCTIONS.register("specdec", experts_forward)


class Experts:
    """The experts in `model`: the configs by which they find what multiplies them, once each.

    Models without experts have such configs, too; modules that transformers made switchable have `_apply_gate`.
    """

    def __init__(self, model: nn.Module):
        self._configs = list({id(module.config): module.config for module in _experts(model)}.values())

    def routed(self) -> AbstractContextManager[None]:
        """Multiply by our op within the context; what others set meanwhile stays."""
        return replaced((vars(config), "_experts_implementation_internal", "specdec") for config in self._configs)


def _experts(model: nn.Module) -> Iterator[Any]:
    for module in model.modules():
        if hasattr(module, "_apply_gate") and hasattr(
            getattr(module, "config", None), "_experts_implementation_internal"
        ):
            yield module


class ExpertWeights(NamedTuple):
    """One of the two products of an experts module: arguments of `grouped_linear`."""

    weight: torch.Tensor
    bias: torch.Tensor | None
    is_transposed: bool


def distinct_weights(model: nn.Module) -> list[ExpertWeights]:
    """List the weights that experts of `model` multiply with by our op, one of each shape."""
    found: dict[tuple[object, ...], ExpertWeights] = {}
    for module in _experts(model):
        for name in ("gate_up_proj" if module.has_gate else "up_proj", "down_proj"):
            bias = getattr(module, f"{name}_bias") if module.has_bias else None
            weights = ExpertWeights(getattr(module, name), bias, bool(module.is_transposed))
            found.setdefault((weights.weight.shape, weights.weight.dtype, bias is None, weights[2]), weights)
    return list(found.values())
