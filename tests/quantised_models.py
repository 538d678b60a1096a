"""Models with quantised linear layers, rounded here: in transformers' own FP8 modules, and in modules with the tensors,
names and arithmetic of gptqmodel's, which needs another torch version than ours.

FP8 modules call a kernel from the Hub; `without_the_hub` replaces it with its arithmetic in torch.
"""

import itertools
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import MethodType, SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers.integrations import finegrained_fp8
from transformers.integrations import mxfp4 as mxfp4_module
from transformers.integrations.compressed_tensors import CompressedTensorsFP8Linear
from transformers.integrations.finegrained_fp8 import ALL_FP8_EXPERTS_FUNCTIONS, FineGrainedFP8, FP8Experts, FP8Linear
from transformers.integrations.moe import use_experts_implementation
from transformers.integrations.mxfp4 import Mxfp4GptOssExperts, convert_moe_packed_tensors

from specdec.backends.experts.quantised import grouped_fp8
from specdec.backends.gates import swigluoai
from specdec.backends.linear.fp8 import fp8_linear, in_blocks, quantise
from specdec.backends.linear.packed import NF4, NF4_GROUP

EXPERTS_IN_FP8 = use_experts_implementation(  # as transformers does for a model that it loads
    type("FP8Experts", (FP8Experts,), {}), experts_interface=ALL_FP8_EXPERTS_FUNCTIONS
)
AWQ_COLUMNS = (0, 2, 4, 6, 1, 3, 5, 7)  # of eight neighbours, from the lowest bits of a word up
SHIFTS = range(0, 32, 4)


