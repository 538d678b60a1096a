"""Layers held against the live ones, with an attention that needs no cache in the place of the real one.

Two ways to compute one model in 16 bits differ by what rounding grows to through its layers, which depends on the model
and on the batch: a fixed bound accuses some models of nothing. So the live layers run twice, the second time with the
last bit of what attention returns disturbed; how far that moves them is what rounding can do.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from specdec.backends.op import attention_scope
from specdec.backends.rope import Rope, rotate
from specdec.errors import GraphError

TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-3, torch.bfloat16: 5e-2, torch.float16: 1e-2}  # of the norm
TIMES_DISTURBED = 6.0  # of what one disturbance a layer moves: kernels round several times in each
MOST = 0.5  # of the norm, whatever the model; unrelated tensors differ by 1.4
Layers = Callable[..., Sequence[Any]]


class Expected(NamedTuple):
    """What the live layers gave of a group of batches: each output's rows, and by how much others may differ."""

    outputs: list[torch.Tensor]
    bounds: list[float]


def expect(layers: Layers, batches: Sequence[Sequence[torch.Tensor]]) -> Expected:
    """Run the live `layers` on every batch, and once more disturbed."""
    outputs, moved = (_outputs(layers, batches, is_disturbed) for is_disturbed in (False, True))
    bounds = []
    for a, b in zip(moved, outputs, strict=True):
        bounds.append(bound(b.dtype, distance(a, b)))
    return Expected(outputs, bounds)


def bound(dtype: torch.dtype, moved: float) -> float:
    """Return how far results in `dtype` may lie apart, of the norm, if a disturbance moves them by `moved`."""
    return max(TOLERANCE.get(dtype, 5e-2), min(MOST, TIMES_DISTURBED * moved))


def compare(layers: Layers, batches: Sequence[Sequence[torch.Tensor]], expected: Expected) -> None:
    """Raise GraphError if `layers` differ from what is expected of these batches in more than rounding."""
    num_tokens = batches[0][0].shape[0]
    for a, b, limit in zip(_outputs(layers, batches, False), *expected, strict=True):
        error = distance(a, b)
        if not error <= limit:
            raise GraphError(
                f"compiled, they differ from the live model's by {error:.1e} of the norm, in forwards of {num_tokens} "
                f"token{'s' * (num_tokens > 1)}; rounding explains {limit:.1e}"
            )


def _outputs(layers: Layers, batches: Sequence[Sequence[torch.Tensor]], is_disturbed: bool) -> list[torch.Tensor]:
    """Run `layers` on every batch and concatenate the rows of each output."""
    with attention_scope(Echo(is_disturbed)):
        outputs = zip(*(layers(*batch) for batch in batches), strict=True)
        return [torch.cat(parts) for parts in outputs if parts[0] is not None]


def distance(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """Return the difference of [rows, ...], in shares of the norm: the rows' median, as rounding can flip an expert."""
    return float(((ours.double() - theirs.double()).norm(dim=-1) / theirs.double().norm(dim=-1)).median())


def lowered(x: torch.Tensor, unit: float) -> torch.Tensor:
    """Return x with half of its elements smaller by `unit`, relative."""
    is_lowered = torch.arange(x.numel(), device=x.device).mul(2.4).sin().view(x.shape) > 0
    return torch.where(is_lowered, x * (1 - unit), x)


@dataclass(frozen=True)
class Echo:
    """Attention without a cache, to compare everything else: the values, weighted by functions of q and k.

    is_disturbed: half of what it returns is a last bit lower.
    """

    is_disturbed: bool = False

    def attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer_id: int, rope: Rope | None
    ) -> torch.Tensor:
        if rope is not None:
            q, k = rotate(q, rope), rotate(k, rope)
        group = q.shape[1] // v.shape[1]
        ramp = torch.arange(q.shape[2], device=q.device).cos() / q.shape[2] ** 0.5
        weight = 1 + 0.5 * torch.tanh(q.float() @ ramp) - 0.5 * torch.tanh(k.float() @ ramp).repeat_interleave(group, 1)
        weight = weight * (1 + layer_id / (layer_id + 8))  # every layer's own, so that one in another's place is seen
        out = v.repeat_interleave(group, 1) * weight.unsqueeze(2).to(v.dtype)
        return lowered(out, torch.finfo(out.dtype).eps / 2) if self.is_disturbed else out
