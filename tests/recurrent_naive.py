"""Recurrent calls of one request from its first token on, token by token: what `conv` and `scan` compute."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F

from specdec.backends.recurrent import recurrent_scope
from specdec.backends.recurrent.state_pool import ScanInputs
from specdec.reach.targets.admission.recording import Recorder


class Naive(Recorder):
    """Records calls, and computes them."""

    def conv(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, layer_id: int) -> torch.Tensor:
        super().conv(x, weight, bias, layer_id)
        channels, kernel = weight.shape
        padded = F.pad(x.transpose(0, 1), (kernel - 1, 0)).unsqueeze(0)
        return F.conv1d(padded, weight.unsqueeze(1), bias, groups=channels)[0].transpose(0, 1)

    def scan(self, inputs: ScanInputs, layer_id: int) -> torch.Tensor:
        super().scan(inputs, layer_id)
        q, k, v, g, beta, rates = inputs
        copies = v.shape[1] // k.shape[1]
        q, k = (t.float().repeat_interleave(copies, 1) for t in (q, k))
        decays = _decays(g.float(), rates)
        state = v.new_zeros(v.shape[1], k.shape[2], v.shape[2], dtype=torch.float32)
        out = []
        for t, u in enumerate(v.float()):
            state = state * decays[t]
            if beta is not None:
                u = (u - _read(state, k[t])) * beta[t].float().unsqueeze(-1)
            state = state + k[t].unsqueeze(2) * u.unsqueeze(1)
            out.append(_read(state, q[t]))
        return torch.stack(out).to(v.dtype)

    @property
    def order(self) -> list[int]:
        """The ids that were called, in their order."""
        return [call.layer_id for call in self.calls]


def _decays(g: torch.Tensor, rates: torch.Tensor | None) -> torch.Tensor:
    """Return what states [H, N, P] are multiplied with before each token, [T, H, N or 1, P or 1]."""
    if rates is not None:
        return (rates.float() * g.unsqueeze(2)).exp()
    return (g.unsqueeze(-1) if g.dim() == 3 else g[..., None, None]).exp()


def _read(state: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """Return what state [H, N, P] holds under key [H, N]: [H, P]."""
    return (state * key.unsqueeze(2)).sum(1)


@contextmanager
def record_mixers() -> Iterator[Naive]:
    """Answer and record the recurrent calls of this thread within the context."""
    recorder = Naive()
    with recurrent_scope(recorder):
        yield recorder
