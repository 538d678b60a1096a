"""Prompt files and the named sets of other benchmarks: where a set's file lies, and what its lines must look like.

A question is the user's turns of one conversation; the answers in between are the model's. Nothing is downloaded.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

QUESTION_KEYS = ("turns", "question", "prompt")
# SPEED-Bench's published files have this in the place of texts that may not be redistributed.
PLACEHOLDER = "FULL BENCHMARK DATA SHOULD BE FETCHED FROM THE SOURCE"


class Question(NamedTuple):
    """turns: what the user says, in order, at least one; category: where the set has any; record: the whole line."""

    turns: tuple[str, ...]
    category: str | None
    record: Mapping[str, Any]


class FileLayout(NamedTuple):
    """files: where the file may lie under the data folder, the first that exists counts; turns: what the user says in a
    line, None where it is not of this form; expects: the form in words."""

    files: tuple[str, ...]
    turns: Callable[[Mapping[str, Any]], Any]
    expects: str


def read_set(name: str, data: str | Path, limit: int | None = None) -> list[Question]:
    """Read the set called `name` from its file under the folder `data`, `limit` questions at most.

    ValueError says which file or line was wrong, and what was expected.
    """
    layouts = sets()
    if name not in layouts:
        raise ValueError(f"prompt set {name!r}: expected one of {sorted(layouts)}, or a file of JSON lines")
    layout, folder = layouts[name], Path(data)
    file = next((folder / f for f in layout.files if (folder / f).is_file()), None)
    if file is None:
        raise ValueError(
            f"prompt set {name!r}: none of its files in {str(data)!r}; expected one of {', '.join(layout.files)}: "
            f"{layout.expects}"
        )
    return list(_questions(file, layout, limit))


def read_file(path: str | Path, limit: int | None = None) -> list[Question]:
    """Return the questions of a file of JSON lines, the first user turn of each: `turns[0]`, `question` or `prompt`."""
    file = Path(path)
    if not file.is_file():
        raise ValueError(f"prompt file {str(path)!r}: no such file; expected JSON lines with one of {QUESTION_KEYS}")
    layout = FileLayout((), _any_turns, f"one of {QUESTION_KEYS}")
    return [q._replace(turns=q.turns[:1]) for q in _questions(file, layout, limit)]


def sets() -> Mapping[str, FileLayout]:
    """Return the layouts of all sets by name."""
    return {
        "gsm8k": FileLayout(
            ("gsm8k/test.jsonl", "gsm8k.jsonl", "prompts/gsm8k.jsonl"),
            _any_turns,
            "JSON lines with `question` (and `answer`), as openai/grade-school-math has them",
        ),
        "mt_bench": FileLayout(
            ("prompts/mt_bench.jsonl", "mt_bench/question.jsonl", "mt_bench.jsonl", "question.jsonl"),
            lambda record: turns if len(turns := _listed(record)) == 2 else None,
            "JSON lines with `turns`, a list of two strings, as FastChat's mt_bench/question.jsonl has them",
        ),
        "humaneval": FileLayout(
            ("prompts/humaneval.jsonl", "humaneval/HumanEval.jsonl", "HumanEval.jsonl", "humaneval.jsonl"),
            _any_turns,
            "JSON lines with `prompt`, as openai/human-eval has them, or with `turns`",
        ),
        "spec_bench": FileLayout(
            ("spec_bench/question.jsonl", "spec_bench.jsonl", "prompts/spec_bench.jsonl", "question.jsonl"),
            lambda record: _listed(record) if "category" in record else None,
            "JSON lines with `question_id`, `category` and `turns` (a list of strings), as in hemingkx/Spec-Bench",
        ),
        "speed_bench": FileLayout(
            (
                *("speed_bench/qualitative.jsonl", "speed-bench/qualitative.jsonl", "speed_bench.jsonl"),
                *("prompts/speed_bench.jsonl", "qualitative.jsonl"),
            ),
            _speed_bench_turns,
            "JSON lines with `category` and `turns` (a list of strings) or `messages`, as nvidia/SPEED-Bench has them "
            "after its prepare.py has filled in the texts",
        ),
        "sharegpt": FileLayout(
            (
                *("sharegpt/ShareGPT_V3_unfiltered_cleaned_split.json", "ShareGPT_V3_unfiltered_cleaned_split.json"),
                *("sharegpt.json", "sharegpt.jsonl", "prompts/sharegpt.jsonl"),
            ),
            _sharegpt_turns,
            "a JSON list or JSON lines with `conversations`: [{'from': 'human', 'value': ...}, ...]",
        ),
    }


def _questions(file: Path, layout: FileLayout, limit: int | None) -> Iterator[Question]:
    """Yield the questions of `file`; ValueError names a line that does not have the layout's form."""
    count = 0
    for place, record in records(file):
        turns = layout.turns(record) if isinstance(record, dict) else None
        if not turns or not all(isinstance(t, str) and t.strip() for t in turns):
            raise ValueError(f"{place}: not a prompt ({_found(record, turns)}); expected {layout.expects}")
        if any(t.startswith(PLACEHOLDER) for t in turns):
            raise ValueError(f"{place}: its text was left out by the publisher ({PLACEHOLDER!r}); {layout.expects}")
        category = record.get("category")
        yield Question(tuple(turns), None if category is None else str(category), record)
        count += 1
        if count == limit:
            return
    if not count:
        raise ValueError(f"prompt file {str(file)!r} holds no prompts; expected {layout.expects}")


