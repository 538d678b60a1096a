"""Recurrent calls of one request from its first token, token by token: the reference for `conv` and `scan`."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F

from specdec.backends.recurrent import recurrent_scope
from specdec.backends.recurrent.state_pool import EPS, ConvInputs, ScanInputs
from specdec.reach.targets.admission.recording import Recorder


class Naive(Recorder):
    """Records calls and computes their results."""

    def conv(self, inputs: ConvInputs, layer_id: int) -> torch.Tensor:
        super().conv(inputs, layer_id)
        x, weight, bias, is_silu = inputs
        channels, kernel = weight.shape
        padded = F.pad(x.transpose(0, 1), (kernel - 1, 0)).unsqueeze(0)
        out = F.conv1d(padded, weight.unsqueeze(1), bias, groups=channels)[0].transpose(0, 1)
        return F.silu(out) if is_silu else out

    def scan(self, inputs: ScanInputs, layer_id: int) -> torch.Tensor:
        super().scan(inputs, layer_id)
        q, k, v, g, beta, rates, scale = inputs
        copies = v.shape[1] // k.shape[1]
        q, k, values, factor = *(t.float().repeat_interleave(copies, 1) for t in (q, k)), v.float(), 1.0
        if scale is not None:  # keys stay unscaled: writing under a unit key equals writing under the key
            of_q, c = (torch.rsqrt((t * t).sum(-1, keepdim=True) + EPS) for t in (q, k))
            factor, values, beta = scale * of_q, values / c, beta.float() * (c * c).squeeze(-1)
        decays = _decays(g.float(), rates)
        state = v.new_zeros(v.shape[1], k.shape[2], v.shape[2], dtype=torch.float32)
        out = []
        for t, u in enumerate(values):
            state = state * decays[t]
            if beta is not None:
                u = (u - _read(state, k[t])) * beta[t].float().unsqueeze(-1)
            state = state + k[t].unsqueeze(2) * u.unsqueeze(1)
            out.append(_read(state, q[t]))
        return (torch.stack(out) * factor).to(v.dtype)

    @property
    def order(self) -> list[int]:
        """The layer ids of all calls, in order."""
        return [call.layer_id for call in self.calls]


def _decays(g: torch.Tensor, rates: torch.Tensor | None) -> torch.Tensor:
    """Return the factors of states [H, N, P] before each token, [T, H, N or 1, P or 1]."""
    if rates is not None:
        return (rates.float() * g.unsqueeze(2)).exp()
    return (g.unsqueeze(-1) if g.dim() == 3 else g[..., None, None]).exp()


def _read(state: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """Read state [H, N, P] with key [H, N]: [H, P]."""
    return (state * key.unsqueeze(2)).sum(1)


@contextmanager
def record_mixers() -> Iterator[Naive]:
    """Compute and record the recurrent calls of this thread within the context."""
    recorder = Naive()
    with recurrent_scope(recorder):
        yield recorder
