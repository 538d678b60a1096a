"""GGUF's block quantisation in torch, so that a student trains on the weights that will be stored.

The gguf package does the packing itself; tests compare this with it.
"""

from collections.abc import Mapping
from types import MappingProxyType

import torch

BLOCK = 32  # values that share a scale
EMBED_TYPES: Mapping[str, int] = MappingProxyType({"Q4_0": 2, "Q5_0": 8, "Q8_0": 7})  # name to ggml's llama_ftype
LAYER_TYPE = "Q8_0"
_HALF_RANGE = {"Q4_0": 8, "Q5_0": 16}  # the value of largest magnitude becomes the lowest level


def stored_type(name: str, weight: torch.Tensor, embed_type: str) -> str:
    """Return the GGUF type of a weight by its HF name: the embedding as `embed_type`, matrices Q8_0, norms F32."""
    if weight.dim() == 1:
        return "F32"
    return embed_type if "embed_tokens" in name else LAYER_TYPE


def rounded(weight: torch.Tensor, kind: str) -> torch.Tensor:
    """Return `weight` [..., multiple of 32] fp32 as it reads back after being stored as `kind`."""
    if kind == "F32":
        return weight
    blocks = weight.reshape(-1, BLOCK)
    if kind == "Q8_0":
        scale = blocks.abs().amax(-1, keepdim=True) / 127
        steps = blocks * _inverse(scale)
        levels = (steps.abs() + 0.5).floor() * steps.sign()
    else:
        half = _HALF_RANGE[kind]
        largest = blocks.gather(-1, blocks.abs().argmax(-1, keepdim=True))
        scale = largest / -half
        levels = (blocks * _inverse(scale) + (half + 0.5)).trunc().clamp(0, 2 * half - 1) - half
    return (levels * scale.half().float()).view(weight.shape)


def check_blocks(hidden_size: int, intermediate_size: int, embed_type: str) -> None:
    """Raise ValueError for an unknown `embed_type`, or sizes that do not fit the blocks."""
    if embed_type not in EMBED_TYPES:
        raise ValueError(f"embed_type={embed_type!r}: expected one of {sorted(EMBED_TYPES)}")
    for name, size in (("hidden_size", hidden_size), ("intermediate_size", intermediate_size)):
        if size % BLOCK:
            raise ValueError(f"{name}={size}: GGUF's blocks take multiples of {BLOCK}; round it, or save safetensors")


def _inverse(scale: torch.Tensor) -> torch.Tensor:
    return torch.where(scale == 0, 0.0, 1 / scale)
