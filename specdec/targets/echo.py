"""Layers held against the live ones, with an attention that needs no cache in the place of the real one.

Two ways to compute one model in 16 bits differ by what rounding grows to through its layers, which depends on the model
and on the batch: a fixed bound accuses some models of nothing. So the live layers run twice, the second time with the
last bit of what attention returns disturbed; how far that moves them is what rounding can do.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from specdec.backends.op import attention_scope, current_scope
from specdec.backends.recurrent import current_recurrent, recurrent_scope
from specdec.backends.rope import Rope, rotate
from specdec.backends.state_pool import ScanInputs
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
        if math.isnan(error):
            ours, theirs = (int((~t.isfinite().all(-1)).sum()) for t in (a, b))
            raise GraphError(f"of {len(a)} rows {ours} are not finite compiled, {theirs} in the live model's")
        if not error <= limit:
            raise GraphError(
                f"compiled, they differ from the live model's by {error:.1e} of the norm, in forwards of {num_tokens} "
                f"token{'s' * (num_tokens > 1)}; rounding explains {limit:.1e}"
            )


def _outputs(layers: Layers, batches: Sequence[Sequence[torch.Tensor]], is_disturbed: bool) -> list[torch.Tensor]:
    """Run `layers` on every batch and concatenate the rows of each output."""
    echo = Echo(is_disturbed)
    with attention_scope(echo), recurrent_scope(echo):
        outputs = zip(*(layers(*batch) for batch in batches), strict=True)
        return [torch.cat(parts) for parts in outputs if parts[0] is not None]


def distance(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """Return the difference of [rows, ...], in shares of the norm: the rows' median, as rounding can flip an expert.

    Rows that are zero in both have no norm and tell nothing: a token whose embedding is zero stays so through layers
    without biases. They are left out; where nothing is left, it is 0.
    """
    off, norm = (ours.double() - theirs.double()).norm(dim=-1), theirs.double().norm(dim=-1)
    shares = (off / norm)[(off != 0) | (norm != 0)]
    return float(shares.median()) if shares.numel() else 0.0


def lowered(x: torch.Tensor, unit: float) -> torch.Tensor:
    """Return x with half of its elements smaller by `unit`, relative."""
    is_lowered = torch.arange(x.numel(), device=x.device).mul(2.4).sin().view(x.shape) > 0
    return torch.where(is_lowered, x * (1 - unit), x)


@dataclass(frozen=True)
class Echo:
    """Attention and recurrent layers without a cache, to compare everything else: values weighted by functions of the
    other arguments. No token reads another.

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
        return self._of_layer(v.repeat_interleave(group, 1) * weight.unsqueeze(2).to(v.dtype), layer_id)

    def conv(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, layer_id: int) -> torch.Tensor:
        """See `specdec.backends.recurrent.conv`."""
        out = x * weight.sum(1)
        return self._of_layer(out if bias is None else out + bias, layer_id).to(x.dtype)

    def scan(self, inputs: ScanInputs, layer_id: int) -> torch.Tensor:
        """See `specdec.backends.recurrent.scan`."""
        q, k, v, g, beta, rates = inputs
        weight = (q.float() * k.float()).sum(-1).repeat_interleave(v.shape[1] // q.shape[1], 1)
        if g.dim() == 3:
            g = g.mean(-1)
        weight = weight + torch.tanh(g.float())
        if beta is not None:
            weight = weight * beta.float()
        if rates is not None:
            weight = weight + torch.tanh(rates.float().mean((1, 2)))
        return self._of_layer(v * weight.unsqueeze(2).to(v.dtype), layer_id)

    def _of_layer(self, out: torch.Tensor, layer_id: int) -> torch.Tensor:
        """Return `out`, weighted by its layer, so that one in another's place is seen."""
        out = out * (1 + layer_id / (layer_id + 8))
        return lowered(out, torch.finfo(out.dtype).eps / 2) if self.is_disturbed else out


@contextmanager
def disturbed(unit: float) -> Iterator[None]:
    """Within a forward's context: half of what attention and recurrent layers return is less by `unit`."""
    scopes = (_Disturbing(current_scope(), unit), _Disturbing(current_recurrent(), unit))
    with attention_scope(scopes[0]), recurrent_scope(scopes[1]):
        yield


@dataclass(frozen=True)
class _Disturbing:
    """Answers as `scope` does, half of it less by `unit`."""

    scope: Any
    unit: float

    def attend(self, *args: Any) -> torch.Tensor:
        return lowered(self.scope.attend(*args), self.unit)

    def conv(self, *args: Any) -> torch.Tensor:
        return lowered(self.scope.conv(*args), self.unit)

    def scan(self, *args: Any) -> torch.Tensor:
        return lowered(self.scope.scan(*args), self.unit)
