"""Finds the K/V of a prompt's prefix that other requests have cached, or are about to write.

Recurrent layers can only resume from a cached state, see `KeptStates`. Prefills are cut where states are cached: at the
prompt's end, and where a known text, or one that waits for this one, diverges from it.
"""

from weakref import WeakValueDictionary

import numpy as np

from specdec.core.cache.pages import NO_PAGES
from specdec.core.cache.prefix import IMAGES, keys_of, num_alike
from specdec.core.cache.tables import SlotTables
from specdec.core.engine.request import Request

WORTH_WAITING = 64  # prompt tokens, whose prefill takes longer than a step without them


class Sharing:
    """Finds and keeps shared prefixes of prompts; does nothing if `slot_tables` have no prefix cache.

    looks_ahead: tokens after a position that its K/V depends on: 1 with drafts that see the next token, else 0.
    """

    def __init__(self, slot_tables: SlotTables, looks_ahead: int):
        self._tables = slot_tables
        self._looks_ahead = looks_ahead
        self._begun: WeakValueDictionary[bytes, Request] = WeakValueDictionary()  # the last one admitted, by beginning

    def cached(self, request: Request) -> np.ndarray:
        """Return the cached pages [n] int64 of the prompt's prefix: never of the whole prompt, since its last token
        always runs."""
        if not self._tables.keeps_prefixes:
            return NO_PAGES
        pages = self._tables.prefixes.find(_keys(request, request.prompt[:-1], self._looks_ahead))
        if (states := self._tables.prefixes.states) is None:
            return pages
        count, request.state = states.find(pages)
        ends = len(pages) * self._tables.page_size, request.num_to_prefill - 1
        request.stops = {end // states.step * states.step for end in ends}
        return pages[:count]

    def has_more_soon(self, request: Request, num_cached: int) -> bool:
        """Return whether a running request will prefill a longer prefix of this prompt than is cached: waiting for it
        takes a step and saves those tokens."""
        other = self._begun.get(_beginning(request)) if self._tables.keeps_prefixes else None
        if other is None or other.is_prefilled or not other.is_running:
            return False
        num_shared = num_alike(*(_keys(r, r.prompt, 0) for r in (other, request)))
        if (states := self._tables.prefixes.states) is not None:
            num_shared = (num_shared - 1) // states.step * states.step
            if num_shared <= other.num_prefilled:
                return False
        is_more = num_shared - num_cached > WORTH_WAITING
        if is_more and states is not None:
            other.stops.add(num_shared)
        return is_more

    def begin(self, request: Request) -> None:
        """Record an admitted request."""
        if self._tables.keeps_prefixes:
            self._begun[_beginning(request)] = request
            if not request.tokens:
                self._tables.prefixes.count(len(request.prompt_ids), request.num_cached)

    def keep(self, request: Request) -> None:
        """Cache the K/V of a running request's tokens, which launches so far write."""
        if self._tables.keeps_prefixes and request.is_kept:
            assert request.row is not None
            prompt = request.prompt[: len(request.prompt_ids)]
            tokens = np.concatenate([prompt, np.array(request.tokens, dtype=np.int64)])
            seen = tokens[: max(len(prompt), len(tokens) - request.num_behind)]
            self._tables.keep(request.row, _keys(request, seen, self._looks_ahead))

    def keep_state(self, request: Request) -> int | None:
        """Cache the K/V of a request's prefilled tokens, and return the place for its states after them; None if they
        are cached already, or cannot be."""
        states, end = self._tables.prefixes.states, request.num_prefilled
        if states is None or not request.is_kept or request.is_prefilled or end % states.step:
            return None
        assert request.row is not None
        keys = _keys(request, request.prompt[: end + 1], self._looks_ahead)
        self._tables.keep(request.row, keys)
        return states.take(int(self._tables.prefixes.find(keys)[-1]))


def _beginning(request: Request) -> bytes:
    """Return the beginning that prompts must have in common for one to wait for the other."""
    return _keys(request, request.prompt[: WORTH_WAITING + 1], 0).tobytes()


def _keys(request: Request, tokens: np.ndarray, looks_ahead: int) -> np.ndarray:
    """Return the `keys_of` the first `tokens` of a request, of its images those of their content."""
    if request.embedded is None:
        return keys_of(tokens, looks_ahead, request.adapter)
    keys, own = keys_of(tokens, looks_ahead, request.adapter | IMAGES), request.embedded.keys
    keys[: len(own)] += own[: len(keys)]  # modulo 2^64
    return keys
