"""Which states of recurrent layers are kept for prompts that begin alike: snapshots at ends of pages, least recently
used first. The states themselves lie behind the rows of a `StatePool`.
"""

import math

import numpy as np

CHUNK = 64  # tokens: scans of a prefill run in chunks that divide this, so a prefill that is cut there has equal bits


class KeptStates:
    """Places 0 to `num` - 1 of snapshots. A snapshot belongs to a page of the `PrefixCache`, which stands for the text
    up to its end, and leaves with it. step: tokens between the positions where one may be taken.
    """

    def __init__(self, num: int, page_size: int):
        self.num = num
        self.step = math.lcm(CHUNK, page_size)
        self._pages = self.step // page_size
        self.clear()

    def clear(self) -> None:
        """Keep none."""
        self.places: dict[int, int] = {}  # by page, the one used last is the last
        self._free = list(range(self.num))

    def find(self, pages: np.ndarray) -> tuple[int, int | None]:
        """Return how many of `pages` [n] int64, a text's first ones, its last snapshot is for, and its place."""
        for count in range(len(pages) // self._pages * self._pages, 0, -self._pages):
            page = int(pages[count - 1])
            if page in self.places:
                self.places[page] = place = self.places.pop(page)
                return count, place
        return 0, None

    def take(self, page: int) -> int | None:
        """Return the place for a snapshot of `page`; None if there is one already."""
        if page in self.places:
            self.places[page] = self.places.pop(page)
            return None
        place = self._free.pop() if self._free else self.places.pop(next(iter(self.places)))
        self.places[page] = place
        return place

    def drop(self, pages: np.ndarray) -> None:
        """Forget the snapshots of `pages`, which are free for other texts now."""
        for page in self.places.keys() & pages.tolist():
            self._free.append(self.places.pop(page))
