"""The attention contract: what a layer needs, what a backend can do, and the two calls of a forward."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from specdec.batch import AttentionMetadata
from specdec.kv_cache import KVPool, LayerShape


@dataclass(frozen=True)
class LayerSpec:
    """One attention layer as the probe saw it.

    window: keys further than window-1 positions behind the query are hidden; None sees everything.
    softcap: logits become softcap * tanh(logits / softcap).
    has_sinks: a logit per query head joins the softmax denominator.
    """

    num_heads: int
    num_kv_heads: int
    qk_dim: int
    v_dim: int
    scaling: float
    window: int | None = None
    softcap: float | None = None
    has_sinks: bool = False

    @property
    def shape(self) -> LayerShape:
        """The K/V shape the pool must hold."""
        return LayerShape(self.num_kv_heads, self.qk_dim, self.v_dim)


@dataclass(frozen=True)
class Capabilities:
    """What a backend can do; `unmet_needs` holds a model against it at attach."""

    device_planned: bool
    tree_mask: bool
    sliding_window: bool
    sinks: bool
    softcap: bool
    v_dim_differs: bool
    dtypes: frozenset[torch.dtype]
    max_head_dim: int


def unmet_needs(capabilities: Capabilities, layers: Sequence[LayerSpec], dtype: torch.dtype) -> list[str]:
    """Reasons why a backend with `capabilities` cannot run `layers` in `dtype`; empty if it can."""
    reasons = []
    if dtype not in capabilities.dtypes:
        reasons.append(f"dtype {dtype} is not one of {sorted(map(str, capabilities.dtypes))}")
    for i, layer in enumerate(layers):
        widest = max(layer.qk_dim, layer.v_dim)
        wants = {
            f"head dim {widest} over {capabilities.max_head_dim}": widest > capabilities.max_head_dim,
            "a sliding window": layer.window is not None and not capabilities.sliding_window,
            "attention sinks": layer.has_sinks and not capabilities.sinks,
            "a logit softcap": layer.softcap is not None and not capabilities.softcap,
            "v_dim different from qk_dim": layer.v_dim != layer.qk_dim and not capabilities.v_dim_differs,
        }
        reasons += [f"layer {i} needs {what}" for what, missing in wants.items() if missing]
    return reasons


class AttentionBackend(ABC):
    """`plan` once a forward, `run` once a layer. A backend holds the plan of the forward in flight and nothing else."""

    name: str
    capabilities: Capabilities

    @abstractmethod
    def plan(self, metadata: AttentionMetadata) -> None:
        """Prepare one forward; every `run` until the next `plan` uses it."""

    @abstractmethod
    def run(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        pool: KVPool,
        layer_id: int,
        layer: LayerSpec,
        sinks: torch.Tensor | None,
    ) -> None:
        """Write k, v to the pool, then attend.

        q [T, Hq, qk_dim], k [T, Hkv, qk_dim], v [T, Hkv, v_dim], any strides; out [T, Hq, v_dim] is filled;
        sinks [Hq] or None.
        """
