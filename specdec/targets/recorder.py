"""Answers the recurrent calls of one forward by plain torch, and notes what they were.

The forward is one request from its first token on. It is slow, and the specification of what `conv` and `scan` compute.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
import torch.nn.functional as F

from specdec.backends.recurrent import recurrent_scope
from specdec.backends.state_pool import ConvSpec, Decay, ScanInputs, ScanSpec


@dataclass(frozen=True)
class ConvShape:
    """A convolution over the last `kernel` tokens of `channels` channels."""

    channels: int
    kernel: int
    dtype: torch.dtype

    @property
    def spec(self) -> ConvSpec:
        """What a pool holds for it."""
        return ConvSpec(self.channels, self.kernel)


@dataclass(frozen=True)
class ScanShape:
    """A recurrence whose state is [heads, k_dim, v_dim]; key_heads divide heads.

    decay: what decays at a rate of its own: a "head", a "key" channel of one, or every number of the "state".
    has_beta: whether the delta rule corrects what is written. dtype: of values and outputs.
    """

    heads: int
    key_heads: int
    k_dim: int
    v_dim: int
    decay: Decay
    has_beta: bool
    dtype: torch.dtype

    @property
    def spec(self) -> ScanSpec:
        """What a pool holds for it."""
        return ScanSpec(self.heads, self.key_heads, self.k_dim, self.v_dim, self.decay, is_corrected=self.has_beta)


class RecordedCall(NamedTuple):
    """A call of an op with `layer_id`."""

    layer_id: int
    shape: ConvShape | ScanShape


@dataclass
class Recorder:
    """A scope of recurrent calls. calls: in their order; ids may be among them several times, or never."""

    calls: list[RecordedCall] = field(default_factory=list)

    @property
    def order(self) -> list[int]:
        """The ids that were called, in their order, which numbers mixers anew."""
        return [call.layer_id for call in self.calls]

    def conv(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, layer_id: int) -> torch.Tensor:
        """See `specdec.backends.recurrent.conv`."""
        channels, kernel = weight.shape
        self.calls.append(RecordedCall(layer_id, ConvShape(channels, kernel, x.dtype)))
        padded = F.pad(x.transpose(0, 1), (kernel - 1, 0)).unsqueeze(0)
        return F.conv1d(padded, weight.unsqueeze(1), bias, groups=channels)[0].transpose(0, 1)

    def scan(self, inputs: ScanInputs, layer_id: int) -> torch.Tensor:
        """See `specdec.backends.recurrent.scan`."""
        q, k, v, g, beta, rates = inputs
        kind: Decay = "state" if rates is not None else "key" if g.dim() == 3 else "head"
        shape = ScanShape(v.shape[1], k.shape[1], k.shape[2], v.shape[2], kind, beta is not None, v.dtype)
        self.calls.append(RecordedCall(layer_id, shape))
        copies = shape.heads // shape.key_heads
        q, k = (t.float().repeat_interleave(copies, 1) for t in (q, k))
        decays = _decays(g.float(), rates)
        state = v.new_zeros(shape.heads, shape.k_dim, shape.v_dim, dtype=torch.float32)
        out = []
        for t, u in enumerate(v.float()):
            state = state * decays[t]
            if beta is not None:
                u = (u - _read(state, k[t])) * beta[t].float().unsqueeze(-1)
            state = state + k[t].unsqueeze(2) * u.unsqueeze(1)
            out.append(_read(state, q[t]))
        return torch.stack(out).to(v.dtype)


def _decays(g: torch.Tensor, rates: torch.Tensor | None) -> torch.Tensor:
    """Return what states [H, N, P] are multiplied with before each token, [T, H, N or 1, P or 1]."""
    if rates is not None:
        return (rates.float() * g.unsqueeze(2)).exp()
    return (g.unsqueeze(-1) if g.dim() == 3 else g[..., None, None]).exp()


def _read(state: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """Return what state [H, N, P] holds under key [H, N]: [H, P]."""
    return (state * key.unsqueeze(2)).sum(1)


@contextmanager
def record_mixers() -> Iterator[Recorder]:
    """Within, recurrent calls of this thread are answered and noted by the recorder."""
    recorder = Recorder()
    with recurrent_scope(recorder):
        yield recorder
