"""The contracts of matchers, and a request's constraint: which tokens may follow at each node of its tree.

A mask is a bitmask of the vocabulary: bit t % 32 of word t // 32, int32, is set where token t is allowed.
"""

from collections.abc import Mapping, Sequence, Set
from typing import Protocol

import numpy as np

from specdec.core.grammar.grammar import Grammar

NUM_MASKED = 8  # rounds with masks after one where the target chose a token that the grammar forbids


class Matcher(Protocol):
    """Follows one text through a compiled grammar, a token at a time."""

    def fill(self, mask: np.ndarray) -> bool:
        """Write the allowed next tokens to mask [W] int32, EOS ids where the text may end; return False if none is."""

    def accept(self, token: int) -> bool:
        """Accept a token, not an EOS id, if the grammar allows it; return whether it does."""

    def take(self, tokens: Sequence[int]) -> int:
        """Accept `tokens`, none of them an EOS id, up to the first that a mask forbids; return how many."""

    def fill_chain(self, tokens: Sequence[int], masks: np.ndarray, known: Mapping[int, np.ndarray]) -> int:
        """Write the allowed next tokens to masks[0], then accept one of `tokens`, none of them an EOS id, and so on, up
        to the first that the grammar forbids; return how many were accepted. A mask [W] without an allowed token allows
        all. known: masks by their place."""

    def rollback(self, num: int) -> None:
        """Take back the last `num` tokens."""

    def forced(self) -> list[int]:
        """Return the canonical tokens of the grammar's only continuation, all allowed by it; none if it has several."""

    @property
    def error(self) -> str:
        """Why it cannot follow the text any further, such as a limit of the library; empty if it can."""


class CompiledGrammar(Protocol):
    """A grammar for one vocabulary."""

    def matcher(self) -> Matcher:
        """Return a matcher at the beginning of a text."""


class Compiler(Protocol):
    """Compiles grammars for one vocabulary and keeps them by their text. Threads may share it."""

    @property
    def eos_ids(self) -> Set[int]:
        """Tokens that masks allow where a text may end."""

    def compile(self, grammar: Grammar) -> CompiledGrammar:
        """ValueError if the grammar is invalid, or has what the library does not support."""


