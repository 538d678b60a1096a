"""The attention contract: what a layer needs, what a backend can do, and the two calls of a forward."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from specdec.backends.checks import check_call, check_indices, check_shapes, is_debug
from specdec.backends.metadata import MetadataBuilder
from specdec.core.batch import AttentionMetadata, ForwardMode
from specdec.core.cache.pool import KVPool, LayerShape


@dataclass(frozen=True)
class LayerSpec:
    """One attention layer as the probe saw it.

    window: keys further than window-1 positions behind the query are hidden; None sees everything.
    chunk: keys before the query's chunk of as many positions are hidden; None: there are no chunks.
    softcap: logits become softcap * tanh(logits / softcap).
    has_sinks: a logit per query head joins the softmax denominator.
    v_in_k: V is the first v_dim elements of K (a latent), and is not stored again.
    turn: calls that its module has made just before, whose answers have not been read when it attends.
    """

    num_heads: int
    num_kv_heads: int
    qk_dim: int
    v_dim: int
    scaling: float
    window: int | None = None
    softcap: float | None = None
    has_sinks: bool = False
    v_in_k: bool = False
    chunk: int | None = None
    turn: int = field(default=0, compare=False)

    @property
    def sees_all(self) -> bool:
        """Return whether no key is hidden for being far away."""
        return self.window is None and self.chunk is None

    @property
    def answer(self) -> tuple[int, int, int]:
        """Return what an output buffer must fit to be this layer's: heads and dimension of a token, and the turn."""
        return self.num_heads, self.v_dim, self.turn

    @property
    def shape(self) -> LayerShape:
        """The K/V shape the pool must hold."""
        return LayerShape(self.num_kv_heads, self.qk_dim, self.v_dim, self.v_in_k)


@dataclass(frozen=True)
class Capabilities:
    """Capabilities of a backend; `unmet_needs` compares a model with them at attach. Every one does windows, sinks and
    softcaps.

    fused_ops: whether rounds beside it use the fused operations (Triton kernels) or the torch ones.
    packed_prefill: whether it attends in prefills whose lengths only the device knows (`AttentionMetadata.is_packed`).
    head_dims: of q, k and v; None: any up to max_head_dim. max_latent_dim: of K whose first part is V; 0: none.
    limits: whether prefills may bring some (`AttentionMetadata.limits`).
    """

    v_dim_differs: bool
    max_latent_dim: int
    dtypes: frozenset[torch.dtype]
    max_head_dim: int
    fused_ops: bool = False
    packed_prefill: bool = False
    chunks: bool = False
    limits: bool = False
    head_dims: frozenset[int] | None = None


def unmet_needs(capabilities: Capabilities, layers: Sequence[LayerSpec], dtype: torch.dtype) -> list[str]:
    """Reasons why a backend with `capabilities` cannot run `layers` in `dtype`; empty if it can."""
    reasons = []
    if dtype not in capabilities.dtypes:
        reasons.append(f"dtype {dtype} is not one of {sorted(map(str, capabilities.dtypes))}")
    for i, layer in enumerate(layers):
        dims = {layer.qk_dim, layer.v_dim}
        widest, known = max(dims), capabilities.head_dims or dims
        most = capabilities.max_latent_dim if layer.v_in_k else capabilities.max_head_dim
        wants = {
            f"head dims {sorted(dims - known)} where there are {sorted(known)}": bool(dims - known),
            f"head dim {widest} over {most}": widest > most > 0,
            "chunked attention": layer.chunk is not None and not capabilities.chunks,
            "V as a part of K": not most,
            "v_dim different from qk_dim": layer.v_dim != layer.qk_dim and not capabilities.v_dim_differs,
        }
        reasons += [f"layer {i} needs {what}" for what, missing in wants.items() if missing]
    return reasons


class HeadNorms(NamedTuple):
    """RMS norms of the heads of q and k, by weights [qk_dim] each; see `linear.rms_norm` for the rest."""

    q: torch.Tensor
    k: torch.Tensor
    eps: float
    offset: float
    is_late: bool


class Rope(NamedTuple):
    """Tables for T tokens: cos, sin [T, R] with R <= qk_dim, both halves of R equal; dims past R are not rotated."""

    cos: torch.Tensor
    sin: torch.Tensor


class NormedRope(NamedTuple):
    """A `Rope` for q and k that are normed first."""

    cos: torch.Tensor
    sin: torch.Tensor
    norms: HeadNorms


