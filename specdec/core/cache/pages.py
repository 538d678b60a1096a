"""Reference counts of the KV pool's pages, on the host. A page may have several holders; without one it is free."""

from collections.abc import Iterable

import numpy as np

NO_PAGES = np.zeros(0, dtype=np.int64)


class Pages:
    """Pages 1 to `num_pages`; page 0, the dummy page, is nobody's. Arrays of pages are [n] int64, each page once."""

    def __init__(self, num_pages: int):
        self.num_pages = num_pages
        self.holders = np.zeros(num_pages + 1, dtype=np.int32)  # how many hold each page
        self._free = np.zeros(num_pages, dtype=np.int64)  # a stack, its top at `num_free`
        self.num_free = 0
        self.repair([])

    def take(self, count: int) -> np.ndarray | None:
        """Return `count` free pages, now held by the caller; None if there are too few."""
        rest = self.num_free - count
        if rest < 0:
            return None
        pages = self._free[rest : self.num_free][::-1].copy()
        self.holders[pages] = 1
        self.num_free = rest
        return pages

    def hold(self, pages: np.ndarray) -> None:
        """Add a holder to `pages`, which have some already."""
        if len(pages):
            self.holders[pages] += 1

    def drop(self, pages: np.ndarray) -> None:
        """Drop one reference to each of `pages`; those without holders become free."""
        self.holders[pages] -= 1
        free = pages[self.holders[pages] == 0][::-1]
        self._free[self.num_free : self.num_free + len(free)] = free
        self.num_free += len(free)

    def repair(self, held: Iterable[np.ndarray]) -> None:
        """Recompute all reference counts: `held` has the pages of every holder."""
        self.holders[:] = 0
        for pages in held:
            self.holders[pages] += 1
        free = np.flatnonzero(self.holders[1:] == 0)[::-1] + 1
        self._free[: len(free)] = free
        self.num_free = len(free)

    def check_integrity(self, held: Iterable[np.ndarray]) -> None:
        """Assert that reference counts match `held`, and that a page is free exactly if it has no holder."""
        counted = np.zeros_like(self.holders)
        for pages in held:
            counted[pages] += 1
        assert counted[0] == 0 and (counted == self.holders).all(), "a page has more or fewer holders than counted"
        free = sorted(self._free[: self.num_free].tolist())
        assert free == (np.flatnonzero(counted[1:] == 0) + 1).tolist(), "a page is lost, or free and held"
