"""`specdec::attn`, the one custom op through which all attention goes, and the context it finds its state in.

The op knows only a layer number; pool, backend and plan come from the ForwardContext of the forward in flight: a
ContextVar, the one process-wide handle there is. Two engines enter contexts of their own and never meet.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

import torch

from specdec.backends.base import AttentionBackend, AttentionCall, LayerSpec
from specdec.backends.rope import Rope
from specdec.batch import AttentionMetadata, ForwardMode
from specdec.kv_cache import KVPool


@dataclass(frozen=True)
class ForwardContext:
    """State of one model's attention layers: backend, pool, layer specs and sinks ([Hq] or None a layer).

    on_forward is told the mode of every forward, before it runs; counters hang there.
    """

    backend: AttentionBackend
    pool: KVPool
    layers: Sequence[LayerSpec]
    sinks: Sequence[torch.Tensor | None]
    on_forward: Callable[[ForwardMode], None]


_CURRENT: ContextVar[ForwardContext] = ContextVar("specdec_forward")


@contextmanager
def forward_context(context: ForwardContext, metadata: AttentionMetadata) -> Iterator[None]:
    """Plan `metadata` and make `context` the one that attention calls find."""
    context.on_forward(metadata.mode)
    context.backend.plan(metadata)
    token = _CURRENT.set(context)
    try:
        yield
    finally:
        _CURRENT.reset(token)


def _attn(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    layer_id: int,
    cos: torch.Tensor | None = None,
    sin: torch.Tensor | None = None,
) -> None:
    c = _CURRENT.get()
    rope = None if cos is None or sin is None else Rope(cos, sin)
    c.backend.run(AttentionCall(q, k, v, out, c.pool, layer_id, c.layers[layer_id], c.sinks[layer_id], rope))


def _attn_fake(*args: torch.Tensor | int | None) -> None:
    return None


# Plain Library calls: the op adds 3-5 µs to `run` on a CPU, which decoding pays once a layer.
_LIBRARY = torch.library.Library("specdec", "DEF")
_LIBRARY.define(
    "attn(Tensor q, Tensor k, Tensor v, Tensor(a!) out, int layer_id, Tensor? cos=None, Tensor? sin=None) -> ()"
)
_LIBRARY.impl("attn", _attn, "CompositeExplicitAutograd")
torch.library.register_fake("specdec::attn", _attn_fake, lib=_LIBRARY)


def attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer_id: int, rope: Rope | None = None
) -> torch.Tensor:
    """Attend with q [T, Hq, qk_dim], k [T, Hkv, qk_dim], v [T, Hkv, v_dim] in the current context: [T, Hq, v_dim].

    rope: tables [T, R] that the backend rotates q and k with, where they come un-rotated.
    """
    out = q.new_empty(q.shape[0], q.shape[1], v.shape[2])
    torch.ops.specdec.attn(q, k, v, out, layer_id, *(rope or (None, None)))
    return out
