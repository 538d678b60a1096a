"""The paged KV pool, the slot tables of running requests, and who owns which page. Knows no model and no algorithm.

Slot = page * page_size + offset. Page 0 is the dummy page: padding writes there and nobody reads it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from specdec.batch import to_device
from specdec.errors import CapacityError


@dataclass(frozen=True)
class LayerShape:
    """K/V shape of one attention layer: heads, head dims (elements)."""

    num_kv_heads: int
    qk_dim: int
    v_dim: int


class KVPool:
    """K and V of every layer: k[layer] is [num_slots, Hkv, qk_dim], v[layer] is [num_slots, Hkv, v_dim]."""

    def __init__(self, layers: Sequence[LayerShape], num_slots: int, dtype: torch.dtype, device: torch.device):
        def zeros(heads: int, dim: int) -> torch.Tensor:
            return torch.zeros(num_slots, heads, dim, dtype=dtype, device=device)

        self.k = [zeros(s.num_kv_heads, s.qk_dim) for s in layers]
        self.v = [zeros(s.num_kv_heads, s.v_dim) for s in layers]

    def write(self, layer: int, slots: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """Store k [T, Hkv, qk_dim] and v [T, Hkv, v_dim] at `slots` [T] int64."""
        self.k[layer].index_copy_(0, slots, k)
        self.v[layer].index_copy_(0, slots, v)

    def move(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """Copy K/V of every layer from slots `source` [N] to slots `target` [N]; all reads happen before the writes."""
        for cache in (*self.k, *self.v):
            cache.index_copy_(0, target, cache.index_select(0, source))

    def tensors(self, owner: str) -> dict[str, torch.Tensor]:
        """Every cache under a name that says whose it is."""
        named = {"k": self.k, "v": self.v}
        return {f"{owner} {kind}[{i}]": t for kind, caches in named.items() for i, t in enumerate(caches)}

    @property
    def num_slots(self) -> int:
        """Slots, the dummy page's included."""
        return self.k[0].shape[0]

    @property
    def num_bytes(self) -> int:
        """Bytes held on the device."""
        return sum(t.numel() * t.element_size() for t in (*self.k, *self.v))

    @staticmethod
    def bytes_for(layers: Sequence[LayerShape], num_slots: int, dtype: torch.dtype) -> int:
        """Bytes that a pool of these layers would hold."""
        return num_slots * dtype.itemsize * sum(s.num_kv_heads * (s.qk_dim + s.v_dim) for s in layers)


class SlotTables:
    """Which slots each running request owns: `table` [max_batch + 1, width] int32 on the device, ownership on the host.

    A row is taken with all the slots its request may ever need, so nothing is allocated inside a round and no
    running request can be starved by another. The last row is the dummy row: it names slot 0 and nobody takes it.
    """

    def __init__(self, max_batch: int, width: int, num_slots: int, page_size: int, device: torch.device):
        self.page_size = page_size
        self.num_pages = num_slots // page_size
        self.max_batch = max_batch
        self.table = torch.zeros(max_batch + 1, width, dtype=torch.int32, device=device)
        self._free_rows = list(range(max_batch))[::-1]
        self._free_pages = list(range(1, self.num_pages + 1))[::-1]
        self._owned: dict[int, list[int]] = {}

    @property
    def total_slots(self) -> int:
        """Slots a pool must have: all pages and the dummy page."""
        return self.slots_for(self.num_pages * self.page_size, self.page_size)

    @staticmethod
    def slots_for(num_slots: int, page_size: int) -> int:
        """Slots a pool must have for `num_slots` of its own: whole pages of them and the dummy page."""
        return (num_slots // page_size + 1) * page_size

    def check_pool(self, pool: KVPool) -> None:
        """Raise ValueError if these tables can name slots that `pool` does not have."""
        if pool.num_slots < self.total_slots:
            raise ValueError(
                f"slot tables of {self.num_pages} pages of {self.page_size} name slots up to {self.total_slots - 1}, "
                f"the pool has {pool.num_slots} slots; make it with num_slots={self.total_slots} or more"
            )

    def pages_for(self, num_tokens: int) -> int:
        """Pages that hold `num_tokens` tokens."""
        return -(-num_tokens // self.page_size)

    def check_fits(self, num_tokens: int) -> None:
        """Raise CapacityError if a request of `num_tokens` slots could not run even alone."""
        if self.pages_for(num_tokens) > self.num_pages:
            raise CapacityError(
                f"the request needs {num_tokens} KV slots, the pool has {self.num_pages * self.page_size}; "
                "shorten the prompt, lower max_new_tokens, or attach with a larger num_slots"
            )
        if num_tokens > self.table.shape[1]:
            raise CapacityError(
                f"the request needs {num_tokens} positions, a slot table has {self.table.shape[1]}; "
                "shorten the prompt, lower max_new_tokens, or attach with a larger max_seq_len"
            )

    def try_take(self, num_tokens: int) -> int | None:
        """Give a row whose first `num_tokens` positions own slots, or None while rows or pages are short."""
        need = self.pages_for(num_tokens)
        if not self._free_rows or need > len(self._free_pages):
            return None
        row = self._free_rows.pop()
        pages = [self._free_pages.pop() for _ in range(need)]
        self._owned[row] = pages
        base = torch.tensor(pages, dtype=torch.int64).unsqueeze(1) * self.page_size
        slots = (base + torch.arange(self.page_size)).reshape(-1)[: self.table.shape[1]]
        self.table[row].zero_()
        self.table[row, : slots.numel()] = to_device(slots, self.table.device)
        return row

    def release(self, row: int) -> None:
        """Return a row and its pages."""
        self._free_pages.extend(reversed(self._owned.pop(row)))
        self._free_rows.append(row)
        self.table[row].zero_()

    @property
    def num_free_rows(self) -> int:
        """Rows nobody holds."""
        return len(self._free_rows)

    @property
    def num_free_pages(self) -> int:
        """Pages nobody owns."""
        return len(self._free_pages)

    def check_integrity(self) -> None:
        """Assert the invariant: every page but page 0 is free or owned by exactly one row, and tables say the same."""
        owned = [p for pages in self._owned.values() for p in pages]
        everything = sorted(owned + self._free_pages)
        assert everything == list(range(1, self.num_pages + 1)), "a page is lost or owned twice"
        assert sorted([*self._owned, *self._free_rows]) == list(range(self.max_batch)), "a row is lost or doubled"
        for row in range(self.max_batch + 1):
            pages = self.table[row].unique() // self.page_size
            expected = set(self._owned.get(row, []))
            assert set(pages.unique().tolist()) - {0} == expected, f"slot table of row {row} names foreign pages"