def matmul(x: torch.Tensor, weight: torch.Tensor, scales: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """FP8 block product; rows are quantised here. On a GPU it uses our kernel, whose tensor cores accumulate fewer bits
    than fp32 has: texts of models that round their rows are compared where both sides use the same product."""
    linear = fp8_linear if x.is_cuda else fp8_linear.twin
    return linear(*quantise.twin(x, False), [weight], [scales], [], x.dtype)


def batched_matmul(
    x: torch.Tensor, weight: torch.Tensor, scales: torch.Tensor, expert_ids: torch.Tensor, **kwargs: Any
) -> torch.Tensor:
    """Multiply each row by its expert's weight; on a GPU with our kernel, as in `matmul`."""
    grouped = grouped_fp8 if x.is_cuda else grouped_fp8.twin
    return grouped(*quantise.twin(x, False), expert_ids.unsqueeze(1), weight, scales, x.dtype)


def grouped_matmul(
    x: torch.Tensor, weight: torch.Tensor, scales: torch.Tensor, offsets: torch.Tensor, **kwargs: Any
) -> torch.Tensor:
    """Products of rows sorted by expert; those of expert e end at offsets[e]."""
    ids = torch.searchsorted(offsets, torch.arange(len(x), device=x.device), right=True)
    return batched_matmul(x, weight, scales, ids)


@contextmanager
def without_the_hub() -> Iterator[None]:
    """Within the context, FP8 and MXFP4 modules use torch functions instead of the Hub's kernels."""
    before = finegrained_fp8._FINEGRAINED_FP8
    finegrained_fp8._FINEGRAINED_FP8 = FineGrainedFP8(matmul, batched_matmul, grouped_matmul)
    mxfp4_module.triton_kernels_hub = HUB
    try:
        yield
    finally:
        finegrained_fp8._FINEGRAINED_FP8 = before
        del mxfp4_module.triton_kernels_hub


@torch.no_grad()
def fp8(linear: nn.Linear) -> nn.Module:
    """Return `linear` in FP8 blocks of 128 x 128."""
    with torch.device("meta"):
        layer = FP8Linear(linear.in_features, linear.out_features, (128, 128), has_bias=linear.bias is not None)
    layer.weight, layer.weight_scale_inv = (nn.Parameter(t, requires_grad=False) for t in in_blocks(linear.weight))
    layer.bias = linear.bias
    return layer


@torch.no_grad()
def channels(linear: nn.Linear) -> nn.Module:
    """Return `linear` with one scale per output feature, as transformers loads FP8 of compressed-tensors with
    `use_optimized_inference=True`."""
    with torch.device("meta"):
        layer = CompressedTensorsFP8Linear(linear.in_features, linear.out_features, linear.bias is not None)
    scales = linear.weight.float().abs().amax(1) / 448
    values = (linear.weight.float() / scales[:, None]).to(torch.float8_e4m3fn)
    layer.weight, layer.weight_scale = (nn.Parameter(t, requires_grad=False) for t in (values, scales[None]))
    layer.bias = linear.bias
    return layer


class BaseQuantLinear(nn.Module):
    """4 bits, with a scale and a zero point per `group` features, in the layout of GPTQ's first format, or of AWQ."""

    bits = 4

    def __init__(self, linear: nn.Linear, group: int, is_awq: bool):
        super().__init__()
        self.in_features, self.out_features, self.group, self.is_awq = *linear.weight.T.shape, group, is_awq
        weight = linear.weight.detach().float().unflatten(1, (-1, group))  # [N, K / G, G]
        low, high = weight.amin(-1).clamp(max=0), weight.amax(-1).clamp(min=0)
        scales = ((high - low) / 15).clamp(min=1e-6).to(linear.weight.dtype)
        zeros = (-low / scales).round().clamp(1, 15)
        values = (weight / scales.unsqueeze(-1) + zeros.unsqueeze(-1)).round().clamp(0, 15).flatten(1)
        q, z = values.T.to(torch.int32), zeros.T.to(torch.int32)  # [K, N] and [K / G, N]
        if is_awq:
            self.register_buffer("qweight", _packed(q, AWQ_COLUMNS))
            self.register_buffer("qzeros", _packed(z, AWQ_COLUMNS))
        else:
            self.register_buffer("qweight", _packed(q.T, range(8)).T.contiguous())
            self.register_buffer("qzeros", _packed(z - 1, range(8)))
        self.register_buffer("scales", scales.T.contiguous())
        self.register_buffer("bias", linear.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.is_awq:
            values, zeros = _unpacked(self.qweight, AWQ_COLUMNS), _unpacked(self.qzeros, AWQ_COLUMNS)
        else:
            values, zeros = _unpacked(self.qweight.T, range(8)).T, _unpacked(self.qzeros, range(8)) + 1
        zeros, scales = (t.repeat_interleave(self.group, 0) for t in (zeros, self.scales))
        product = x @ ((values - zeros) * scales).to(x.dtype)
        return product if self.bias is None else product + self.bias


def _packed(values: torch.Tensor, columns: Any) -> torch.Tensor:
    parts = values.unflatten(1, (-1, 8))
    return sum(parts[..., column] << shift for column, shift in zip(columns, SHIFTS, strict=True)).to(torch.int32)


def _unpacked(words: torch.Tensor, columns: Any) -> torch.Tensor:
    parts = torch.empty(*words.shape, 8, dtype=torch.int32, device=words.device)
    for column, shift in zip(columns, SHIFTS, strict=True):
        parts[..., column] = words >> shift & 15
    return parts.flatten(1)


class Linear4bit(nn.Module):
    """NF4 with bitsandbytes' tensors and names; its arithmetic in torch."""

    compute_dtype = None

    def __init__(self, linear: nn.Linear):
        super().__init__()
        self.out_features, self.in_features = linear.weight.shape
        groups = linear.weight.detach().float().view(-1, NF4_GROUP)
        scales = groups.abs().amax(1)
        edges = torch.tensor([(a + b) / 2 for a, b in itertools.pairwise(NF4)], device=groups.device)
        values = torch.bucketize(groups / scales.unsqueeze(1), edges).to(torch.uint8).view(-1, 2)
        self.weight = nn.Parameter(values[:, :1] << 4 | values[:, 1:], requires_grad=False)
        self.weight.quant_state = SimpleNamespace(absmax=scales, nested=False, quant_type="nf4", blocksize=NF4_GROUP)
        self.register_buffer("bias", linear.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        codes = torch.tensor(NF4, device=x.device)[torch.cat([self.weight >> 4, self.weight & 15], 1).int()]
        weight = codes.view(-1, NF4_GROUP) * self.weight.quant_state.absmax.to(x.device).unsqueeze(1)
        return F.linear(x, weight.view(self.out_features, -1).to(x.dtype), self.bias)


def nf4(linear: nn.Linear) -> nn.Module:
    """Return `linear` in NF4."""
    return Linear4bit(linear)


def gptq(linear: nn.Linear) -> nn.Module:
    """Return `linear` in GPTQ's layout."""
    return BaseQuantLinear(linear, 128, is_awq=False)


def awq(linear: nn.Linear) -> nn.Module:
    """Return `linear` in AWQ's layout."""
    return BaseQuantLinear(linear, 128, is_awq=True)


@torch.no_grad()
def fp8_experts(model: Any) -> Any:
    """Replace the experts of `model` by transformers' FP8 modules, in place."""
    for name, module in list(model.named_modules()):
        if isinstance(getattr(module, "gate_up_proj", None), nn.Parameter):
            with torch.device("meta"):
                layer = EXPERTS_IN_FP8(module.config, (128, 128))
            for which in ("gate_up_proj", "down_proj"):
                parts = [fp8(_linear(weight)) for weight in getattr(module, which)]
                for suffix, own in (("", "weight"), ("_scale_inv", "weight_scale_inv")):
                    stacked = torch.stack([getattr(part, own) for part in parts])
                    setattr(layer, which + suffix, nn.Parameter(stacked, requires_grad=False))
            model.set_submodule(name, layer)
    return model.eval()


def _linear(weight: torch.Tensor) -> nn.Linear:
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    linear.weight = nn.Parameter(weight, requires_grad=False)
    return linear


def _wrapped(data: torch.Tensor) -> Any:
    """Wrap a tensor as the Hub's kernels do, not swizzled."""
    return SimpleNamespace(storage=SimpleNamespace(data=data, layout=SimpleNamespace(unswizzle_data=lambda data: data)))


@torch.no_grad()
def mxfp4(model: Any) -> Any:
    """Replace the experts of `model`, a GPT-OSS, by random ones in transformers' MXFP4 modules."""
    for name, mlp in list(model.named_modules()):
        if type(mlp).__name__ == "GptOssMLP":
            with torch.device(mlp.router.weight.device):
                experts = Mxfp4GptOssExperts(model.config)
                for which in ("gate_up_proj", "down_proj"):
                    E, N, *rest = getattr(experts, which).shape
                    groups = math.prod(rest) // 16
                    del experts._parameters[which]
                    blocks = torch.randint(0, 256, (E, groups * 16, N), dtype=torch.uint8, device=model.device)
                    scales = torch.randint(118, 122, (E, groups, N), dtype=torch.uint8, device=model.device)
                    setattr(experts, which, _wrapped(blocks))
                    setattr(experts, f"{which}_precision_config", SimpleNamespace(weight_scale=_wrapped(scales)))
                    getattr(experts, f"{which}_bias").normal_(0, 0.1)
            model.set_submodule(f"{name}.experts", experts)
            if hasattr(mxfp4_module, "mlp_forward"):  # before transformers 5.24
                mlp.forward = MethodType(mxfp4_module.mlp_forward, mlp)
            else:
                model.set_submodule(name, mxfp4_module.Mxfp4GptOssMLP(mlp.router, experts))
    return model.eval()


def _routing(logits: torch.Tensor, k: int) -> tuple[Any, None, None]:
    values, ids = torch.topk(logits, k, dim=-1)
    return SimpleNamespace(ids=ids, gate_scal=values.softmax(-1)), None, None


def _matmul_ogs(x, weight, bias, routing, precision_config, gammas, fused_activation=None, **places):
    """The Hub's MXFP4 expert product: gathers rows and applies the gate, or weights results and adds them up."""
    blocks, scales = (t.storage.data.transpose(1, 2) for t in (weight, precision_config.weight_scale))
    used = routing.ids.unique()
    matrices = convert_moe_packed_tensors(blocks[used].unflatten(2, (-1, 16)), scales[used], dtype=torch.float32)
    out = torch.zeros(routing.ids.numel(), bias.shape[1], device=x.device)
    for expert, matrix in zip(used, matrices, strict=True):
        rows = (routing.ids.flatten() == expert).nonzero().squeeze(1)
        source = rows // routing.ids.shape[1] if gammas is None else rows
        out[rows] = x[source].float() @ matrix + bias[expert]
    if gammas is None:
        return swigluoai(out).to(x.dtype)
    return (out.unflatten(0, routing.ids.shape) * gammas.float().unsqueeze(-1)).sum(1).to(x.dtype)


HUB = SimpleNamespace(
    matmul_ogs=SimpleNamespace(FnSpecs=lambda *_: None, FusedActivation=lambda *_: "swiglu", matmul_ogs=_matmul_ogs),
    swiglu=SimpleNamespace(swiglu_fn=None),
    routing=SimpleNamespace(routing=_routing),
)


@torch.no_grad()
def compressed(model: Any, folder: Any, is_fp8: bool) -> None:
    """Write `model` in compressed-tensors' format: W4A16 in groups of 64, or FP8 by channel and by row."""
    from compressed_tensors import ModelCompressor
    from compressed_tensors.quantization import (
        QuantizationArgs,
        QuantizationConfig,
        QuantizationScheme,
        QuantizationStatus,
        apply_quantization_config,
    )

    if is_fp8:
        rows = QuantizationArgs(num_bits=8, type="float", strategy="token", dynamic=True)
        weights = QuantizationArgs(num_bits=8, type="float", strategy="channel")
    else:
        rows, weights = None, QuantizationArgs(num_bits=4, type="int", strategy="group", group_size=64)
    scheme = QuantizationScheme(targets=["Linear"], weights=weights, input_activations=rows)
    kind = "float-quantized" if is_fp8 else "pack-quantized"
    apply_quantization_config(model, QuantizationConfig(config_groups={"all": scheme}, ignore=["lm_head"], format=kind))
    for module in model.modules():
        if hasattr(module, "weight_scale"):
            groups = module.weight.unflatten(1, (module.weight_scale.shape[1], -1))
            module.weight_scale.copy_(groups.abs().amax(-1) / (448 if is_fp8 else 7))
            module.quantization_status = QuantizationStatus.FROZEN
    compressor = ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    model.save_pretrained(folder, state_dict=model.state_dict())
    compressor.update_config(folder)


def quantised(model: Any, make: Callable[[nn.Linear], nn.Module]) -> Any:
    """Replace the linear layers of `model` except its output head, in place."""
    for name, module in list(model.named_modules()):
        if type(module) is nn.Linear and module is not model.get_output_embeddings():
            model.set_submodule(name, make(module))
    return model.eval()
