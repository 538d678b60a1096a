"""Models whose linear layers are quantised, by rounding: in transformers' own FP8 modules, and in modules that have the
tensors, names and arithmetic of gptqmodel's, which needs another torch than ours.

FP8 modules multiply by a kernel from the Hub, which `without_the_hub` replaces by its arithmetic in torch.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers.integrations import finegrained_fp8
from transformers.integrations.finegrained_fp8 import FineGrainedFP8, FP8Linear

from specdec.backends.linear.fp8 import fp8_linear_twin, quantise_twin

AWQ_COLUMNS = (0, 2, 4, 6, 1, 3, 5, 7)  # of eight neighbours, from the lowest bits of a word on
SHIFTS = range(0, 32, 4)


def matmul(x: torch.Tensor, weight: torch.Tensor, scales: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """The product of FP8 blocks, rows quantised by themselves."""
    return fp8_linear_twin(*quantise_twin(x), [weight], [scales], [], x.dtype)


@contextmanager
def without_the_hub() -> Iterator[None]:
    """Let FP8 modules multiply by `matmul` within the context."""
    before, finegrained_fp8._FINEGRAINED_FP8 = finegrained_fp8._FINEGRAINED_FP8, FineGrainedFP8(matmul, matmul, matmul)
    try:
        yield
    finally:
        finegrained_fp8._FINEGRAINED_FP8 = before


@torch.no_grad()
def fp8(linear: nn.Linear) -> nn.Module:
    """Return `linear` in blocks of 128 x 128."""
    layer = FP8Linear(linear.in_features, linear.out_features, (128, 128), has_bias=linear.bias is not None)
    layer = layer.to(linear.weight.device)
    N, K = linear.weight.shape
    padded = F.pad(linear.weight.float(), (0, 0, 0, -N % 128)).view(-1, 128, K // 128, 128)
    scales = (padded.abs().amax((1, 3)) / 448).clamp(min=1e-12)
    values = (padded / scales[:, None, :, None]).view(-1, K)[:N].to(torch.float8_e4m3fn)
    layer.weight, layer.weight_scale_inv = (nn.Parameter(t, requires_grad=False) for t in (values, scales))
    layer.bias = linear.bias
    return layer


class BaseQuantLinear(nn.Module):
    """4 bits, with a scale and a zero point for `group` features, in the layout of GPTQ's first format, or of AWQ."""

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


def gptq(linear: nn.Linear, group: int = 128) -> nn.Module:
    """Return `linear` in GPTQ's layout."""
    return BaseQuantLinear(linear, group, is_awq=False)


def awq(linear: nn.Linear, group: int = 128) -> nn.Module:
    """Return `linear` in AWQ's layout."""
    return BaseQuantLinear(linear, group, is_awq=True)


def quantised(model: Any, make: Callable[[nn.Linear], nn.Module]) -> Any:
    """Replace the linear layers of `model` below its output head, in place."""
    for name, module in list(model.named_modules()):
        if type(module) is nn.Linear and module is not model.get_output_embeddings():
            model.set_submodule(name, make(module))
    return model.eval()
