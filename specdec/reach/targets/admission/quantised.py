"""Quantised linear layers: which ones an engine runs as they are, and stand-ins for them while a model is compared.

Their matmuls round inputs or weights more than the dtype does, and some differently by the number of rows. Effects
between tokens must be compared without that rounding, which would hide a fault there.
"""

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from transformers import PreTrainedModel

from specdec.backends.linear.fp8 import BLOCK, DTYPE
from specdec.reach.checkpoints.tensors import FLOATS
from specdec.reach.targets.overrides import replaced

BY_CHANNEL = "CompressedTensorsFP8Linear"  # of transformers, for compressed-tensors' FP8
# Classes of bitsandbytes, quanto, transformers' FP8, and gptqmodel (GPTQ and AWQ).
LINEARS = ("Linear4bit", "Linear8bitLt", "QLinear", "FP8Linear", BY_CHANNEL, "BaseQuantLinear")
OTHERS = ("FP8GroupedLinear",)  # with another input than these
EXPERTS = ("FP8Experts", "Mxfp4GptOssExperts")
SPREAD = 0.6  # of the outputs of a stand-in, for inputs of spread 1


def is_quantised_linear(module: nn.Module) -> bool:
    """Return whether `module` is a linear layer with packed weights: of a known class, with a scheme of
    compressed-tensors, or with a weight that is a tensor subclass of torchao."""
    weight = module._parameters.get("weight")
    is_known = is_kind(module, *LINEARS) and not is_kind(module, *OTHERS)
    is_wrapped = weight is not None and is_traceable_wrapper_subclass(weight)
    return is_known or (isinstance(module, nn.Linear) and (is_wrapped or hasattr(module, "quantization_scheme")))


def is_kind(module: Any, *names: str) -> bool:
    """Return whether the class of `module`, or one of its bases, has one of `names`."""
    return any(kind.__name__ in names for kind in type(module).__mro__)


def quantised_linears(model: nn.Module) -> list[Any]:
    return [module for module in model.modules() if is_quantised_linear(module)]


def quantised_reasons(model: nn.Module) -> Iterator[str]:
    """Yield quantised parts that cannot be run: packed tensors of other modules, and int8 layers that look for
    outliers."""
    layers, experts = quantised_linears(model), [m for m in model.modules() if is_kind(m, *EXPERTS)]
    known = {id(t) for m in (*layers, *experts) for t in (*m.parameters(recurse=False), *m.buffers(recurse=False))}
    tensors = [(n, t) for n, t in (*model.named_parameters(), *model.named_buffers()) if id(t) not in known]
    odd = [n for n, t in tensors if type(t) not in (nn.Parameter, nn.Buffer, torch.Tensor)]
    odd += [n for n, t in tensors if t.dim() > 1 and t.dtype not in (*FLOATS, torch.bool, torch.int64)]
    if odd:
        yield f"{odd[0]} is packed ({len(odd)} such tensors) and not a linear layer's: only those may be quantised"
    other = next((m for m in experts if is_kind(m, "FP8Experts") and not has_blocks(m)), None)
    if other is not None:
        yield (
            f"its experts are in FP8 with blocks of {other.block_size} and {other.activation_scheme} activations: "
            f"expected blocks of {BLOCK} x {BLOCK} with float32 scales, and dynamic; load it with dequantize=True"
        )
    thresholds = [getattr(getattr(m, "state", None), "threshold", 0) for m in layers]
    if any(thresholds):
        yield (
            f"its int8 layers look for outliers in the whole batch (llm_int8_threshold={max(thresholds)}): texts would "
            "depend on those beside them, and no graph could be captured; load it with llm_int8_threshold=0"
        )


def is_quantised(model: nn.Module) -> bool:
    """Return whether `model` has quantised linear layers or experts."""
    return any(is_quantised_linear(m) or is_kind(m, *EXPERTS) for m in model.modules())


def has_blocks(module: Any) -> bool:
    """Return whether all weights of a transformers FP8 module have the blocks that `specdec::quantise` supports."""
    weights = [p for p in module.parameters(recurse=False) if p.dtype == DTYPE]
    scales = [p for name, p in module.named_parameters(recurse=False) if name.endswith("_scale_inv")]
    is_ours = module.activation_scheme == "dynamic" and all(scale.dtype == torch.float32 for scale in scales)
    is_whole = all(weight.shape[-1] % BLOCK == 0 for weight in weights)
    return bool(weights) and is_ours and is_whole and tuple(module.block_size or ()) == (BLOCK, BLOCK)


@torch.no_grad()
def pack(model: PreTrainedModel) -> None:
    """Run the one-time work of quantised layers' first forward: bitsandbytes packs weights for a CPU, which must not
    happen within `torch.inference_mode`; compressed-tensors decompresses all weights."""
    like = model.get_input_embeddings().weight
    if hasattr(model, "ct_decompress_hook"):
        model(input_ids=torch.zeros(1, 1, dtype=torch.int64, device=like.device), use_cache=False)
    if any(type(m._parameters).__module__.startswith("compressed_tensors") for m in model.modules()):
        from compressed_tensors.offload import remove_dispatch

        remove_dispatch(model)  # that forward sets a dispatch on modules: this makes the parameters plain again
    pack_layers(quantised_linears(model), like)


@torch.no_grad()
@torch.inference_mode(False)
def pack_layers(layers: Iterable[Any], like: torch.Tensor) -> None:
    """Run quantised `layers` once, outside of `torch.inference_mode`; like: of the model's dtype and device."""
    for layer in layers:
        layer(torch.zeros(1, layer.in_features, dtype=like.dtype, device=like.device))


def stand_ins(model: nn.Module) -> AbstractContextManager[None]:
    """Replace quantised layers, and experts in FP8, by plain random matrices of their shape within the context."""
    plain = {m: partial(_plain_product, m.out_features, m.in_features) for m in quantised_linears(model)}
    experts: list[Any] = [m for m in model.modules() if is_kind(m, "FP8Experts")]
    plain |= {m: partial(_plain_experts, m.num_experts) for m in experts}
    return replaced((vars(m), "forward", partial(product, seed)) for seed, (m, product) in enumerate(plain.items()))


def is_stand_in(layer: nn.Module) -> bool:
    """Return whether a plain matmul stands in for `layer`."""
    return getattr(layer.__dict__.get("forward"), "func", None) is _plain_product


def _plain_product(rows: int, columns: int, seed: int, x: torch.Tensor) -> torch.Tensor:
    random = torch.Generator(x.device).manual_seed(seed)
    weight = torch.randn(rows, columns, generator=random, device=x.device).mul_(SPREAD / columns**0.5)
    return F.linear(x, weight.to(x.dtype))


def _plain_experts(num: int, seed: int, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """One random matrix for all experts, each of which scales its output by its own random factors."""
    random = torch.Generator(x.device).manual_seed(seed)
    factors = torch.randn(num + 1, x.shape[-1], generator=random, device=x.device)  # transformers' index for no expert
    scale = (factors[ids] * weights.unsqueeze(-1)).sum(-2)
    return (_plain_product(x.shape[-1], x.shape[-1], seed, x) * scale).to(x.dtype)
