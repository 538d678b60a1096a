"""Rotary position embedding (RoFormer, arXiv 2104.09864) in the half-split layout of Llama: the specification for
backends, which rotate q and k if the caller passes tables; and the op that makes the tables."""

import torch

from specdec.backends.base import AnyRope, NormedRope, Rope
from specdec.backends.library import op
from specdec.backends.linear import rms_norm


def rope_table(positions: torch.Tensor, head_dim: int, theta: float, dtype: torch.dtype) -> Rope:
    """Return the tables [..., head_dim] for positions [...] int64, computed in fp32."""
    exponent = torch.arange(0, head_dim, 2, device=positions.device, dtype=torch.float32) / head_dim
    return Rope(*rope_tables.twin(positions, theta**-exponent, 1.0, True, dtype))


def rotate(x: torch.Tensor, rope: AnyRope) -> torch.Tensor:
    """Rotate x [..., heads, dim] by tables [..., R]."""
    cos, sin = rope.cos.unsqueeze(-2), rope.sin.unsqueeze(-2)
    rotary, rest = x[..., : cos.shape[-1]], x[..., cos.shape[-1] :]
    low, high = rotary.chunk(2, -1)
    rotated = rotary * cos + torch.cat([-high, low], -1) * sin
    return rotated if rest.shape[-1] == 0 else torch.cat([rotated, rest], -1)


def prepare(q: torch.Tensor, k: torch.Tensor, rope: AnyRope) -> tuple[torch.Tensor, torch.Tensor]:
    """Return q and k [T, heads, dim], normed if `rope` has norms, and rotated."""
    if isinstance(rope, NormedRope):
        of_q, of_k, eps, offset, is_late = rope.norms
        q, k = (rms_norm.twin(x, w, eps, offset, is_late) for x, w in ((q, of_q), (k, of_k)))
    return rotate(q, rope), rotate(k, rope)


@op(
    "rope_tables(Tensor positions, Tensor frequencies, float scale, bool is_doubled, ScalarType dtype)"
    " -> (Tensor, Tensor)",
    lambda positions, frequencies, _, is_doubled, dtype: tuple(
        positions.new_empty(*positions.shape, len(frequencies) * (1 + is_doubled), dtype=dtype) for _ in range(2)
    ),
    "attention.tables",
    lambda *_: True,
)
def rope_tables(
    positions: torch.Tensor, frequencies: torch.Tensor, scale: float, is_doubled: bool, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return cos and sin [..., F] of positions [...] int64 times frequencies [F], times `scale`, rounded to `dtype`.

    is_doubled: [..., 2F], the F columns twice.
    """
    angles = positions.unsqueeze(-1).float() * frequencies.float()
    angles = torch.cat([angles, angles], -1) if is_doubled else angles
    return (angles.cos() * scale).to(dtype), (angles.sin() * scale).to(dtype)
