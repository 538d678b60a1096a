"""The slot tables of running requests: which pages of the K/V pool each row has. Knows no model and no algorithm.

Slot = page * page_size + offset. Page 0 is the dummy page: padding writes there and nothing reads it.
"""

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from specdec.core.batch import to_device
from specdec.core.cache.pages import NO_PAGES, Pages
from specdec.core.cache.prefix import KeptStates, PrefixCache
from specdec.core.errors import CapacityError


def write_pages(table: torch.Tensor, rows: torch.Tensor, pages: torch.Tensor, page_size: int) -> None:
    """Write the slots of `pages` [n, P] to rows [n] of table [num_rows, width] int32, slot 0 past them; both int64."""
    slots = (pages.unsqueeze(2) * page_size + torch.arange(page_size, device=pages.device)).flatten(1)
    missing = table.shape[1] - slots.shape[1]  # negative: the end of a last page that no position reaches
    table.index_copy_(0, rows, torch.nn.functional.pad(slots, (0, missing)).to(table.dtype))


class SlotTables:
    """The slots of each running request: `table` [max_running + 1, width] int32 on the device, pages on the host.

    A row is reserved with the slots that its request needs now; `write` tells the device. It grows between rounds, so
    nothing is allocated inside one. The last row is the dummy row: it names slot 0 and is never reserved. A row's first
    pages may be those of others: `prefixes` has what ended requests left, if that is kept (`keeps_prefixes`), and what
    scored texts have in common.

    A released row keeps its old table. That is safe: a round in flight may still write through it, but it was launched
    before the pages were free, so before anything of their next owner, on the same stream; no later launch names the
    row until it is reserved again, and `write` replaces its table as a whole.
    """

    def __init__(
        self,
        max_running: int,
        width: int,
        num_slots: int,
        page_size: int,
        device: torch.device,
        keeps_prefixes: bool = False,
        states: KeptStates | None = None,
    ):
        self.page_size = page_size
        self.num_pages = num_slots // page_size
        self.max_running = max_running
        self.table = torch.zeros(max_running + 1, width, dtype=torch.int32, device=device)
        self._pages = Pages(self.num_pages)
        self.keeps_prefixes = keeps_prefixes
        self.prefixes = PrefixCache(self._pages, page_size, states)
        self._of_row: dict[int, np.ndarray] = {}  # row -> its pages, in order of position
        self._free_rows: list[int] = []
        self.repair([])

    @property
    def total_slots(self) -> int:
        """Slots a pool must have: all pages and the dummy page."""
        return self.slots_for(self.num_pages * self.page_size, self.page_size)

    @staticmethod
    def slots_for(num_slots: int, page_size: int) -> int:
        """Slots a pool must have for `num_slots` of its own: whole pages of them and the dummy page."""
        return (num_slots // page_size + 1) * page_size

    def pages_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.page_size)

    @property
    def most_tokens(self) -> int:
        """The most slots that one request can have."""
        return min(self.num_pages * self.page_size, self.table.shape[1])

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

    def reserve(self, num_tokens: int, shared: np.ndarray = NO_PAGES, spare: int = 0) -> int | None:
        """Reserve a row with slots for `num_tokens` tokens, the first in pages `shared` [n] int64, which others hold;
        None if rows or pages have run out. spare: pages that must be left."""
        if not self._free_rows:
            return None
        self._pages.hold(shared)  # first, so that making room does not take them
        own = self._take(self.pages_for(num_tokens) - len(shared), spare)
        if own is None:
            self._pages.drop(shared)
            return None
        row = self._free_rows.pop()
        self._of_row[row] = np.concatenate([shared, own]) if len(shared) else own
        return row

    def num_slots(self, row: int) -> int:
        """Return the slots that a reserved `row` has."""
        return len(self._of_row[row]) * self.page_size

    def grow(self, wanted: Mapping[int, int]) -> bool:
        """Give reserved rows slots for as many tokens as `wanted` says, and tell the device, in one copy; False, with
        nothing changed, if there are too few pages."""
        counts = [max(0, self.pages_for(num) - len(self._of_row[row])) for row, num in wanted.items()]
        pages = self._take(sum(counts))
        if pages is None:
            return False
        added = dict(zip(wanted, np.split(pages, np.cumsum(counts)[:-1]), strict=True))
        width, offsets = self.table.shape[1], np.arange(self.page_size)
        places, slots = [], []
        for row, own in added.items():
            new = (own[:, None] * self.page_size + offsets).reshape(-1)[: width - self.num_slots(row)]
            slots.append(new)
            places.append(row * width + self.num_slots(row) + np.arange(len(new)))
        there = to_device(
            torch.from_numpy(np.stack([np.concatenate(places), np.concatenate(slots)])), self.table.device
        )
        self.table.view(-1).index_copy_(0, there[0], there[1].to(self.table.dtype))
        self._of_row |= {row: np.concatenate([self._of_row[row], own]) for row, own in added.items()}
        return True

    def _take(self, count: int, spare: int = 0) -> np.ndarray | None:
        """Return `count` pages, evicting cached ones if necessary; None, with nothing changed, if `count` and `spare`
        are not available."""
        missing = count - self._pages.num_free
        if missing + spare > 0 and not self.prefixes.has_evictable(missing + spare):
            return None
        if missing > 0:
            self.prefixes.evict(missing)
        return self._pages.take(count)

    def release(self, row: int) -> None:
        """Free a row, and those of its pages that have no other holder."""
        self._pages.drop(self._of_row.pop(row))
        self._free_rows.append(row)

    def keep(self, row: int, keys: np.ndarray) -> None:
        """Cache K/V of the first positions of a reserved `row` for shared prefixes; keys: see `PrefixCache`."""
        self.prefixes.keep(keys, self._of_row[row])

    def pages_of(self, rows: Sequence[int]) -> np.ndarray:
        """Pages of reserved `rows`, [n, longest] int64; the shorter are filled up with the dummy page."""
        found = [self._of_row[row] for row in rows]
        pages = np.zeros((len(found), max(map(len, found))), dtype=np.int64)
        for line, own in zip(pages, found, strict=True):
            line[: len(own)] = own
        return pages

    def write(self, rows: torch.Tensor, pages: torch.Tensor) -> None:
        """Tell the device: reserved `rows` [n] int64 use `pages` [n, P] int64, see `pages_of`."""
        write_pages(self.table, rows, pages, self.page_size)

    def repair(self, rows: Sequence[int]) -> None:
        """Free everything that is not held by one of the reserved `rows`, and empty the prefix cache."""
        self._of_row = {row: self._of_row[row] for row in rows}
        self._free_rows = [row for row in reversed(range(self.max_running)) if row not in self._of_row]
        self.prefixes.forget()
        self._pages.repair(self._of_row.values())

    @property
    def num_free_rows(self) -> int:
        return len(self._free_rows)

    @property
    def num_free_pages(self) -> int:
        """Pages that no row holds; cached ones count as free, since they can be evicted."""
        return self._pages.num_free + self.prefixes.num_evictable

    @property
    def prefix_facts(self) -> dict[str, int]:
        """Return the contents of `Report.prefix_cache`."""
        cache = self.prefixes
        if not self.keeps_prefixes:
            return {}
        facts = {"kept": cache.num_pages * self.page_size, "asked": cache.num_asked, "found": cache.num_found}
        return facts if cache.states is None else {**facts, "states": len(cache.states.places)}

    def check_integrity(self) -> None:
        """Assert the invariants: every page but page 0 is free or held by those that count as its holders, and the
        tables of reserved rows and of the dummy row name their pages."""
        held, states = self.prefixes.held(), self.prefixes.states
        self._pages.check_integrity([*self._of_row.values(), *held])
        assert states is None or states.places.keys() <= set(np.concatenate(held).tolist()), "a state has no page"
        assert sorted([*self._of_row, *self._free_rows]) == list(range(self.max_running)), "a row is lost or doubled"
        for row in (*self._of_row, self.max_running):
            pages = self.table[row].unique() // self.page_size
            expected = set(self._of_row[row].tolist()) if row in self._of_row else set()
            assert set(pages.unique().tolist()) - {0} == expected, f"slot table of row {row} names foreign pages"
