"""Matchers of llguidance (extra "grammar"): Earley parsing over lazily built lexers, so that compiling takes a ms."""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

import llguidance
import numpy as np
from llguidance.gbnf_to_lark import any_to_lark

from specdec.core.grammar.grammar import Grammar
from specdec.reach.grammars.vocabulary import Vocabulary

ONE_LINE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
LENGTHS = ("{1,3}", "{1,6}", "{1,10}", "{1,16}", "{1,30}", "+")
# A schema that asks for more raises an error at once; these limits allow about a tenth of a second of work.
LIMITS = {
    "initial_lexer_fuel": 2_000_000,
    "max_grammar_size": 200_000,
    "max_items_in_row": 10_000,
    "verbose_errors": False,
}
# Tokens that a mask takes in one go where all of them may come. With the library's own lengths, 10 and 30: masks
# of strings with a maxLength take a third longer.
SLICES = [r"[\x20\x0A\x0D\x09]+", *(r'[^"\\\x00-\x1F\x7F]' + length for length in LENGTHS)]

# A rule of GBNF named `start`, as the library's Lark calls `root`; not in a string, a class or a comment.
START = re.compile(r'("(?:\\.|[^"\\])*"|\[(?:\\.|[^]\\])*\]|#.*)|(?<![\w-])start(?![\w-])')
CODE = re.compile(r"\\(?:u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|.)")  # an escape of GBNF


class LLGuidance:
    """Compiles grammars for one vocabulary."""

    def __init__(self, vocabulary: Vocabulary):
        tokens = llguidance.TokenizerWrapper(_Tokens(vocabulary))
        self._tokenizer = llguidance.LLTokenizer(tokens, eos_token=sorted(vocabulary.eos_ids), slices=SLICES)
        self._limits = llguidance.LLParserLimits(**LIMITS)

    def compile(self, grammar: Grammar) -> "Compiled":
        """Compile `grammar`; ValueError names its kind and the library's error."""
        try:
            source = source_of(grammar)
        except Exception as error:  # GBNF is converted in Python, and its errors have no type of their own
            raise ValueError(f"{grammar.kind}: {error}") from None
        matcher = llguidance.LLMatcher(self._tokenizer, source, log_level=0, limits=self._limits)
        if matcher.is_error():
            raise ValueError(f"{grammar.kind}: {matcher.get_error().strip()[:500]}")
        return Compiled(matcher)


class _Tokens:
    """The interface that `llguidance.TokenizerWrapper` expects of a tokenizer."""

    bos_token_id = None

    def __init__(self, vocabulary: Vocabulary):
        self.tokens, self.special_token_ids = vocabulary.tokens, vocabulary.special_ids
        self.eos_token_id = min(vocabulary.eos_ids)
        self._encode = vocabulary.encode

    def __call__(self, text: str) -> list[int]:
        if not isinstance(text, str):
            raise TypeError("text, not bytes")  # the library finds out in this way that it must pass bytes
        return self._encode(text)


class Compiled:
    """A grammar, as a matcher that is copied: its lexer grows with use, and copies share it."""

    def __init__(self, matcher: llguidance.LLMatcher):
        self._matcher = matcher
        self._beginning: dict[int, list[int]] = {}

    def matcher(self) -> "LLGMatcher":
        return LLGMatcher(self._matcher.deep_copy(), self._beginning)


