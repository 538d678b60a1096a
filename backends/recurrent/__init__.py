"""`specdec::conv` and `specdec::scan`, the custom ops of recurrent layers, and the scope that holds their state.

As with `specdec::attn`, the ops get only a layer number; state is not among their arguments.
"""

from dataclasses import dataclass
from typing import Any

import torch

from specdec.backends.library import Scope, op
from specdec.backends.recurrent.state_pool import ConvInputs, ScanInputs, StatePool
from specdec.core.batch import AttentionMetadata


@dataclass(frozen=True)
class StateScope:
    """Executes recurrent layers with the state in `pool`, in a forward of `metadata`."""

    pool: StatePool
    metadata: AttentionMetadata

    def conv(self, inputs: ConvInputs, layer_id: int) -> torch.Tensor:
        """See `StatePool.conv`."""
        return self.pool.conv(inputs, layer_id, self.metadata)

    def scan(self, inputs: ScanInputs, layer_id: int) -> torch.Tensor:
        """See `StatePool.scan`."""
        return self.pool.scan(inputs, layer_id, self.metadata)


_SCOPE: Scope[Any] = Scope("recurrent layer")  # of objects with the methods of StateScope
recurrent_scope, current_recurrent = _SCOPE.within, _SCOPE.find


# The state that they write is not an argument, so a trace sees pure functions, as for `specdec::attn`.
@op(
    "conv(Tensor x, Tensor weight, Tensor? bias, int layer_id, bool is_silu=False) -> Tensor",
    lambda x, *_: x.new_empty(x.shape),
)
def conv(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, layer_id: int, is_silu: bool = False
) -> torch.Tensor:
    """Convolve x [T, C] with weight [C, K] and bias [C] along the sequences of the current scope: [T, C]; is_silu: and
    apply SiLU to the result."""
    return _SCOPE.get().conv(ConvInputs(x, weight, bias, is_silu), layer_id).contiguous()


@op(
    "scan(Tensor q, Tensor k, Tensor v, int layer_id, Tensor g, Tensor? beta=None, Tensor? rates=None, "
    "float? scale=None) -> Tensor",
    lambda q, k, v, *_: v.new_empty(v.shape),
)
def scan(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    layer_id: int,
    g: torch.Tensor,
    beta: torch.Tensor | None = None,
    rates: torch.Tensor | None = None,
    scale: float | None = None,
) -> torch.Tensor:
    """Run a layer's recurrence along the sequences of the current scope, see `StatePool.scan`: [T, heads, v_dim]."""
    return _SCOPE.get().scan(ScanInputs(q, k, v, g, beta, rates, scale), layer_id).contiguous()
