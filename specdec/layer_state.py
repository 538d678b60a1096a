"""The contract of what layers keep of a request between forwards. K/V by slot is the first kind; others go by row.

Layers write while a forward runs, each kind by a `write` of its own. What a prefill or a plain step writes counts at
once. What a round writes of the nodes it verifies counts once the round commits the accepted path; the rest is dropped.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, Protocol

import torch

# (slot_table [num_rows, width] int32, rows [bs], seq_lens [bs], accept_index [bs, W]): nodes accept_index of each
# request, -1 past the path's end, are its tokens at positions seq_lens.. from now on. int64 unless said.
Commit = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], None]


class CommitOps(Protocol):
    """The operations that a state may commit with; see `specdec.functional.ops.RoundOps`."""

    @property
    def committer(self) -> Callable[[Any], Commit]:
        """Make the commit of a KV pool."""
        ...


class LayerState(ABC):
    """State of one kind, of all layers that have it.

    State by row is [num_rows, ...] under the rows of `SlotTables`; the last is the dummy row, which padding writes. A
    prefill that begins at position 0 begins with an empty state, whatever a row held.
    commits_chains: whether an accepted chain has to be committed, too.
    """

    commits_chains: bool = True

    @abstractmethod
    def committer(self, ops: CommitOps) -> Commit:
        """Return the function that commits an accepted path, on the device and without a look at it from the host."""

    @abstractmethod
    def tensors(self, owner: str) -> dict[str, torch.Tensor]:
        """Return every tensor under a name that begins with `owner`; they stay where they are."""

    @property
    def num_bytes(self) -> int:
        """Bytes held on the device."""
        return sum(t.numel() * t.element_size() for t in self.tensors("").values())
