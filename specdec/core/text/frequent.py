"""The most frequent tokens of texts: what `EngineConfig.draft_vocab` lets a draft propose."""

from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import chain, islice
from pathlib import Path
from typing import Any

from specdec.core.text.prompt_sets import parsed

BATCH = 1000  # texts for the tokenizer at a time


def frequent_ids(tokenizer: Any, texts: str | Iterable[str], size: int) -> list[int]:
    """Return the ids of `size` tokens, ascending: the special ones, then the most frequent of `texts`, then the lowest.

    tokenizer: transformers' own, of the target. ValueError for a size that it has not as many tokens for, or that is
    not above the number of special tokens.
    """
    special = set(tokenizer.all_special_ids)
    if not len(special) < size <= len(tokenizer):
        raise ValueError(
            f"size={size}: expected more than the {len(special)} special tokens, and at most all {len(tokenizer)}"
        )
    counts: Counter[int] = Counter()
    rest = iter([texts] if isinstance(texts, str) else texts)
    while some := list(islice(rest, BATCH)):
        counts.update(chain.from_iterable(tokenizer(some, add_special_tokens=False)["input_ids"]))
    by_count = sorted(counts, key=lambda token: (-counts[token], token))
    return sorted(list(dict.fromkeys([*sorted(special), *by_count, *range(len(tokenizer))]))[:size])


def texts_of(path: Path) -> Iterator[str]:
    """Yield the texts of a file: all strings in its JSON lines (.jsonl), or else its lines. ValueError names a line
    that is not JSON."""
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            if path.suffix != ".jsonl":
                yield line
            elif line.strip():
                yield from _strings(parsed(line, f"{path}:{number}"))


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for part in value.values() if isinstance(value, dict) else value:
            yield from _strings(part)
