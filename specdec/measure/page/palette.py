"""One colour and one marker for each draft or mode through a page, told apart by colour-blind readers too."""

from collections.abc import Iterable

# Okabe and Ito's colours without yellow, which is too light on white
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#7A5195", "#8C6D31")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "p")
GREY = "#555555"
KNOWN = ("eagle3", "eagle", "nextn", "standalone", "lookup")  # each has the same colour on every page
PLAIN = frozenset({"plain", "plain decoding", "none"})


class Palette:
    """Colours by name; plain decoding is grey."""

    def __init__(self, names: Iterable[str]):
        own = list(dict.fromkeys(names))
        first = {_kind(name): name for name in reversed(own) if _kind(name) in KNOWN}  # of several files, the first one
        self._index = {name: KNOWN.index(kind) for kind, name in first.items()}
        free = [i for i in range(len(COLOURS)) if i not in self._index.values()]
        others = [name for name in own if name not in self._index and name not in PLAIN]
        for i, name in enumerate(others):
            self._index[name] = free[i % len(free)] if i < len(free) else len(COLOURS) + i

    def colour(self, name: str) -> str:
        """Return the colour of `name`; grey for plain decoding and for names it was not made for."""
        return COLOURS[self._index[name] % len(COLOURS)] if name in self._index else GREY

    def marker(self, name: str) -> str:
        """Return the marker of `name`."""
        index = self._index.get(name, 0)
        return MARKERS[(index + index // len(COLOURS)) % len(MARKERS)]


def _kind(name: str) -> str:
    """Return the last part of a draft's name, which is its algorithm in the shipped ones."""
    return name.rpartition(", ")[2].rpartition("-")[2]