class Constraint:
    """A request's matcher, after the tokens that it has emitted. eos_ids: of the request, where they are the
    library's (`library_eos`) or not. num_words: W of its masks. num_before_eos: tokens that its law wants before them:
    a text that is complete earlier cannot go on.

    is_trusted: whether its next greedy tokens may be chosen without masks and checked once they are here: the grammar
    does not force several, and the target has not chosen what it forbids of late, without masks or but for them.
    """

    def __init__(
        self, matcher: Matcher, eos_ids: Set[int], library_eos: Set[int], num_words: int, num_before_eos: int = 0
    ):
        self.matcher = matcher
        self.eos_ids = eos_ids
        self.is_trusted = False
        self._num_words = num_words
        self._num_before_eos = num_before_eos
        self._num_masked = 0  # rounds with masks to come
        self._choices: np.ndarray | None = None  # see `fill_chain`
        self._ahead: list[int] = []  # what the matcher has taken after its text, since a round may emit it
        self._ends = {*eos_ids, *library_eos}
        self._foreign = [] if eos_ids == library_eos else [sorted(library_eos), sorted(eos_ids)]
        self._guide: tuple[list[int], np.ndarray] | None = None  # forced tokens, and the mask after them

    def foresee(self, tokens: Sequence[int], parents: Sequence[int]) -> None:
        """Follow a tree [D] along each node's first child, so that less is left to do once choices are known."""
        node, drafted = 0, list[int]()
        for child in range(1, len(tokens)):
            if parents[child] == node and tokens[child] not in self._ends:
                node = child
                drafted.append(tokens[child])
        self._follow(drafted)

    def fill_choices(
        self, tokens: Sequence[int], parents: Sequence[int], choices: Sequence[int], masks: np.ndarray
    ) -> bool:
        """Write what `fill_tree` writes only where a greedy choice is forbidden, and below; return whether one is.

        choices [D]: each node's token of the largest logit. Masks [D, W] that are left out allow all: the node's choice
        is the same, as long as the path that greedy verification takes was allowed up to there.
        """
        path = [0]
        for node in range(1, len(tokens)):  # children come after their parents
            if parents[node] == path[-1] and tokens[node] == choices[path[-1]]:
                path.append(node)
        chosen = [choices[node] for node in path]
        num_allowed = self._follow(chosen[: _end(chosen, self._ends)])
        if num_allowed == len(chosen):
            return False
        self.mistrust()
        self._visit(path[num_allowed], tokens, _children(parents), masks, num_allowed)
        return True

    def fill_tree(self, tokens: Sequence[int], parents: Sequence[int], masks: np.ndarray) -> None:
        """Write the tokens that may follow each node to masks [D, W] int32, by the node's own path.

        tokens, parents [D]: of a `Tree`. A node that the grammar forbids keeps its old mask: it is never accepted. A
        node after which nothing may come allows all: `advance` ends the text there.
        """
        self._rewind()
        self._visit(0, tokens, _children(parents), masks)

    def _visit(
        self, node: int, tokens: Sequence[int], children: list[list[int]], masks: np.ndarray, depth: int = 0
    ) -> None:
        mask = masks[node]
        if node == 0 and self._guide is not None and not self._guide[0]:
            mask[:] = self._guide[1]
        elif not self._fill(mask, depth):
            mask.fill(-1)
            return
        for child in children[node]:
            if tokens[child] not in self.eos_ids and self.matcher.accept(tokens[child]):
                self._visit(child, tokens, children, masks, depth + 1)
                self.matcher.rollback(1)

    def fill_chain(self, tokens: Sequence[int], masks: np.ndarray, choices: np.ndarray | None = None) -> None:
        """Fill masks as `fill_tree` does, of a chain; the matcher stays ahead by the tokens that it accepts.

        choices [D]: what nodes choose without masks, if that will be known when `advance` takes what the round emits.
        """
        self._choices = choices
        if self._foreign or self._num_before_eos > 0:
            return self.fill_tree(tokens, [0, *range(len(tokens) - 1)], masks)
        self._rewind()
        drafts = list(tokens[1:])
        end = _end(drafts, self._ends)
        known = {}
        if self._guide is not None and drafts[: len(self._guide[0])] == self._guide[0]:
            known[len(self._guide[0])] = self._guide[1]
        taken = self.matcher.fill_chain(drafts[:end], masks, known)
        self._ahead = drafts[:taken]

    def advance(self, tokens: Sequence[int], is_masked: bool = True) -> int:
        """Take emitted tokens, up to EOS; return how many the grammar allows. is_masked: they were chosen under masks,
        so that there are fewer at a dead end only, see `error`."""
        self._guide = None
        count = self._rewind(tokens if is_masked else ())
        self._ahead = []
        if is_masked:
            while count < len(tokens) and (tokens[count] in self.eos_ids or self.matcher.accept(tokens[count])):
                count += 1
            self._num_masked -= self._num_masked > 0
            if self._choices is not None and self._choices[: len(tokens)].tolist() != [*tokens]:
                self.mistrust()
        else:
            end = _end(tokens, self.eos_ids)
            count = self.matcher.take(tokens[:end])
            if count == end < len(tokens) and self._may_end(tokens[end]):
                count += 1
            if count < len(tokens):
                self.mistrust()
        self._choices = None
        self._num_before_eos -= count
        self.is_trusted = not self._num_masked and not self.is_forced
        return count

    def mistrust(self) -> None:
        """Use masks in later rounds, since the target chose a forbidden token."""
        self._num_masked = NUM_MASKED

    def _may_end(self, eos: int) -> bool:
        mask = np.zeros(self._num_words, np.int32)
        return self._fill(mask, 0) and is_allowed(mask, eos)

    def _rewind(self, tokens: Sequence[int] = ()) -> int:
        """Take back what the matcher is ahead, from where it is not `tokens`; return how many of them are left."""
        common = 0
        for token, taken in zip(tokens, self._ahead, strict=False):
            if token != taken:
                break
            common += 1
        if common < len(self._ahead):
            self.matcher.rollback(len(self._ahead) - common)
            del self._ahead[common:]
        return common

    def _follow(self, tokens: Sequence[int]) -> int:
        """Advance the matcher by `tokens`, none of them an EOS id, as far as masks allow; return how many."""
        common = self._rewind(tokens)
        count = common + self.matcher.take(tokens[common:])
        self._ahead += tokens[common:count]
        return count

    @property
    def error(self) -> str:
        """Why its text cannot go on."""
        reason = self.matcher.error or "but EOS, which min_new_tokens bans" * (self._num_before_eos > 0)
        return f"its grammar allows no token after this text{reason and f' ({reason})'}"

    @property
    def is_forced(self) -> bool:
        """True if several tokens are forced after those that the matcher has accepted."""
        return len(self.matcher.forced()) > 1

    def forced(self, num_steps: int) -> list[int]:
        """Return up to `num_steps` tokens that the grammar forces."""
        self._rewind()
        return self.matcher.forced()[:num_steps]

    def fill_next(self, forced: Sequence[int], mask: np.ndarray) -> None:
        """Write what may follow `forced` tokens to mask [W]; the matcher stays ahead by them."""
        self._follow(forced)
        if not self._fill(mask, len(forced)):
            mask.fill(-1)
        self._guide = [*forced], mask.copy()

    def _fill(self, mask: np.ndarray, depth: int) -> bool:
        """Write the mask after `depth` more tokens, with the request's EOS ids; return whether its law leaves one."""
        if not self.matcher.fill(mask):
            return False
        self._rename(mask)
        if depth >= self._num_before_eos:
            return True
        others = mask.copy()
        for token in self.eos_ids:
            _set(others, token, False)
        return bool(others.any())

    def _rename(self, mask: np.ndarray) -> None:
        """Allow the request's EOS ids in place of the library's."""
        if self._foreign and is_allowed(mask, self._foreign[0][0]):
            for ids, is_set in zip(self._foreign, (False, True), strict=True):
                for token in ids:
                    _set(mask, token, is_set)


def _end(tokens: Sequence[int], ends: Set[int]) -> int:
    """Return where the first of `ends` is in `tokens`, their number if none is."""
    return len(tokens) if ends.isdisjoint(tokens) else next(i for i, token in enumerate(tokens) if token in ends)


def _children(parents: Sequence[int]) -> list[list[int]]:
    children: list[list[int]] = [[] for _ in parents]
    for node, parent in enumerate(parents[1:], 1):
        children[parent].append(node)
    return children


def _set(mask: np.ndarray, token: int, is_set: bool) -> None:
    bit = np.int32(np.uint32(1 << token % 32).view(np.int32))
    mask[token // 32] = mask[token // 32] | bit if is_set else mask[token // 32] & ~bit


def is_allowed(mask: np.ndarray, token: int) -> bool:
    return bool(int(mask[token // 32]) >> token % 32 & 1)
