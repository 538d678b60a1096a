"""The contract of state that layers keep between forwards, and the K/V pool. Other kinds of state are stored by row.

Layers write during a forward. Writes of a prefill or a plain step count at once; those of a verify count once the round
commits the accepted path, and those of rejected nodes are dropped.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

# (slot_table [num_rows, width] int32, rows [bs], seq_lens [bs], accept_index [bs, W]): nodes accept_index of each
# request, -1 past the path's end, are its tokens at positions seq_lens.. from now on. int64 unless said.
Commit = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], None]


class CommitOps(Protocol):
    """The operations that a state may commit with; see `specdec.core.functional.ops.RoundOps`."""

    @property
    def committer(self) -> Callable[[Any], Commit]:
        """Make the commit of a KV pool."""


class LayerState(ABC):
    """One kind of state, of all layers that have it.

    State by row is [num_rows, ...] under the rows of `SlotTables`; the last is the dummy row, which padding writes. A
    prefill that begins at position 0 begins with an empty state, whatever a row held.
    commits_chains: whether an accepted chain has to be committed, too.
    """

    commits_chains: bool = True

    @abstractmethod
    def committer(self, ops: CommitOps) -> Commit:
        """Return the function that commits an accepted path, on the device and without host sync."""


@dataclass(frozen=True)
class LayerShape:
    """K/V shape of one attention layer: heads, head dims (elements). v_in_k: V is the first v_dim elements of K."""

    num_kv_heads: int
    qk_dim: int
    v_dim: int
    v_in_k: bool = False

    @property
    def slot_size(self) -> int:
        """Elements that one slot holds."""
        return self.num_kv_heads * (self.qk_dim + (0 if self.v_in_k else self.v_dim))


class KVPool(LayerState):
    """K/V cache of every layer: k[layer] is [num_slots, Hkv, qk_dim], v[layer] is [num_slots, Hkv, v_dim], one dtype.

    Slot 0 is the dummy slot. Where V is a part of K (`LayerShape.v_in_k`), v[layer] is a view of k[layer].
    """

    commits_chains = False  # a chain's K/V is in place; rejected slots are simply past the new L

    def __init__(self, layers: Sequence[LayerShape], num_slots: int, dtype: torch.dtype, device: torch.device):
        def zeros(heads: int, dim: int) -> torch.Tensor:
            return torch.zeros(num_slots, heads, dim, dtype=dtype, device=device)

        self.layers, self.num_slots = tuple(layers), num_slots  # slots: the dummy page's included
        self.k = [zeros(s.num_kv_heads, s.qk_dim) for s in layers]
        self.v = [
            k[..., : s.v_dim] if s.v_in_k else zeros(s.num_kv_heads, s.v_dim)
            for k, s in zip(self.k, layers, strict=True)
        ]

    def write(self, layer: int, slots: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """Store k [T, Hkv, qk_dim] and, unless V is a part of K, v [T, Hkv, v_dim] at `slots` [T] int64."""
        self.k[layer].index_copy_(0, slots, k)
        if not self.layers[layer].v_in_k:
            self.v[layer].index_copy_(0, slots, v)

    def move(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """Copy K/V of every layer from slots `source` to `target`, both [N] int64; reads all before it writes."""
        for cache in self.planes:
            cache.index_copy_(0, target, cache.index_select(0, source))

    def committer(self, ops: CommitOps) -> Commit:
        """Return the function that moves an accepted path's K/V to the slots of a chain."""
        return ops.committer(self) if self.layers else lambda *_: None

    @property
    def planes(self) -> list[torch.Tensor]:
        """The tensors that hold memory: K of every layer, then V of those where it is no part of K."""
        return [*self.k, *(v for v, layer in zip(self.v, self.layers, strict=True) if not layer.v_in_k)]

    @property
    def num_bytes(self) -> int:
        """Bytes held on the device."""
        return sum(plane.nbytes for plane in self.planes)

    @staticmethod
    def bytes_for(layers: Sequence[LayerShape], num_slots: int, dtype: torch.dtype) -> int:
        """Return the device bytes that a pool of these layers would take."""
        return num_slots * dtype.itemsize * sum(s.slot_size for s in layers)
