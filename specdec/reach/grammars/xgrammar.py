"""Matchers of xgrammar (extra "xgrammar"): pushdown automata whose masks are prepared when a grammar is compiled."""

import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import torch
import xgrammar

from specdec.core.grammar.grammar import Grammar
from specdec.reach.grammars.vocabulary import Vocabulary

ONE_LINE = {"any_whitespace": False, "separators": (", ", ": ")}


class XGrammar:
    """Compiles grammars for one vocabulary."""

    def __init__(self, vocabulary: Vocabulary):
        self._vocabulary, self._encode = vocabulary, vocabulary.encode
        special = self._special = frozenset(vocabulary.special_ids)
        # The library takes a special token's name for its text, which users do not see; it never accepts empty tokens.
        self._compiler = self._compiler_of([b"" if i in special else t for i, t in enumerate(vocabulary.tokens)])

    @cached_property
    def _lark_compiler(self) -> Any:
        """Return a compiler that knows special tokens by name and id."""
        return self._compiler_of(self._vocabulary.tokens)

    def _compiler_of(self, tokens: list[bytes]) -> Any:
        ends = sorted(self._vocabulary.eos_ids)
        info = xgrammar.TokenizerInfo(tokens, xgrammar.VocabType.RAW, vocab_size=len(tokens), stop_token_ids=ends)
        return xgrammar.GrammarCompiler(info, cache_enabled=False)  # `CachedCompiler` keeps them

    def compile(self, grammar: Grammar) -> "Compiled":
        """Compile `grammar`; ValueError names its kind and the library's error."""
        try:
            refused = frozenset[int]() if grammar.kind == "lark" else self._special
            return Compiled(self._compile(grammar), self._encode, refused)
        except (RuntimeError, ValueError) as error:
            raise ValueError(f"{grammar.kind}: {str(error).strip()[:500]}") from None

    def _compile(self, grammar: Grammar) -> Any:
        compiler, value = self._compiler, grammar.value
        if grammar.kind in ("json", "json_object"):
            schema = {"type": "object"} if grammar.kind == "json_object" else value
            spaces: Any = {"any_whitespace": True} if grammar.any_whitespace else ONE_LINE
            return compiler.compile_json_schema(json.dumps(schema), strict_mode=False, **spaces)
        if grammar.kind == "regex":
            return compiler.compile_regex(value)
        if grammar.kind == "lark":
            return self._lark_compiler.compile_lark(value)
        if grammar.kind == "structural_tag":
            own = [{**part, "schema": json.dumps(part["schema"])} for part in value["structures"]]
            tags = [xgrammar.StructuralTagItem(**part) for part in own]
            return compiler.compile_structural_tag(tags, value["triggers"])
        ebnf = "root ::= " + " | ".join(map(json.dumps, value)) if grammar.kind == "choice" else value
        return compiler.compile_grammar(ebnf)


class Compiled:
    """A compiled grammar. refused: tokens that it never allows, about which the library would warn."""

    def __init__(self, compiled: Any, encode: Any, refused: frozenset[int]):
        self._compiled, self._encode, self._refused = compiled, encode, refused

    def matcher(self) -> "XGMatcher":
        return XGMatcher(xgrammar.GrammarMatcher(self._compiled), self._encode, self._refused)


class XGMatcher:
    """See `specdec.core.grammar.matcher.Matcher`."""

    error = ""

    def __init__(self, matcher: Any, encode: Any, refused: frozenset[int]):
        self._matcher, self._encode, self._refused = matcher, encode, refused

    def fill(self, mask: np.ndarray) -> bool:
        self._matcher.fill_next_token_bitmask(torch.from_numpy(mask).unsqueeze(0))
        return bool(mask.any())

    def accept(self, token: int) -> bool:
        return token not in self._refused and self._matcher.accept_token(token)

    def take(self, tokens: Sequence[int]) -> int:
        return next((i for i, token in enumerate(tokens) if not self.accept(token)), len(tokens))

    def fill_chain(self, tokens: Sequence[int], masks: np.ndarray, known: Mapping[int, np.ndarray]) -> int:
        for count, (mask, token) in enumerate(zip(masks, (*tokens, None), strict=False)):
            if count in known:
                mask[:] = known[count]
            elif not self.fill(mask):
                mask.fill(-1)
                return count
            if token is None or not self.accept(token):
                return count
        raise AssertionError("more tokens than masks")

    def rollback(self, num: int) -> None:
        self._matcher.rollback(num)

    def forced(self) -> list[int]:
        text = self._matcher.find_jump_forward_string()
        forced = self._encode(text) if text else []
        if taken := self.take(forced):
            self.rollback(taken)
        return forced[:taken]