def _found(record: Any, turns: Any) -> str:
    """Describe a line that is not a prompt."""
    if turns:
        return f"a turn is empty or no text: {turns!r}"[:80]
    return f"none of {QUESTION_KEYS} in {sorted(record)}" if isinstance(record, dict) else repr(record)[:80]


def records(file: Path) -> Iterator[tuple[str, Any]]:
    """Yield each record of JSON lines, or of one JSON list, with its place for messages."""
    try:
        text = file.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{file}: expected UTF-8 text ({error}); save it as UTF-8") from error
    if text.lstrip().startswith("["):
        yield from ((f"{file}, item {i}", record) for i, record in enumerate(parsed(text, str(file)), 1))
        return
    for number, line in enumerate(text.split("\n"), 1):  # not splitlines: JSON strings may hold U+2028
        if line.strip():
            place = f"{file}:{number}"
            yield place, parsed(line, place)


def parsed(text: str, place: str) -> Any:
    """Return the JSON of `text`; ValueError names `place` if it is none."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:  # also of numbers of thousands of digits
        raise ValueError(f"{place}: not JSON ({error})") from error


def _listed(record: Mapping[str, Any]) -> Sequence[Any]:
    turns = record.get("turns")
    return turns if isinstance(turns, list) else ()


def _any_turns(record: Mapping[str, Any]) -> Sequence[Any] | None:
    """Return what stands under the first of `QUESTION_KEYS`: one string or several turns."""
    found = next((record[k] for k in QUESTION_KEYS if k in record), None)
    return [found] if isinstance(found, str) else found if isinstance(found, list) else None


def _speed_bench_turns(record: Mapping[str, Any]) -> Sequence[Any] | None:
    if "category" not in record:
        return None
    if isinstance(messages := record.get("messages"), list):
        return [m.get("content") for m in messages if isinstance(m, dict) and m.get("role") == "user"]
    return _listed(record) or _any_turns(record)


def _sharegpt_turns(record: Mapping[str, Any]) -> Sequence[Any] | None:
    """Return the first thing the human says: what follows answers another model's text."""
    said = record.get("conversations")
    if not isinstance(said, list) or not all(isinstance(s, dict) for s in said):
        return None
    human = (s.get("value", s.get("content")) for s in said if s.get("from", s.get("role")) in ("human", "user"))
    return [next(human, None)]
