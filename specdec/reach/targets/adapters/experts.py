"""Experts of live models through our op: transformers calls it instead of an experts module's own forward.

Gates, activations and layouts stay the module's: it describes the layout of its weights, and applies its own gate.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.integrations.finegrained_fp8 import ALL_FP8_EXPERTS_FUNCTIONS
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from specdec.backends import grouped_linear
from specdec.backends.differences import distance
from specdec.backends.experts.choices import weighted_sum
from specdec.backends.experts.quantised import LARGEST, grouped_fp8, grouped_mxfp4, pack_mxfp4
from specdec.backends.linear import fp8, has_kernels
from specdec.core.errors import AttachError
from specdec.reach.targets.admission.quantised import is_kind
from specdec.reach.targets.overrides import replaced

MXFP4 = "Mxfp4GptOssExperts"
NUM_COMPARED, TOP = 16, 2  # rows, and experts of each
TIPPED = 0.03  # of the norm: rows are rounded to FP8 between two products, and some elements round the other way


def experts_forward(
    module: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """Return the experts' outputs [T, h] on hidden_states [T, h], weighted by top_k_weights [T, k] and summed.

    top_k_index: [T, k], experts of each token; those past the last count for nothing. The sum is over k in order,
    independent of the other tokens, so results are deterministic.
    """
    first = _product(module, "gate_up_proj" if module.has_gate else "up_proj", hidden_states, top_k_index)
    inner = module._apply_gate(first) if module.has_gate else module.act_fn(first)
    out = _product(module, "down_proj", inner, top_k_index)
    return weighted_sum(out, top_k_weights.reshape(top_k_index.shape), hidden_states.dtype)


def _product(module: Any, name: str, x: torch.Tensor, expert_ids: torch.Tensor) -> torch.Tensor:
    """Return `x` times the weights `name` of `module`, in their dtype, or in FP8, plus their bias, if any."""
    weight = getattr(module, name)
    if weight.dtype == fp8.DTYPE:
        return grouped_fp8(*fp8.quantise(x, False), expert_ids, weight, getattr(module, f"{name}_scale_inv"), x.dtype)
    bias = getattr(module, f"{name}_bias") if module.has_bias else None
    return grouped_linear(x.to(weight.dtype), expert_ids, weight, bias, module.is_transposed)


ALL_EXPERTS_FUNCTIONS.register("specdec", experts_forward)
ALL_FP8_EXPERTS_FUNCTIONS.register("specdec", experts_forward)


class Experts:
    """The experts in `model`: their configs, once each, which select the function that multiplies them.

    Models without experts have such configs, too; modules that transformers made switchable have `_apply_gate`.
    """

    def __init__(self, model: nn.Module):
        self._configs = list({id(module.config): module.config for module in _experts(model)}.values())

    def routed(self) -> AbstractContextManager[None]:
        """Select our op within the context; values that others set meanwhile stay."""
        return replaced((vars(config), "_experts_implementation_internal", "specdec") for config in self._configs)


@torch.inference_mode()
def check_fp8_experts(model: PreTrainedModel) -> None:
    """Raise AttachError if our op's results for random rows differ from the FP8 experts' own by more than rounding."""
    for number, module in enumerate(m for m in _experts(model) if is_kind(m, "FP8Experts")):
        device, (num, width, _) = module.down_proj.device, module.down_proj.shape
        random = torch.Generator(device).manual_seed(number)
        x = torch.randn(NUM_COMPARED, width, generator=random, device=device).to(model.dtype)
        ids = torch.rand(NUM_COMPARED, num, generator=random, device=device).argsort(1)[:, :TOP]
        weights = torch.rand(ids.shape, generator=random, device=device).to(model.dtype)
        error = distance(experts_forward(module, x, ids, weights), module(x, ids, weights))
        if not error <= TIPPED:
            reason = f"its experts in FP8 give what differs by {error:.1e} from our kernel's (allowed: {TIPPED})"
            raise AttachError(type(model).__name__, [reason])


def _experts(model: nn.Module) -> Iterator[Any]:
    for module in model.modules():
        if hasattr(module, "_apply_gate") and hasattr(
            getattr(module, "config", None), "_experts_implementation_internal"
        ):
            yield module


class PackedExperts(NamedTuple):
    """The two matmuls of experts in MXFP4, in the layout of `specdec::grouped_mxfp4`."""

    first_words: torch.Tensor
    first_exponents: torch.Tensor
    second_words: torch.Tensor
    second_exponents: torch.Tensor


class Mxfp4:
    """GPT-OSS's experts in MXFP4 in `model`, by their MLPs. Where our kernel runs, they are packed again for it, in
    addition to the Hub kernel's tensors; elsewhere, and where a weight may be above 12, the Hub's kernel runs."""

    def __init__(self, model: nn.Module):
        like = model.get_input_embeddings().weight  # type: ignore[operator]
        is_ours = has_kernels(like) and like.dtype == torch.bfloat16
        mlps: list[Any] = [m for m in model.modules() if is_kind(getattr(m, "experts", None), MXFP4)] if is_ours else []
        with torch.no_grad(), torch.inference_mode(False):
            packed = {mlp: _packed_mxfp4(mlp.experts) for mlp in mlps}
        self._packed = {mlp: own for mlp, own in packed.items() if own is not None}

    def routed(self) -> AbstractContextManager[None]:
        """Multiply by our op within the context; a trace finds the packed weights as buffers of experts."""
        places: list[tuple[dict[str, Any], str, Any]] = []
        for mlp, packed in self._packed.items():
            places.append((vars(mlp), "forward", partial(_mxfp4_forward, mlp, packed)))
            places += [(mlp.experts._buffers, f"_specdec_{name}", t) for name, t in packed._asdict().items()]
        return replaced(places)


def _packed_mxfp4(experts: Any) -> PackedExperts | None:
    """Pack the weights of `experts`; None if our kernel does not support their exponents or their gate."""
    found: list[torch.Tensor] = []
    width, hidden = experts.intermediate_size, experts.hidden_size
    for name, N, K in (("gate_up_proj", 2 * width, hidden), ("down_proj", hidden, width)):
        of_scales = getattr(experts, f"{name}_precision_config").weight_scale
        blocks, scales = (
            wrapped.storage.layout.unswizzle_data(wrapped.storage.data).transpose(-1, -2)
            for wrapped in (getattr(experts, name), of_scales)
        )
        if (experts.alpha, experts.limit) != (1.702, 7.0) or int(scales.max()) > LARGEST:
            return None
        packs = [pack_mxfp4(b[:N, : K // 2], s[:N, : K // 32]) for b, s in zip(blocks, scales, strict=True)]
        found += [torch.stack(parts) for parts in zip(*packs, strict=True)]
    return PackedExperts(*found)


def _mxfp4_forward(mlp: Any, packed: PackedExperts, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the outputs of `mlp`: the experts' outputs of hidden_states [B, T, h], and the router's logits."""
    x, experts = hidden_states.reshape(-1, hidden_states.shape[-1]), mlp.experts
    logits, weights, ids = mlp.router(x)
    first = packed.first_words, packed.first_exponents, experts.gate_up_proj_bias
    inner = grouped_mxfp4(x, ids, *first, "swigluoai")
    out = grouped_mxfp4(inner, ids, packed.second_words, packed.second_exponents, experts.down_proj_bias)
    return weighted_sum(out, weights, x.dtype).view(hidden_states.shape), logits


class ExpertWeights(NamedTuple):
    """One of the two matmuls of an experts module: arguments of `grouped_linear`."""

    weight: torch.Tensor
    bias: torch.Tensor | None
    is_transposed: bool


def distinct_weights(model: nn.Module) -> list[ExpertWeights]:
    """List the weights of `model` that our op multiplies experts with, one of each shape."""
    found: dict[tuple[object, ...], ExpertWeights] = {}
    for module in _experts(model):
        for name in ("gate_up_proj" if module.has_gate else "up_proj", "down_proj"):
            bias = getattr(module, f"{name}_bias") if module.has_bias else None
            weights = ExpertWeights(getattr(module, name), bias, bool(module.is_transposed))
            found.setdefault((weights.weight.shape, weights.weight.dtype, bias is None, weights[2]), weights)
    return list(found.values())
