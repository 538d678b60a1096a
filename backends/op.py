"""`specdec::attn`, the one custom op through which all attention goes, and the context that holds its state.

The op gets a layer number; pool, backend and plan come from the ForwardContext of the current forward. A ContextVar
holds it, so threads and engines never share one.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch

from specdec.backends.base import AnyRope, AttentionBackend, AttentionCall, HeadNorms, LayerSpec, NormedRope, Rope
from specdec.backends.library import Scope, define_op
from specdec.backends.recurrent import StateScope, recurrent_scope
from specdec.backends.recurrent.state_pool import StatePool
from specdec.core.batch import AttentionMetadata, ForwardMode
from specdec.core.cache.pool import KVPool, LayerState


class AttentionScope(Protocol):
    """The object that executes the attention calls of the current forward."""

    def attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer_id: int, rope: AnyRope | None
    ) -> torch.Tensor:
        """See `attention`."""

    def store(self, k: torch.Tensor, v: torch.Tensor, layer_id: int, rope: AnyRope | None) -> None:
        """See `store`."""


@dataclass(frozen=True)
class ForwardContext:
    """State that one model's layers use in a forward: backend, pool, layer specs and sinks ([Hq] or None for each).

    on_forward: called with the mode of every forward, before it runs, to count it. row_states: per-row state of layers
    that are not attention. adapters [num_rows] int64: number of each row's LoRA adapter, 0 for none; None if the model
    has no adapters. rope_deltas [num_rows] int64: offset added to rotary positions of a row's tokens; None if images do
    not shift positions. stores: False for a model that writes no K/V and attends to another model's in the pool.
    Raises ValueError if the pool's layers or the sinks do not match `layers`.
    """

    backend: AttentionBackend
    pool: KVPool
    layers: Sequence[LayerSpec]
    sinks: Sequence[torch.Tensor | None]
    on_forward: Callable[[ForwardMode], None]
    row_states: tuple[LayerState, ...] = ()
    adapters: torch.Tensor | None = None
    rope_deltas: torch.Tensor | None = None
    stores: bool = True

    def __post_init__(self) -> None:
        stored, needed = list(self.pool.layers), [layer.shape for layer in self.layers]
        if stored != needed:
            raise ValueError(f"the pool holds layers {stored}: expected {needed}, as the layers need them")
        expected = [(layer.num_heads,) if layer.has_sinks else None for layer in self.layers]
        given = [None if sink is None else tuple(sink.shape) for sink in self.sinks]
        if given != expected:
            raise ValueError(f"sinks of shapes {given}: expected {expected}, one entry per layer")

    @property
    def states(self) -> tuple[LayerState, ...]:
        """All state that the layers keep between forwards: the pool, then `row_states`."""
        return (self.pool, *self.row_states)

    @property
    def state_pool(self) -> StatePool | None:
        """The state of recurrent layers; None if the model has no such layers."""
        return next((state for state in self.row_states if isinstance(state, StatePool)), None)

    def recurrent(self, metadata: AttentionMetadata) -> AbstractContextManager[None]:
        """Return a context in which recurrent layers find their states for a forward of `metadata`."""
        pool = self.state_pool
        return nullcontext() if pool is None else recurrent_scope(StateScope(pool, metadata))

    def adapted(self, metadata: AttentionMetadata) -> AbstractContextManager[None]:
        """Return a context in which LoRA layers find the adapter of each token of a forward of `metadata`."""
        return nullcontext() if self.adapters is None else adapter_scope(adapters_of_tokens(self.adapters, metadata))

    def attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer_id: int, rope: AnyRope | None
    ) -> torch.Tensor:
        """Store k and v if `stores`, and attend in the planned forward: [T, Hq, v_dim]; arguments as in `attention`."""
        out = q.new_empty(q.shape[0], q.shape[1], v.shape[2])
        run = self.backend.run if self.stores else self.backend.attend
        run(self.call(q, k, v, out, layer_id, rope))
        return out

    def store(
        self, k: torch.Tensor, v: torch.Tensor, layer_id: int, rope: AnyRope | None, slots: torch.Tensor | None = None
    ) -> None:
        """Store k and v in the slots of the planned forward, or in `slots` [T] int64."""
        q = k[:, :1]  # rotated with k, but unused
        call = self.call(q, k, v, q, layer_id, rope)
        self.backend.store(call, self.backend.planned.out_cache_loc if slots is None else slots)

    def call(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, layer_id: int, rope: AnyRope | None
    ) -> AttentionCall:
        """Return the AttentionCall of one layer; ValueError for a layer_id that is not in `layers`."""
        if not 0 <= layer_id < len(self.layers):
            raise ValueError(f"layer_id={layer_id}: expected one of the context's {len(self.layers)} layers")
        return AttentionCall(q, k, v, out, self.pool, layer_id, self.layers[layer_id], self.sinks[layer_id], rope)


@dataclass(frozen=True)
class _PaddedScope:
    """Executes attention calls of a packed forward; layers of a shape share one output, zeroed once, since backends
    write live rows only.

    A layer's output has been read when the next layer attends, unless `LayerSpec.turn` differs. before: called with the
    layer's number before each call.
    """

    context: ForwardContext
    outputs: dict[tuple[int, ...], torch.Tensor]
    before: Callable[[int], None]

    def attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer_id: int, rope: AnyRope | None
    ) -> torch.Tensor:
        self.before(layer_id)
        place = (q.shape[0], *self.context.layers[layer_id].answer)
        if place not in self.outputs:
            self.outputs[place] = q.new_zeros(q.shape[0], q.shape[1], v.shape[2])
        self.context.backend.run(self.context.call(q, k, v, self.outputs[place], layer_id, rope))
        return self.outputs[place]

    def store(self, k: torch.Tensor, v: torch.Tensor, layer_id: int, rope: AnyRope | None) -> None:
        self.context.store(k, v, layer_id, rope)


_READ: Scope[torch.Tensor | None] = Scope("forward")
rows_read = _READ.find  # `AttentionMetadata.read_rows` of the current forward; None: all
_SCOPE: Scope[AttentionScope] = Scope("attention", ". Code of your own calls attention() within forward_context()")
attention_scope, current_scope = _SCOPE.within, _SCOPE.find


_ADAPTERS: Scope[Callable[[int], torch.Tensor]] = Scope("adapted layer")
adapters_by, adapters_in_scope = _ADAPTERS.within, _ADAPTERS.get


def adapter_scope(adapters: torch.Tensor) -> AbstractContextManager[None]:
    """Return a context in which LoRA layers find the adapter of each row, [T] int64. ValueError for a layer whose input
    has not T rows."""
    return adapters_by(partial(_all_of, adapters))


def _all_of(adapters: torch.Tensor, num_rows: int) -> torch.Tensor:
    if len(adapters) != num_rows:
        raise ValueError(
            f"an adapted layer gets {num_rows} rows in a forward of {len(adapters)} tokens, as experts do: they "
            "cannot be matched to requests; leave this layer out of the adapters"
        )
    return adapters


def adapters_of_tokens(by_row: torch.Tensor, metadata: AttentionMetadata) -> torch.Tensor:
    """Return each token's adapter, [T] int64, from those by row [num_rows] int64; 0 for padding."""
    own = by_row[metadata.rows]
    if metadata.mode is ForwardMode.EXTEND:
        return torch.nn.functional.pad(own, (0, 1))[metadata.owners()]
    return own.unsqueeze(1).repeat(1, metadata.q_len).view(-1)  # dense, as kernels read it


