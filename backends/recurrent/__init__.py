"""`specdec::conv` and `specdec::scan`, the custom ops of recurrent layers, and the scope they find their state in.

As with `specdec::attn`, the ops know only a layer number; what a forward keeps between calls is no argument of theirs.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch

from specdec.backends.recurrent.state_pool import ScanInputs, StatePool
from specdec.core.batch import AttentionMetadata


@dataclass(frozen=True)
class StateScope:
    """Answers with the state that `pool` keeps, in a forward of `metadata`."""

    pool: StatePool
    metadata: AttentionMetadata

    def conv(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, layer_id: int) -> torch.Tensor:
        """See `StatePool.conv`."""
        return self.pool.conv(x, weight, bias, layer_id, self.metadata)

    def scan(self, inputs: ScanInputs, layer_id: int) -> torch.Tensor:
        """See `StatePool.scan`."""
        return self.pool.scan(inputs, layer_id, self.metadata)


_CURRENT: ContextVar[Any] = ContextVar("specdec_recurrent")


@contextmanager
def recurrent_scope(scope: Any) -> Iterator[None]:
    """Within, recurrent layers of this thread go to `scope`, which has the methods of `StateScope`."""
    token = _CURRENT.set(scope)
    try:
        yield
    finally:
        _CURRENT.reset(token)


def current_recurrent() -> Any:
    """Return this thread's scope of recurrent layers, or None."""
    return _CURRENT.get(None)


def conv(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, layer_id: int) -> torch.Tensor:
    """Convolve x [T, C] with weight [C, K] and bias [C] along the sequences of the current scope: [T, C]."""
    return torch.ops.specdec.conv.default(x, weight, bias, layer_id)


def scan(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    layer_id: int,
    g: torch.Tensor,
    beta: torch.Tensor | None = None,
    rates: torch.Tensor | None = None,
) -> torch.Tensor:
    """Run a layer's recurrence along the sequences of the current scope, see `StatePool.scan`: [T, heads, v_dim]."""
    return torch.ops.specdec.scan.default(q, k, v, layer_id, g, beta, rates)


def _scope() -> Any:
    scope = _CURRENT.get(None)
    if scope is None:
        raise RuntimeError(
            "an attached model's recurrent layer was called outside its engine: the model ran in one thread while the "
            "engine stepped in another, or its forward was compiled. While an engine works, use engine.generate() or "
            "wait; detach() before compiling the model"
        )
    return scope


def _conv(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, layer_id: int) -> torch.Tensor:
    return _scope().conv(x, weight, bias, layer_id).contiguous()


def _scan(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    layer_id: int,
    g: torch.Tensor,
    beta: torch.Tensor | None = None,
    rates: torch.Tensor | None = None,
) -> torch.Tensor:
    return _scope().scan(ScanInputs(q, k, v, g, beta, rates), layer_id).contiguous()


def _conv_fake(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, layer_id: int) -> torch.Tensor:
    return x.new_empty(x.shape)


def _scan_fake(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *args: torch.Tensor | int | None) -> torch.Tensor:
    return v.new_empty(v.shape)


# State that they write is no argument of them, so a trace sees pure functions, as of `specdec::attn`.
_LIBRARY = torch.library.Library("specdec", "FRAGMENT")
_LIBRARY.define("conv(Tensor x, Tensor weight, Tensor? bias, int layer_id) -> Tensor")
_LIBRARY.define(
    "scan(Tensor q, Tensor k, Tensor v, int layer_id, Tensor g, Tensor? beta=None, Tensor? rates=None) -> Tensor"
)
_LIBRARY.impl("conv", _conv, "CompositeExplicitAutograd")
_LIBRARY.impl("scan", _scan, "CompositeExplicitAutograd")
torch.library.register_fake("specdec::conv", _conv_fake, lib=_LIBRARY)
torch.library.register_fake("specdec::scan", _scan_fake, lib=_LIBRARY)
