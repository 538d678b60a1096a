"""The prefix cache: K/V of served texts for prompts with a shared prefix, in a radix tree with a page per step.

The idea is RadixAttention's (SGLang, arXiv 2312.07104). K/V at a position depends only on the tokens up to it, and with
drafts of the EAGLE family on the next one: `keys_of` computes a key of each position from everything that its K/V
depends on besides earlier positions. The tree holds its pages beside the requests that use them, and evicts the least
recently used ones if requests need pages.
"""

import heapq
import itertools
import math
from collections.abc import Iterator

import numpy as np

from specdec.core.cache.pages import NO_PAGES, Pages

CHUNK = 64  # tokens: scans of a prefill run in chunks that divide this, so one that is cut there has equal bits
ADAPTER_BIT = 52  # first bit of the adapter in a key: above the first of two tokens
IMAGES = 1 << 10  # added to the adapter for prompts with images, whose K/V other kernels compute
EVICTED = 32  # at least 1 in 32 pages is evicted at a time, so that evictions are rare


def scored_keys(tokens: np.ndarray, adapter: int = 0) -> np.ndarray:
    """Return the keys [T] int64 of `tokens` [T] int64 that only the target has read, for scores: unlike all others."""
    return -1 - (tokens | adapter << ADAPTER_BIT)


def keys_of(tokens: np.ndarray, looks_ahead: int, adapter: int = 0) -> np.ndarray:
    """Return the keys [n-1] int64 of all positions of `tokens` [n] int64 but the last: K/V of the last emitted token is
    not written yet, and a prompt's last token always runs, for its logits.

    looks_ahead: 1 if K/V depends on the next token as well, 0 if not. adapter: its number, 0 for none.
    """
    return (tokens[:-1] << 32 | tokens[1:] if looks_ahead else tokens[:-1]) | adapter << ADAPTER_BIT


class KeptStates:
    """The cached states of recurrent layers: snapshots, the least recently used first, at places 0 to `num` - 1 after
    the rows of a `StatePool`.

    A snapshot belongs to a page of the `PrefixCache`, for the text up to the page's end, and is dropped with it.
    step: tokens between the positions where one may be taken.
    """

    def __init__(self, num: int, page_size: int):
        self.num = num
        self.step = math.lcm(CHUNK, page_size)
        self._pages = self.step // page_size
        self.clear()

    def clear(self) -> None:
        """Drop all snapshots."""
        self.places: dict[int, int] = {}  # by page, the one used last is the last
        self._free = list(range(self.num))

    def find(self, pages: np.ndarray) -> tuple[int, int | None]:
        """Return how many of `pages` [n] int64, a text's first ones, its longest snapshot covers, and its place."""
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
        """Drop the snapshots of `pages`, which are freed."""
        for page in self.places.keys() & pages.tolist():
            self._free.append(self.places.pop(page))


class Node:
    """A stretch of text: keys [n * page_size] int64 and their pages [n], n >= 1 but for the root; `used` says when.

    children: by the bytes of their first page's keys.
    """

    __slots__ = ("children", "keys", "pages", "parent", "used")

    def __init__(self, parent: "Node | None", keys: np.ndarray, pages: np.ndarray, used: int):
        self.parent, self.keys, self.pages, self.used = parent, keys, pages, used
        self.children: dict[bytes, Node] = {}


