"""Stand-ins for attention and recurrent layers: one that needs no cache, and one that disturbs another's results."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from specdec.backends.differences import disturb
from specdec.backends.op import attention_scope, current_scope
from specdec.backends.recurrent import current_recurrent, recurrent_scope
from specdec.backends.recurrent.state_pool import ConvInputs, ScanInputs
from specdec.backends.rope import AnyRope, prepare


class Echo:
    """Replaces attention and recurrent layers without a cache, to compare everything else: values weighted by functions
    of the other arguments, and by the layer. Tokens do not affect each other."""

    def attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer_id: int, rope: AnyRope | None
    ) -> torch.Tensor:
        if rope is not None:
            q, k = prepare(q, k, rope)
        group = q.shape[1] // v.shape[1]
        ramp = torch.arange(q.shape[2], device=q.device, dtype=torch.float32).cos() / q.shape[2] ** 0.5
        weight = 1 + 0.5 * torch.tanh(q.float() @ ramp) - 0.5 * torch.tanh(k.float() @ ramp).repeat_interleave(group, 1)
        return _of_layer(v.repeat_interleave(group, 1) * weight.unsqueeze(2).to(v.dtype), layer_id)

    def store(self, k: torch.Tensor, v: torch.Tensor, layer_id: int, rope: AnyRope | None) -> None:
        """There is no cache."""

    def conv(self, inputs: ConvInputs, layer_id: int) -> torch.Tensor:
        """See `specdec.backends.recurrent.conv`."""
        x, weight, bias, is_silu = inputs
        out = x * weight.sum(1)
        out = _of_layer(out if bias is None else out + bias, layer_id).to(x.dtype)
        return F.silu(out) if is_silu else out

    def scan(self, inputs: ScanInputs, layer_id: int) -> torch.Tensor:
        """See `specdec.backends.recurrent.scan`."""
        q, k, v, g, beta, rates, scale = inputs
        if scale is not None:
            q, k = F.normalize(q.float(), dim=-1) * scale, F.normalize(k.float(), dim=-1)
        weight = (q.float() * k.float()).sum(-1).repeat_interleave(v.shape[1] // q.shape[1], 1)
        weight = weight + torch.tanh((g.mean(-1) if g.dim() == 3 else g).float())
        if beta is not None:
            weight = weight * beta.float()
        if rates is not None:
            weight = weight + torch.tanh(rates.float().mean((1, 2)))
        return _of_layer(v * weight.unsqueeze(2).to(v.dtype), layer_id)


def _of_layer(out: torch.Tensor, layer_id: int) -> torch.Tensor:
    """Return `out` weighted by its layer, so that swapped layers show."""
    return out * (1 + layer_id / (layer_id + 8))


@contextmanager
def echoing() -> Iterator[None]:
    """Answer attention and recurrent layers by `Echo` within the context."""
    with attention_scope(Echo()), recurrent_scope(Echo()):
        yield


@contextmanager
def disturbed(unit: float | None = None) -> Iterator[None]:
    """Disturb the outputs of the current attention and recurrent scopes within the context; see `disturb`."""
    with (
        attention_scope(_Disturbing(current_scope(), unit)),
        recurrent_scope(_Disturbing(current_recurrent(), unit)),
    ):
        yield


@dataclass(frozen=True)
class _Disturbing:
    """Answers as `scope` does, but half of the results are smaller by `unit`."""

    scope: Any
    unit: float | None

    def attend(self, *args: Any) -> torch.Tensor:
        return disturb(self.scope.attend(*args), self.unit)

    def store(self, *args: Any) -> None:
        self.scope.store(*args)

    def conv(self, *args: Any) -> torch.Tensor:
        return disturb(self.scope.conv(*args), self.unit)

    def scan(self, *args: Any) -> torch.Tensor:
        return disturb(self.scope.scan(*args), self.unit)
