"""State of recurrent layers: short convolutions, and linear recurrences ("scans") whose state is a matrix per head.

Committed state is stored by row; the inputs of a round's nodes in a tail beside it, like K/V of tail nodes. A node
sees the row's state and the tail nodes of its path, and a commit folds the accepted ones into the state. The only node
of a plain decode step is always accepted, so it goes into the state at once. This file knows shapes;
`backends.recurrent.reference` specifies the computation.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeVar

import torch

from specdec.core.batch import AttentionMetadata, ForwardMode
from specdec.core.cache.pool import Commit, LayerState

Decay = Literal["head", "key", "state"]


@dataclass(frozen=True)
class ConvSpec:
    """A causal depthwise convolution along the sequence; `kernel` >= 2: inputs per output."""

    channels: int
    kernel: int


@dataclass(frozen=True)
class ScanSpec:
    """A linear recurrence with a state [k_dim, v_dim] per head.

    key_heads: heads of q and k; head h uses h // (heads // key_heads).
    decay: granularity of decays: by head, by key of a head (KDA), or by element of the state (S6).
    is_corrected: the delta rule, which writes the difference to what the state holds under a key.
    """

    heads: int
    key_heads: int
    k_dim: int
    v_dim: int
    decay: Decay
    is_corrected: bool

    @property
    def decay_shape(self) -> tuple[int, ...]:
        """The shape of one token's log decays."""
        return {"head": (self.heads,), "key": (self.heads, self.k_dim), "state": (self.heads, self.v_dim)}[self.decay]


RecurrentSpec = ConvSpec | ScanSpec


class ConvLayer(NamedTuple):
    """state [num_rows + num_kept, kernel - 1, channels], oldest first; tail [num_rows, max_tail, channels]: by node."""

    spec: ConvSpec
    state: torch.Tensor
    tail: torch.Tensor


class ScanLayer(NamedTuple):
    """State of a scan, fp32: state [num_rows + num_kept, heads, k_dim, v_dim], and of nodes, [num_rows, max_tail, ...]:

    k [key_heads, k_dim]; u [heads, v_dim], the values written under k; g [*decay_shape], the node's own log decay.
    rates [heads, k_dim, v_dim], for decay "state": an element's log decay is rates * g.
    """

    spec: ScanSpec
    state: torch.Tensor
    k: torch.Tensor
    u: torch.Tensor
    g: torch.Tensor
    rates: torch.Tensor | None


RecurrentLayer = ConvLayer | ScanLayer


class ConvInputs(NamedTuple):
    """x [T, channels], weight [channels, kernel], bias [channels]; is_silu: SiLU follows."""

    x: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None = None
    is_silu: bool = False


