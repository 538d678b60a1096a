"""Reads prompt files (JSON lines) and renders their questions with a chat template; tells tokenizers apart."""

import hashlib
import json
from pathlib import Path
from typing import Any

from specdec.text.inputs import ids_of_chat

QUESTION_KEYS = ("turns", "question", "prompt")


def read_questions(path: str | Path, limit: int | None = None) -> list[str]:
    """First user turn of every line: `turns[0]`, `question` or `prompt`. ValueError names a line without one."""
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
    """Token ids of every question as the single user turn of a chat, ready for the answer."""
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
    """SHA-256 of the vocabulary, special tokens included: equal where every id means the same token."""
    entries = sorted((index, token) for token, index in tokenizer.get_vocab().items())
    return hashlib.sha256(json.dumps(entries).encode("utf-8")).hexdigest()