class PrefixCache:
    """The tree of one engine, with the counts of what it saved: prompt tokens asked for, and found.

    states: snapshots for some of its pages, of a model with recurrent layers.
    """

    def __init__(self, pages: Pages, page_size: int, states: KeptStates | None = None):
        self.states = states
        self._pages = pages
        self._page_size = page_size
        self._time = 0
        self.num_asked = self.num_found = 0
        self.root = Node(None, NO_PAGES, NO_PAGES, 0)

    def find(self, keys: np.ndarray) -> np.ndarray:
        """Return the pages of the longest cached prefix of `keys` [T] int64, whole pages only."""
        self._time += 1
        *_, found = self._walk(keys)
        return found

    def keep(self, keys: np.ndarray, pages: np.ndarray) -> None:
        """Keep K/V at positions of `keys` [T] int64, stored in the first of `pages`. What is kept already stays as
        it is; a last page that is not full is not kept."""
        self._time += 1
        node, same, found = self._walk(keys)
        at, end = len(found), len(keys) // self._page_size
        if at == end:
            return
        if same < len(node.pages):
            node = self._split(node, same)
        added = pages[at:end].copy()
        self._pages.hold(added)
        self._attach(Node(node, keys[at * self._page_size : end * self._page_size].copy(), added, self._time))

    def evict(self, count: int) -> None:
        """Free at least `count` of the `num_evictable` pages, the least recently used first."""
        count = max(count, self._pages.num_pages // EVICTED)
        order = itertools.count()  # of nodes used at one time: all ranks of an engine evict the same
        leaves = [(n.used, next(order), n) for n in self._nodes() if n is not self.root and not n.children]
        heapq.heapify(leaves)
        while leaves and count > 0:
            _, _, leaf = heapq.heappop(leaves)
            parent = leaf.parent
            count -= self._shorten(leaf, count)
            if not len(leaf.pages) and parent is not None and parent is not self.root and not parent.children:
                heapq.heappush(leaves, (parent.used, next(order), parent))

    def clear(self) -> None:
        """Empty the tree; running requests keep their pages."""
        held = self.held()
        self.forget()  # first: an interruption must not leave free pages in the tree
        for pages in held:
            self._pages.drop(pages)

    def forget(self) -> None:
        """Become empty without giving pages back: for `Pages.repair`."""
        self.root = Node(None, NO_PAGES, NO_PAGES, 0)
        if self.states is not None:
            self.states.clear()

    def held(self) -> list[np.ndarray]:
        """Return the pages that the tree holds, an array a node."""
        return [node.pages for node in self._nodes()]

    def count(self, num_asked: int, num_found: int) -> None:
        """Count a prompt of `num_asked` tokens, `num_found` of which were cached."""
        self.num_asked += num_asked
        self.num_found += num_found

    @property
    def num_pages(self) -> int:
        """Pages that the tree holds."""
        return sum(map(len, self.held()))

    @property
    def num_evictable(self) -> int:
        """Pages of the tree that can be freed: neither they nor their descendants have another holder."""
        return sum(self._evictable())

    def has_evictable(self, count: int) -> bool:
        """Return whether `count` pages can be freed, without counting all of them."""
        return any(total >= count for total in itertools.accumulate(self._evictable()))

    def _evictable(self) -> Iterator[int]:
        """Yield how many pages of a node can be freed, for one after the other."""
        gone = set[Node]()
        for node in reversed(list(self._nodes())):  # children first
            if gone.issuperset(node.children.values()):
                yield (num := len(node.pages) - self._num_held(node))
                if num == len(node.pages):
                    gone.add(node)

    def _walk(self, keys: np.ndarray) -> tuple[Node, int, np.ndarray]:
        """Return the last node that `keys` reach, how many of its pages they share, and the pages of all they share."""
        size, node, same = self._page_size, self.root, 0
        found = [NO_PAGES]
        while same == len(node.pages):
            child = node.children.get(keys[:size].tobytes())
            if child is None:
                break
            node, same = child, num_alike(child.keys, keys) // size
            node.used = self._time
            found.append(node.pages[:same])
            keys = keys[same * size :]
        return node, same, np.concatenate(found)

    def _split(self, node: Node, at: int) -> Node:
        """Divide `node` after its first `at` pages; return the first part."""
        size = self._page_size
        first = Node(node.parent, node.keys[: at * size], node.pages[:at], node.used)
        node.parent, node.keys, node.pages = first, node.keys[at * size :], node.pages[at:]
        self._attach(node)
        self._attach(first)
        return first

    def _attach(self, node: Node) -> None:
        assert node.parent is not None
        node.parent.children[self._key(node)] = node

    def _key(self, node: Node) -> bytes:
        return node.keys[: self._page_size].tobytes()

    def _shorten(self, leaf: Node, count: int) -> int:
        """Free up to `count` of the last pages of `leaf`, and drop a leaf without pages; return how many."""
        first = max(self._num_held(leaf), len(leaf.pages) - count)
        freed, key = leaf.pages[first:], self._key(leaf)
        leaf.keys, leaf.pages = leaf.keys[: first * self._page_size], leaf.pages[:first]
        self._pages.drop(freed)
        if self.states is not None:
            self.states.drop(freed)
        if first == 0 and leaf.parent is not None:
            del leaf.parent.children[key]
        return len(freed)

    def _num_held(self, node: Node) -> int:
        """Return how many first pages of `node` must stay: others hold the last of them."""
        is_shared = np.flatnonzero(self._pages.holders[node.pages] > 1)
        return int(is_shared[-1]) + 1 if len(is_shared) else 0

    def _nodes(self) -> Iterator[Node]:
        """Yield all nodes, the root first."""
        waiting = [self.root]
        while waiting:
            node = waiting.pop()
            yield node
            waiting += node.children.values()


def num_alike(a: np.ndarray, b: np.ndarray) -> int:
    """Return how many first elements of `a` and `b` are equal."""
    size = min(len(a), len(b))
    differ = a[:size] != b[:size]
    return int(differ.argmax()) if differ.any() else size