class ScanInputs(NamedTuple):
    """q, k [T, key_heads, k_dim], v [T, heads, v_dim], g [T, *decay_shape], beta [T, heads] for corrected scans.

    rates: see `ScanLayer`. Any float dtype, any strides. q and k may have fewer heads, each shared by several.
    scale: if given, the scan uses q / |q| * scale and k / |k|, with EPS added to the squares of |q| and |k|. None: it
    uses q and k unchanged.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    g: torch.Tensor
    beta: torch.Tensor | None = None
    rates: torch.Tensor | None = None
    scale: float | None = None


EPS = 1e-6  # of the norms of queries and keys, as in transformers
Conv = Callable[[ConvInputs, ConvLayer, AttentionMetadata], torch.Tensor]
Scan = Callable[[ScanInputs, ScanLayer, AttentionMetadata], torch.Tensor]
Op = TypeVar("Op", Conv, Scan)


@dataclass(frozen=True)
class RecurrentOps:
    """The device operations of recurrent layers; `backends.recurrent.reference` specifies them.

    conv_extend, scan_extend: for prefills; they update states. conv_step, scan_step: for plain decoding, one token per
    request; they also update states. conv_tail, scan_tail: for all other forwards; they write tails.
    folder(layers): called once per pool; returns the `Commit` of all layers.
    """

    name: str
    conv_extend: Conv
    conv_step: Conv
    conv_tail: Conv
    scan_extend: Scan
    scan_step: Scan
    scan_tail: Scan
    folder: Callable[[Sequence[RecurrentLayer]], Commit]


class StatePool(LayerState):
    """State by row of all recurrent layers of a model; a layer's id is its index in `specs`.

    num_kept: snapshots, which are stored after the rows and have no tails.
    """

    def __init__(
        self,
        specs: Sequence[RecurrentSpec],
        num_rows: int,
        max_tail: int,
        dtype: torch.dtype,
        device: torch.device,
        ops: RecurrentOps,
        num_kept: int = 0,
    ):
        self.num_rows, self.max_tail = num_rows, max_tail
        self.layers = [_allocate(spec, num_rows, max_tail, dtype, device, num_kept) for spec in specs]
        self.ops = ops

    def copy(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """Copy states of every layer from rows or snapshots `source` [n] int64 to `target` [n] int64, without
        duplicates; snapshot i is `num_rows` + i."""
        for layer in self.layers:
            layer.state.index_copy_(0, target, layer.state.index_select(0, source))

    def conv(self, inputs: ConvInputs, layer_id: int, metadata: AttentionMetadata) -> torch.Tensor:
        """Convolve x with weight and add bias: [T, channels].

        y[t, c] = bias[c] + sum_j weight[c, j] * window[j, c]; the window has the last inputs on t's path, up to t.
        is_silu: return silu(y), with y rounded to x's dtype.
        """
        layer = self.layers[layer_id]
        assert isinstance(layer, ConvLayer), f"layer {layer_id} is {type(layer).__name__}"
        of_mode = {ForwardMode.EXTEND: self.ops.conv_extend, ForwardMode.DECODE: self.ops.conv_step}
        return self._pick(of_mode, self.ops.conv_tail, metadata)(inputs, layer, metadata)

    def scan(self, inputs: ScanInputs, layer_id: int, metadata: AttentionMetadata) -> torch.Tensor:
        """Run the recurrence over tokens, see `ScanInputs`: [T, heads, v_dim] in v's dtype.

        S_t = exp(g_t) S_{t-1} + k_t (x) u_t, o_t = S_t^T q_t; u_t = v_t, or, for corrected scans,
        u_t = beta_t (v_t - (exp(g_t) S_{t-1})^T k_t).
        """
        layer = self.layers[layer_id]
        assert isinstance(layer, ScanLayer), f"layer {layer_id} is {type(layer).__name__}"
        assert (inputs.beta is not None) == layer.spec.is_corrected, "beta is for corrected scans, and they need it"
        assert (inputs.rates is not None) == (layer.rates is not None), "rates are for decays by element of the state"
        assert inputs.scale is None or layer.spec.is_corrected, "units are for corrected scans"
        of_mode = {ForwardMode.EXTEND: self.ops.scan_extend, ForwardMode.DECODE: self.ops.scan_step}
        return self._pick(of_mode, self.ops.scan_tail, metadata)(inputs, layer, metadata)

    def _pick(self, of_mode: Mapping[ForwardMode, Op], of_nodes: Op, metadata: AttentionMetadata) -> Op:
        if metadata.mode in of_mode:
            return of_mode[metadata.mode]
        assert metadata.tail_len <= self.max_tail, f"{metadata.tail_len} nodes in a tail of {self.max_tail}"
        return of_nodes

    def committer(self, ops: Any) -> Commit:
        """See `LayerState`. The pool's own operations commit, not those of the round."""
        return self.ops.folder(self.layers)

    @staticmethod
    def bytes_for(
        specs: Sequence[RecurrentSpec], num_rows: int, max_tail: int, dtype: torch.dtype, num_kept: int = 0
    ) -> int:
        """Return the bytes of a pool of these layers."""
        layers = [_allocate(spec, num_rows, max_tail, dtype, torch.device("meta"), num_kept) for spec in specs]
        tensors = [value for layer in layers for value in layer if isinstance(value, torch.Tensor)]
        return sum(t.nbytes for t in tensors)


def _allocate(
    spec: RecurrentSpec, num_rows: int, max_tail: int, dtype: torch.dtype, device: torch.device, num_kept: int
) -> RecurrentLayer:
    def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype, device=device)

    if isinstance(spec, ConvSpec):
        assert spec.kernel >= 2, "a convolution of one input keeps no state"
        state = zeros(num_rows + num_kept, spec.kernel - 1, spec.channels, dtype=dtype)
        return ConvLayer(spec, state, zeros(num_rows, max_tail, spec.channels, dtype=dtype))
    return ScanLayer(
        spec,
        state=zeros(num_rows + num_kept, spec.heads, spec.k_dim, spec.v_dim),
        k=zeros(num_rows, max_tail, spec.key_heads, spec.k_dim),
        u=zeros(num_rows, max_tail, spec.heads, spec.v_dim),
        g=zeros(num_rows, max_tail, *spec.decay_shape),
        rates=zeros(spec.heads, spec.k_dim, spec.v_dim) if spec.decay == "state" else None,
    )
