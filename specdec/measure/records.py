"""Result files as they are read back: of any age, with whatever they say about themselves."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Record:
    """A result file: its stem, its rows, and what it says about them (command, versions, gpu, commit, config, …)."""

    name: str
    rows: list[dict[str, Any]]
    about: dict[str, Any]


def read_record(path: str | Path) -> Record:
    """Read a result file. ValueError says what is wrong with another file."""
    file = Path(path)
    if not file.is_file():
        raise ValueError(f"result file {str(path)!r}: no such file; expected JSON that a `specdec bench` command wrote")
    try:
        found = json.loads(file.read_text("utf-8"))
    except ValueError as error:
        raise ValueError(f"result file {str(path)!r}: not JSON ({error})") from error
    if not isinstance(found, dict) or not isinstance(found.get("rows"), list):
        raise ValueError(f"result file {str(path)!r}: expected an object with a list of 'rows', as write_results makes")
    rows = [row if isinstance(row, dict) else {"value": row} for row in found.pop("rows")]
    return Record(file.stem, rows, found)
