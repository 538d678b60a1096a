"""Result files of measurements: one JSON each, with the command, versions and rows, and a page beside it."""

import json
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from functools import cache
from itertools import count
from pathlib import Path
from typing import Any

from specdec.measure import provenance
from specdec.measure.page.libraries import missing_libraries
from specdec.measure.page.page import write_page
from specdec.measure.records import read_record


def write_results(
    folder: str | Path,
    what: str,
    shape: str,
    config: dict[str, Any],
    rows: Sequence[Any],
    path: Path | None = None,
    *,
    page: bool = True,
) -> Path:
    """Write `<what>_<shape>_<gpu>_<date>.json` with the command, versions and rows; return its path.

    An existing file belongs to another run and is left alone: `-2`, `-3`, … are added to the name. A run that writes
    several times passes as `path` what the first call returned. No reader ever sees half a file.
    page: also render `<same stem>.html`, which takes seconds; a run that writes again soon leaves it to its last call.
    A page that cannot be rendered is a line on stderr, and the JSON file is there before.
    """
    gpu = provenance.gpu_name()
    about = {"command": provenance.command(), "versions": provenance.versions(), "gpu": gpu, "config": config}
    commit = provenance.commit()
    record = provenance.without_paths({**about, **({"commit": commit} if commit else {}), "rows": list(rows)})
    text = json.dumps(record, indent=1) + "\n"  # before a file is created: rows that cannot be serialised leave none
    if path is None:
        path = _new_file(Path(folder), f"{what}_{shape}_{gpu}_{datetime.now(UTC):%Y-%m-%d}")
    half = path.with_name(f".{path.name}.part")
    half.write_text(text, "utf-8")
    half.replace(path)
    if page:
        _write_page_beside(path)
    return path


def _write_page_beside(path: Path) -> None:
    missing = missing_libraries()
    if missing:
        _tell(f"no page beside the results: {missing}")
        return
    try:
        write_page([read_record(path)], path.with_suffix(".html"))
    except Exception as error:  # the measurement is what counts, and it is on disk
        print(f"no page beside {path.name}: {type(error).__name__}: {error}", file=sys.stderr)


@cache
def _tell(line: str) -> None:
    """Print `line` on stderr, once in a process."""
    print(line, file=sys.stderr)


def _new_file(folder: Path, stem: str) -> Path:
    """Create an empty file of that name, or of the first free numbered one; two runs at once never share one."""
    folder.mkdir(parents=True, exist_ok=True)
    for number in count(1):
        path = folder / (f"{stem}.json" if number == 1 else f"{stem}-{number}.json")
        try:
            path.touch(exist_ok=False)
            break
        except FileExistsError:
            continue
    return path
