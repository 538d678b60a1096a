"""Rotary position embedding (RoFormer, arXiv 2104.09864) in the half-split layout of Llama: the specification of what
backends do when the caller passes the tables with un-rotated queries and keys."""

from typing import NamedTuple

import torch


class Rope(NamedTuple):
    """Tables for T tokens: cos, sin [T, R] with R <= qk_dim, both halves of R equal; dims past R are not rotated."""

    cos: torch.Tensor
    sin: torch.Tensor


def rope_table(positions: torch.Tensor, head_dim: int, theta: float, dtype: torch.dtype) -> Rope:
    """Return the tables [..., head_dim] for positions [...] int64, computed in fp32."""
    exponent = torch.arange(0, head_dim, 2, device=positions.device, dtype=torch.float32) / head_dim
    angles = positions.unsqueeze(-1).float() * theta**-exponent
    angles = torch.cat([angles, angles], -1)
    return Rope(angles.cos().to(dtype), angles.sin().to(dtype))


def rotate(x: torch.Tensor, rope: Rope) -> torch.Tensor:
    """Rotate x [..., heads, dim] by tables [..., R]."""
    cos, sin = rope.cos.unsqueeze(-2), rope.sin.unsqueeze(-2)
    rotary, rest = x[..., : cos.shape[-1]], x[..., cos.shape[-1] :]
    low, high = rotary.chunk(2, -1)
    rotated = rotary * cos + torch.cat([-high, low], -1) * sin
    return rotated if rest.shape[-1] == 0 else torch.cat([rotated, rest], -1)