@contextmanager
def forward_context(
    context: ForwardContext, metadata: AttentionMetadata, before: Callable[[int], None] = lambda layer_id: None
) -> Iterator[None]:
    """Count and plan a forward of `metadata`; within, attention calls and recurrent layers use `context`.

    In a packed forward the attention output of padding rows is zero, and before(layer_id) is called before each
    attention. ValueError for inconsistent metadata.
    """
    context.on_forward(metadata.mode)
    context.backend.plan(metadata)
    scope = _PaddedScope(context, {}, before) if metadata.is_packed else context
    # Adapters are given per token of the whole forward, so all rows run with them.
    reading = _READ.within(metadata.read_rows if context.adapters is None else None)
    with attention_scope(scope), context.recurrent(metadata), context.adapted(metadata), reading:
        yield


def _attn(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    layer_id: int,
    cos: torch.Tensor | None = None,
    sin: torch.Tensor | None = None,
    q_norm: torch.Tensor | None = None,
    k_norm: torch.Tensor | None = None,
    eps: float = 0.0,
    offset: float = 0.0,
    is_late: bool = False,
) -> torch.Tensor:
    rope: AnyRope | None = None if cos is None or sin is None else Rope(cos, sin)
    if rope is not None and q_norm is not None and k_norm is not None:
        rope = NormedRope(rope.cos, rope.sin, HeadNorms(q_norm, k_norm, eps, offset, is_late))
    return _SCOPE.get().attend(q, k, v, layer_id, rope)


# The pool it writes to is not an argument, so a trace sees a pure function; calls stay in order because later ops read
# the output.
define_op(
    "attn(Tensor q, Tensor k, Tensor v, int layer_id, Tensor? cos=None, Tensor? sin=None, Tensor? q_norm=None,"
    " Tensor? k_norm=None, float eps=0.0, float offset=0.0, bool is_late=False) -> Tensor",
    _attn,
    lambda q, k, v, *_: q.new_empty(q.shape[0], q.shape[1], v.shape[2]),
)


def attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer_id: int, rope: Rope | None = None
) -> torch.Tensor:
    """Attend with q [T, Hq, qk_dim], k [T, Hkv, qk_dim], v [T, Hkv, v_dim] in the current context: [T, Hq, v_dim].

    All of the pool's dtype. k and v are stored first. rope: tables [T, R] with which the backend rotates q and k; None
    if they are rotated already. RuntimeError outside of `forward_context`.
    """
    return torch.ops.specdec.attn(q, k, v, layer_id, *(rope or (None, None)))


def store(k: torch.Tensor, v: torch.Tensor, layer_id: int, rope: Rope | None = None) -> None:
    """Write k [T, Hkv, qk_dim] and v [T, Hkv, v_dim] to the pool in scope without attending. rope: see `attention`."""
    _SCOPE.get().store(k, v, layer_id, rope)
