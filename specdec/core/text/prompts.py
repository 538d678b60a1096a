"""Renders questions with a chat template; fingerprints of tokenizers, templates and prompts."""

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from specdec.core.text.inputs import ids_of_chat
from specdec.core.text.prompt_sets import read_file

SHA_CHARS = 16  # of a hexadecimal SHA-256: enough to tell files apart, short enough for a table


def read_questions(path: str | Path, limit: int | None = None) -> list[str]:
    """Return each line's first user turn: `turns[0]`, `question` or `prompt`. ValueError names a line without one."""
    return [question.turns[0] for question in read_file(path, limit)]


def chat_ids(questions: list[str], tokenizer: Any) -> list[list[int]]:
    """Return token ids of every question as the single user turn of a chat, with the generation prompt."""
    return [ids_of_chat([{"role": "user", "content": q}], tokenizer) for q in questions]


def tokenizer_fingerprint(tokenizer: Any) -> str:
    """Return the SHA-256 of the vocabulary, special tokens included: equal where every id means the same token."""
    entries = sorted((index, token) for token, index in tokenizer.get_vocab().items())
    return hashlib.sha256(json.dumps(entries).encode("utf-8")).hexdigest()


def tokenizer_match(ours: Any, theirs: Any) -> str | None:
    """Describe how the target's and a draft's tokenizers differ; "equal" if they do not, None if one is missing."""
    if ours is None or theirs is None:
        return None
    a, b = ours.get_vocab(), theirs.get_vocab()
    differing = sorted({*a.items()} ^ {*b.items()}, key=lambda item: (item[1], item[0]))
    if not differing:
        return "equal"
    token, index = differing[0]
    return f"{len(differing)} entries differ, first {token!r} = {index}"


def ids_sha(ids: Sequence[Sequence[int]]) -> str:
    """Return a prefix of the SHA-256 of token ids: equal where two runs were asked the same."""
    return _sha(json.dumps([list(map(int, row)) for row in ids]))


def template_sha(tokenizer: Any) -> str | None:
    """Return a prefix of the SHA-256 of the tokenizer's chat template; None if there is none."""
    template = getattr(tokenizer, "chat_template", None)
    if not template:
        return None
    return _sha(template if isinstance(template, str) else json.dumps(template, sort_keys=True))


def thinking_of(tokenizer: Any) -> str:
    """Return whether prompts ask for thinking: only templates that know `enable_thinking` can, and it is never passed,
    so that theirs is the template's own default."""
    template = str(getattr(tokenizer, "chat_template", None) or "")
    return "enable_thinking not passed: the template's default" if "enable_thinking" in template else "not applicable"


def _sha(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8")).hexdigest()[:SHA_CHARS]
