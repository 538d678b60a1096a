"""What requests share whose prompts begin alike: K/V that others have left, or are about to write."""

from weakref import WeakValueDictionary

import numpy as np

from specdec.config import EngineConfig
from specdec.engine.needs import Draft
from specdec.engine.request import Request
from specdec.heads.base import DraftHead
from specdec.kv_cache import SlotTables
from specdec.pages import NO_PAGES
from specdec.prefix_cache import keys_of, num_alike
from specdec.targets.hf import HFTarget

WORTH_WAITING = 64  # prompt tokens, whose prefill takes longer than a step without them


def keeps_prefixes(config: EngineConfig, target: HFTarget, draft: Draft | None) -> bool:
    """Return whether K/V of what was served can serve others, if it is wanted; ValueError if it must be and cannot."""
    reasons = []
    for what, model in (("target", target), ("draft", draft)):
        if isinstance(model, HFTarget) and model.spec.recurrent:
            reasons.append(f"the {what} has recurrent layers, whose state is not kept by token")
    if isinstance(draft, DraftHead) and draft.num_modules > 1:
        reasons.append(f"the draft has {draft.num_modules} modules that read each other's last states")
    if config.prefix_cache is True and reasons:
        raise ValueError(f"prefix_cache=True: {'; '.join(reasons)}; leave prefix_cache out")
    return config.prefix_cache is not False and not reasons


class Sharing:
    """Does nothing where `slot_tables` keep no prefixes.

    looks_ahead: K/V at a position depends on so many tokens after it: 1 with drafts that see the next token, or 0.
    """

    def __init__(self, slot_tables: SlotTables, looks_ahead: int):
        self._tables = slot_tables
        self._looks_ahead = looks_ahead
        self._begun: WeakValueDictionary[bytes, Request] = WeakValueDictionary()  # the last one admitted that began so

    def cached(self, request: Request) -> np.ndarray:
        """Return the pages [n] int64 of the prompt's beginning that are there: never those of all of it, for its last
        token is read in any case."""
        prefixes = self._tables.prefixes
        return NO_PAGES if prefixes is None else prefixes.find(keys_of(request.prompt[:-1], self._looks_ahead))

    def has_more_soon(self, request: Request, num_cached: int) -> bool:
        """Whether a running request is to be prefilled whose prompt begins as this one does, further than what is
        cached: to wait for it takes a step, and saves those tokens."""
        other = self._begun.get(_beginning(request))
        if other is None or other.is_prefilled or not other.is_running:
            return False
        return num_alike(other.prompt[:-1], request.prompt[:-1]) - num_cached > WORTH_WAITING

    def begin(self, request: Request) -> None:
        """Take note of a request that has been admitted."""
        if self._tables.prefixes is not None:
            self._begun[_beginning(request)] = request
            self._tables.prefixes.count(len(request.prompt_ids), request.num_cached)

    def keep(self, request: Request) -> None:
        """Keep the K/V of a running request's tokens; the launches that write it have been made."""
        if self._tables.prefixes is not None and request.is_kept:
            assert request.row is not None
            tokens = np.concatenate([request.prompt[:-1], np.array(request.tokens, dtype=np.int64)])
            self._tables.keep(request.row, keys_of(tokens, self._looks_ahead))


def _beginning(request: Request) -> bytes:
    """What prompts must have in common for one to wait for the other."""
    return request.prompt[:WORTH_WAITING].tobytes()
