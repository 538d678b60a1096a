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
    """Shape and rules of one attention layer, as recorded at attach.

    scaling: factor of the logits q @ k.T.
    window: keys further than window-1 positions behind the query are hidden; None: no sliding window.
    chunk: keys before the query's own chunk of `chunk` positions are hidden (chunked attention); None: no chunks.
    softcap: logits become softcap * tanh(logits / softcap); None: no softcap.
    has_sinks: a logit per query head joins the softmax denominator.
    v_in_k: V is the first v_dim elements of K (an MLA latent) and is not stored again.
    turn: number of attention calls, directly before this one in the same module, whose outputs are still unread; such
        calls must not share an output buffer.
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
        """True without a sliding window and without chunks."""
        return self.window is None and self.chunk is None

    @property
    def answer(self) -> tuple[int, int, int]:
        """Key of an output buffer that layers may share: query heads, v_dim and turn."""
        return self.num_heads, self.v_dim, self.turn

    @property
    def shape(self) -> LayerShape:
        """The shape of the layer's K/V in the pool."""
        return LayerShape(self.num_kv_heads, self.qk_dim, self.v_dim, self.v_in_k)


@dataclass(frozen=True)
class Capabilities:
    """Capabilities of an attention backend; `unmet_needs` compares a model with them at attach.

    Every backend supports sliding windows, sinks and softcaps.
    v_dim_differs: whether v_dim may differ from qk_dim. dtypes: of q, k, v and the pool.
    head_dims: supported qk_dim and v_dim; None: any up to max_head_dim. max_latent_dim: largest qk_dim of layers with
    `LayerSpec.v_in_k` (MLA latents); 0: unsupported. chunks: whether it supports `LayerSpec.chunk`.
    fused_ops: whether rounds with this backend use the fused Triton operations, or the torch ones.
    packed_prefill: whether it supports prefills whose lengths only the device knows (`AttentionMetadata.is_packed`).
    limits: whether it supports `AttentionMetadata.limits`.
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
    """Return the reasons why a backend with `capabilities` cannot run `layers` in `dtype`; empty if it can."""
    reasons = []
    if dtype not in capabilities.dtypes:
        reasons.append(f"dtype {dtype} is not one of {sorted(map(str, capabilities.dtypes))}")
    for i, layer in enumerate(layers):
        dims = {layer.qk_dim, layer.v_dim}
        widest, known = max(dims), capabilities.head_dims or dims
        most = capabilities.max_latent_dim if layer.v_in_k else capabilities.max_head_dim
        wants = {
            f"head dims {sorted(dims - known)}, supported: {sorted(known)}": bool(dims - known),
            f"head dim {widest} over {most}": widest > most > 0,
            "chunked attention": layer.chunk is not None and not capabilities.chunks,
            "V as a part of K": not most,
            "v_dim different from qk_dim": layer.v_dim != layer.qk_dim and not capabilities.v_dim_differs,
        }
        reasons += [f"layer {i} needs {what}" for what, missing in wants.items() if missing]
    return reasons


class HeadNorms(NamedTuple):
    """RMS norms of each head of q and of k, with weights q and k [qk_dim]; other fields as in `linear.rms_norm`."""

    q: torch.Tensor
    k: torch.Tensor
    eps: float
    offset: float
    is_late: bool


class Rope(NamedTuple):
    """Rotary embedding of T tokens: cos, sin [T, R] with R <= qk_dim, in two equal halves; dims past R pass through."""

    cos: torch.Tensor
    sin: torch.Tensor


class NormedRope(NamedTuple):
    """A `Rope` for q and k whose heads are normed first (QK norm)."""

    cos: torch.Tensor
    sin: torch.Tensor
    norms: HeadNorms


AnyRope = Rope | NormedRope


class AttentionCall(NamedTuple):
    """Arguments of one layer's attention in a forward of T tokens.

    q [T, Hq, qk_dim], k [T, Hkv, qk_dim], v [T, Hkv, v_dim]: of the pool's dtype, the last dim contiguous. out
    [T, Hq, v_dim]: is written. pool, layer_id: the cache that takes K/V, and the layer's index there. sinks: [Hq] or
    None. rope: given if q and k are not rotated yet. `attend` ignores k, v and rope.
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
    """Base of attention backends: `plan` is called once per forward, `run` once per layer.

    A backend holds the plan of the current forward and nothing else. `run` is `store`, then `attend`; a graph that
    breaks at attention captures `store` and leaves `attend` outside. metadata: builds the argument of `plan`.
    rehearses: whether a forward may run without its launches, to compile kernels (`backends.triton.launch.ahead`).
    Each layer's first call is checked for shapes, dtypes and device: ValueError. With SPECDEC_DEBUG=1 in the
    environment every call is, and so is every index of a plan, on the device, for which each forward waits.
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
        """Return why "auto" should pass over this backend, such as kernels to compile first; None if it need not."""
        return None

    def prepare_for(
        self, layers: Sequence[LayerSpec], dtype: torch.dtype, device: torch.device, mask_words: int = 1
    ) -> None:
        """Compile or load the kernels for `layers`; called once, before warm-ups and captures. mask_words: W, 64-bit
        words of ancestor bits per query, 0 for chains only. AttachError if kernels are unavailable."""
        return None

    def served_by(self, mode: ForwardMode) -> str:
        """Return the name of the kernels that attend in forwards of `mode`, for reports."""
        return self.name

    @property
    def planned(self) -> AttentionMetadata:
        """Metadata of the current forward."""
        assert self._planned is not None, "attention before plan"
        return self._planned

    def plan(self, metadata: AttentionMetadata) -> None:
        """Prepare one forward; every `run` until the next `plan` uses it. ValueError for inconsistent metadata."""
        check_shapes(metadata)
        self._unchecked = metadata if self._debug else None
        self._planned = metadata
        self._prepare(metadata)

    def run(self, call: AttentionCall) -> None:
        """Write k and v to the pool at the planned slots, then attend: fills `call.out`."""
        self._check(call)
        q = self.store(call, self.planned.out_cache_loc)
        self._attend(call if q is call.q else call._replace(q=q))

    def attend(self, call: AttentionCall) -> None:
        """Attend with a rotated q over K/V that are already in the pool: fills `call.out`."""
        self._check(call)
        self._attend(call)

    @abstractmethod
    def store(self, call: AttentionCall, slots: torch.Tensor, q_out: torch.Tensor | None = None) -> torch.Tensor:
        """Write the call's k and v to pool `slots` [T] int64; q and k are rotated first if `call.rope` is given.

        Returns the q for `attend`, in q_out [T, Hq, qk_dim] if given. Needs no plan.
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