class LLGMatcher:
    """See `specdec.core.grammar.matcher.Matcher`. beginning: the forced tokens at each place of a text, while all of it
    is forced; shared by all texts of a grammar.

    The library (1.9.1) keeps its last mask, and after a rollback may return it for another state. So a matcher returns
    to a copy from before such masks instead of rolling back over them, and otherwise computes masks in copies.
    """

    def __init__(self, matcher: llguidance.LLMatcher, beginning: dict[int, list[int]] | None):
        self.library = matcher
        self._beginning = beginning
        self._forced: list[list[int] | None] = [None]  # after every accepted token; None: not known
        self._before: llguidance.LLMatcher | None = None  # a copy from before the last masks of a chain
        self._since: list[int] = []  # tokens accepted since

    def fill(self, mask: np.ndarray) -> bool:
        return self._fill(mask, mask.__array_interface__["data"][0], by_copy=True)

    def _fill(self, mask: np.ndarray, address: int, by_copy: bool = False) -> bool:
        """See `fill`; address: of the mask, since reading it takes 1.5 µs."""
        if forced := self.forced():  # a mask of one token; the library would parse the forced text again
            mask.fill(0)
            mask.view(np.uint32)[forced[0] // 32] = 1 << forced[0] % 32
            return True
        library = self.library.deep_copy() if by_copy else self.library
        library.unsafe_compute_mask_ptr(address, mask.nbytes)
        if library.is_error():
            self.library = library
        return not library.is_stopped() or (not library.is_error() and bool(np.count_nonzero(mask)))

    def accept(self, token: int) -> bool:
        if self.library.try_consume_tokens([token]) != 1:
            return False
        self._since.append(token)
        known = self._forced[-1]
        if known and known[0] == token:
            self._forced.append(known[1:] or None)
        else:
            self._forced.append(None)
            self._beginning = None
        return True

    def take(self, tokens: Sequence[int]) -> int:
        # Where text is forced, masks allow its canonical tokens only; the library accepts any tokenization of it.
        for count, token in enumerate(tokens):
            forced = self.forced()
            if (forced and forced[0] != token) or not self.accept(token):
                return count
        return len(tokens)

    def fill_chain(self, tokens: Sequence[int], masks: np.ndarray, known: Mapping[int, np.ndarray]) -> int:
        self._before = None
        address, step = masks.__array_interface__["data"][0], masks.strides[0]
        for count, (mask, token) in enumerate(zip(masks, (*tokens, None), strict=False)):
            if count in known:
                mask[:] = known[count]
            else:
                if count and self._before is None and not self.forced():
                    self._before, self._since = self.library.deep_copy(), []
                if not self._fill(mask, address + count * step):
                    mask.fill(-1)
                    return count
            if token is None or not self.accept(token):
                return count
        raise AssertionError("more tokens than masks")

    def rollback(self, num: int) -> None:
        del self._forced[len(self._forced) - num :]
        if self._before is not None:
            kept = self._since[: max(0, len(self._since) - num)]
            self.library, num, self._before = self._before, num - len(self._since), None
            self.library.try_consume_tokens(kept)
        if num > 0:
            self.library.rollback(num)

    def forced(self) -> list[int]:
        # Token by token: a forced text is parsed once, which takes as long as a mask.
        known = self._forced[-1]
        if known is None:
            place, shared = len(self._forced), self._beginning
            known = shared.get(place) if shared else None
            if known is None:
                # It is known at once whether bytes are forced; computing their tokens takes as long as a mask.
                known = self.library.compute_ff_tokens() if self.library.compute_ff_bytes() else []
                if shared is not None:
                    shared[place] = known
            self._forced[-1] = known
        return known

    @property
    def error(self) -> str:
        return self.library.get_error().partition("\n")[0][:500]


def source_of(grammar: Grammar) -> str:
    """Return the grammar in the library's own format."""
    value: Any = grammar.value
    overrides: Any = {"whitespace_flexible": True} if grammar.any_whitespace else ONE_LINE
    if grammar.kind == "json_object":
        value = {"type": "object"}
    if grammar.kind in ("json", "json_object"):
        return llguidance.LLMatcher.grammar_from_json_schema(json.dumps(_schema(value)), overrides=overrides)
    if grammar.kind == "regex":
        return llguidance.LLMatcher.grammar_from_regex(value)
    if grammar.kind == "choice":
        value = "start: CHOICE\nCHOICE: " + " | ".join(map(json.dumps, value))  # one item of the parser instead of many
    if grammar.kind == "ebnf":
        if re.search(r"(?m)^\s*start\s*::=", value):
            value = START.sub(lambda m: m[1] or "specdec-start", value)
        value = any_to_lark(CODE.sub(_character, value))
    if grammar.kind == "structural_tag":
        tags = [_tag(part, value["triggers"], overrides) for part in value["structures"]]
        return llguidance.StructTag.to_grammar(tags, assume_special=False)
    return llguidance.LLMatcher.grammar_from_lark(value)


def _character(escape: re.Match[str]) -> str:
    """Return an escape as Lark text: the library (1.9.1) drops the zeros of \\u00e9."""
    digits = escape[1] or escape[2]
    code = int(digits, 16) if digits else -1
    if not 0 <= code < 0x110000 or 0xD800 <= code < 0xE000:
        return escape[0]
    return f"\\x{code:02x}" if code < 0x80 else chr(code)


def _schema(value: Any) -> Mapping[str, Any]:
    """Return a schema as an object, to which options can be added."""
    return value if isinstance(value, Mapping) else ({} if value else {"allOf": [False]})


def _tag(part: Mapping[str, Any], triggers: list[str], options: Mapping[str, Any]) -> llguidance.StructTag:
    trigger = min((t for t in triggers if part["begin"].startswith(t)), key=len)  # a longer one would never be matched
    schema = {**_schema(part["schema"]), "x-guidance": options}
    return llguidance.StructTag(trigger=trigger, begin=part["begin"], grammar=schema, end=part["end"])
