"""Text and bytes of single tokens, for log-probabilities."""

from collections.abc import Callable
from functools import cached_property, lru_cache
from typing import Any

from specdec.core.text.detokenizer import REPLACEMENT
from specdec.reach.grammars.vocabulary import byte_reader


class Tokens:
    """Returns the text and bytes of tokens, and caches them."""

    def __init__(self, tokenizer: Any):
        self._tokenizer = tokenizer
        self.spell = lru_cache(2**16)(self._spell)

    def _spell(self, token: int) -> tuple[str, list[int] | None]:
        """Return a token's text and UTF-8 bytes. Parts of characters have bytes if the tokenizer is a fast one."""
        text = text_of_token(self._tokenizer, token)
        if REPLACEMENT not in text:
            return text, list(text.encode())
        return text, None if self._read is None else list(self._read(self._tokenizer.convert_ids_to_tokens(token)))

    @cached_property
    def _read(self) -> Callable[[str], bytes] | None:
        backend = getattr(self._tokenizer, "backend_tokenizer", None)
        return None if backend is None else byte_reader(backend)


def text_of_token(tokenizer: Any, token: int) -> str:
    """Return the text of a token that follows others, with its leading space, which some tokenizers (Llama 2, Mistral)
    drop from the first token."""
    once = tokenizer.decode([token])
    twice = tokenizer.decode([token, token])
    return twice[len(once) :] if twice.startswith(once) and twice.endswith(once) else once
