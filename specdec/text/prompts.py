"""Reads prompt files (JSON lines), renders their questions with a chat template, and fingerprints tokenizers."""

import hashlib
import json
from pathlib import Path
from typing import Any

from specdec.text.inputs import ids_of_chat

QUESTION_KEYS = ("turns", "question", "prompt")


def read_questions(path: str | Path, limit: int | None = None) -> list[str]:
    """Return each line's first user turn: `turns[0]`, `question` or `prompt`. ValueError names a line without one."""
    file = Path(path)
    if not file.is_file():
        raise ValueError(f"prompt file {str(path)!r}: no such file; expected JSON lines with one of {QUESTION_KEYS}")
    questions = []
    for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1):
        if line.strip():
            questions.append(_question(line, file, number))
    if not questions:
        raise ValueError(f"prompt file {str(path)!r} holds no prompts")
    return questions[:limit]


def chat_ids(questions: list[str], tokenizer: Any) -> list[list[int]]:
    """Return token ids of every question as the single user turn of a chat, with the generation prompt."""
    return [ids_of_chat([{"role": "user", "content": q}], tokenizer) for q in questions]


def _question(line: str, file: Path, number: int) -> str:
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{file.name}:{number}: not JSON ({error})") from error
    found = next((record[k] for k in QUESTION_KEYS if k in record), None)
    if found is None:
        raise ValueError(f"{file.name}:{number}: none of {QUESTION_KEYS} in {sorted(record)}")
    return found[0] if isinstance(found, list) else found


def tokenizer_fingerprint(tokenizer: Any) -> str:
    """Return the SHA-256 of the vocabulary, special tokens included: equal where every id means the same token."""
    entries = sorted((index, token) for token, index in tokenizer.get_vocab().items())
    return hashlib.sha256(json.dumps(entries).encode("utf-8")).hexdigest()
