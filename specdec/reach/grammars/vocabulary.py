"""The bytes of every token of a tokenizer, as grammar matchers need them."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType
from typing import Any

MOST_ENCODED = 2**14  # most texts forced by grammars whose tokens are cached


@dataclass(frozen=True)
class Vocabulary:
    """tokens: the bytes of ids 0..V-1, for special ones their names; special_ids: ids that are never text.

    encode: maps a text that continues another to ids without special tokens; results are cached, since grammars force
    the same texts again and again. eos_ids: ids that end a text.
    """

    tokens: list[bytes]
    special_ids: list[int]
    eos_ids: frozenset[int]
    encode: Callable[[str], list[int]]

    @classmethod
    def of(cls, tokenizer: Any, vocab_size: int, eos_ids: frozenset[int]) -> "Vocabulary":
        """Read a fast tokenizer of transformers; ids that it does not have, up to the model's V, are special.

        ValueError for slow tokenizers, whose tokens' bytes are unknown.
        """
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if backend is None:
            raise ValueError(
                f"grammar: {type(tokenizer).__name__} does not say which bytes its tokens stand for: load a fast "
                "tokenizer (use_fast=True)"
            )
        own = type(backend).from_str(backend.to_str())
        own.no_padding()
        own.no_truncation()
        own.encode_special_tokens = True  # the name of a special token, within a text, is text
        read = byte_reader(own)
        added = {i: t for i, t in tokenizer.added_tokens_decoder.items() if i < vocab_size}
        names = tokenizer.convert_ids_to_tokens(list(range(min(vocab_size, len(tokenizer)))))
        tokens = [str(added[i]).encode() if i in added else read(name or "") for i, name in enumerate(names)]
        unknown = range(len(tokens), vocab_size)
        special = [*(i for i, token in added.items() if token.special), *unknown]
        tokens += [f"<|unknown {i}|>".encode() for i in unknown]
        return cls(tokens, special, eos_ids, lru_cache(MOST_ENCODED)(_Encoder(own, tokens)))


class _Encoder:
    """Encodes text that continues another, so that the tokens spell exactly its bytes; tokenizers that prepend a space
    or normalise do not ensure that."""

    def __init__(self, tokenizer: Any, tokens: list[bytes]):
        self._tokenizer, self._tokens = tokenizer, tokens
        self._by_byte = {token: i for i, token in enumerate(tokens) if len(token) == 1}

    def __call__(self, text: str) -> list[int]:
        data = text.encode()
        for before in ("", "\n"):
            ids = self._tokenizer.encode(before + text, add_special_tokens=False).ids
            for skip in range(min(4, len(ids)) if before else 1):  # the line break, a space before it
                if b"".join(self._tokens[i] for i in ids[skip:]) == data:
                    return ids[skip:]
        return [self._by_byte[data[i : i + 1]] for i in range(len(data))]


def byte_reader(backend: Any) -> Callable[[str], bytes]:
    """Return a function from names of tokens to their bytes; backend: a tokenizer of `tokenizers`."""
    return _byte_level if "ByteLevel" in _kinds_of(json.loads(backend.to_str())) else _spm


def _kinds_of(described: dict[str, Any]) -> set[str]:
    """Return the types of all pre-tokenizers and decoders of a tokenizer's description."""
    found: set[str] = set()
    parts = [described.get("pre_tokenizer"), described.get("decoder")]
    while parts:
        part = parts.pop() or {}
        found.add(part.get("type", ""))
        parts += [*part.get("pretokenizers", ()), *part.get("decoders", ())]
    return found


def _byte_names() -> dict[str, int]:
    """Return the byte of each character of byte-level BPE (GPT-2): printable ones stay, others follow U+0100."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [b for b in range(256) if b not in printable]
    return {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(others)}


_BYTES = MappingProxyType(_byte_names())


def _byte_level(name: str) -> bytes:
    return bytes(_BYTES[c] for c in name) if all(c in _BYTES for c in name) else name.encode()


def _spm(name: str) -> bytes:
    """SentencePiece: U+2581 is a space, <0x0A> a byte."""
    if len(name) == 6 and name.startswith("<0x") and name.endswith(">"):
        return bytes([int(name[3:5], 16)])
    return name.replace("\u2581", " ").encode()