AnyRope = Rope | NormedRope


class AttentionCall(NamedTuple):
    """One layer of a forward.

    q [T, Hq, qk_dim], k [T, Hkv, qk_dim], v [T, Hkv, v_dim], any strides but a dense last dim; out [T, Hq, v_dim] is
    filled; pool and layer_id: where K/V go; sinks [Hq] or None; rope: if q and k come un-rotated.
    `attend` needs neither k and v nor rope.
    """

    q: torch.Tensor
    k: torch.Tensor | None
    v: torch.Tensor | None
    out: torch.Tensor
    pool: KVPool
    layer_id: int
    layer: LayerSpec
    sinks: torch.Tensor | None = None
    rope: AnyRope | None = None


class AttentionBackend(ABC):
    """`plan` once a forward, `run` once a layer. A backend holds the plan of the forward in flight and nothing else.

    `run` is `store`, then `attend`; a graph that breaks at attention captures the one and leaves the other outside.
    metadata: builds what it is given. With SPECDEC_DEBUG=1 in the environment every index of a plan
    is checked against its bounds, on the device, before it is used; each forward waits for the host then. Shapes and
    dtypes of calls are checked then, too, and of each layer's first call always.
    rehearses: whether a forward may run with its launches left out (`backends.triton.launch.ahead`).
    """

    name: str
    rehearses = False
    capabilities: Capabilities
    metadata: MetadataBuilder

    def __init__(self) -> None:
        self._debug = is_debug()
        self._unchecked: AttentionMetadata | None = None
        self._known: set[tuple[int, int]] = set()  # pools and layers whose calls fit them
        self._planned: AttentionMetadata | None = None

    @classmethod
    def unusable_on(cls, device: torch.device) -> str | None:
        """Return why this backend cannot run on `device` at all; None if it can."""
        return None

    @classmethod
    def not_ready(cls, layers: Sequence[LayerSpec], dtype: torch.dtype, device: torch.device) -> str | None:
        """Return why "auto" should not take this backend now though it can run `layers`: kernels to compile first."""
        return None

    def prepare_for(
        self, layers: Sequence[LayerSpec], dtype: torch.dtype, device: torch.device, mask_words: int = 1
    ) -> None:
        """Build or load what `layers` will need; called once, before anything is warmed up or captured.

        mask_words: of the ancestor bits that forwards may bring, 0 for chains only. AttachError if it cannot be had.
        """
        return None

    def served_by(self, mode: ForwardMode) -> str:
        """Return the kernels that attend in forwards of `mode`, for reports."""
        return self.name

    @property
    def planned(self) -> AttentionMetadata:
        """The forward in flight."""
        assert self._planned is not None, "attention before plan"
        return self._planned

    def plan(self, metadata: AttentionMetadata) -> None:
        """Prepare one forward; every `run` until the next `plan` uses it. ValueError for what cannot be planned."""
        check_shapes(metadata)
        self._unchecked = metadata if self._debug else None
        self._planned = metadata
        self._prepare(metadata)

    def run(self, call: AttentionCall) -> None:
        """Write the call's k and v to the pool, then attend."""
        self._check(call)
        q = self.store(call, self.planned.out_cache_loc)
        self._attend(call if q is call.q else call._replace(q=q))

    def attend(self, call: AttentionCall) -> None:
        """Attend with a q that is rotated, over K and V that are stored already."""
        self._check(call)
        self._attend(call)

    @abstractmethod
    def store(self, call: AttentionCall, slots: torch.Tensor, q_out: torch.Tensor | None = None) -> torch.Tensor:
        """Write the call's k and v to pool slots [T] int64, both q and k rotated if it brings tables.

        Returns the q to attend with, which is q_out [T, Hq, qk_dim] where that is given. Needs no plan.
        """

    def _check(self, call: AttentionCall) -> None:
        if (id(call.pool), call.layer_id) not in self._known or self._debug:
            check_call(call, self.planned.positions.shape[0])
            self._known.add((id(call.pool), call.layer_id))
        if self._unchecked is not None:
            check_indices(self._unchecked, num_slots=call.pool.num_slots)
            self._unchecked = None

    @abstractmethod
    def _prepare(self, metadata: AttentionMetadata) -> None: ...

    @abstractmethod
    def _attend(self, call: AttentionCall) -> None: ...
