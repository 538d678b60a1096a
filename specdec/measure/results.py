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


class ResultFile:
    """`<what>_<shape>_<gpu>_<date>.json` of a run, written as often as rows come in; its page is rendered on leaving.

    An existing file belongs to another run and is left alone: `-2`, `-3`, … are added to the name. No reader ever sees
    half a file. A page that cannot be rendered is a line on stderr. path: None until the first `write`, and for good
    if `folder` is None: then nothing is written.
    """

    def __init__(self, folder: str | Path | None, what: str, shape: str, config: dict[str, Any]):
        self.path: Path | None = None
        self._folder = folder
        self._what, self._shape = what, shape
        self._config = config  # written as it is then: its lists may grow
        self._about: dict[str, Any] | None = None

    def __enter__(self) -> "ResultFile":
        return self

    def __exit__(self, *_: object) -> None:
        if self.path is not None:
            _write_page_beside(self.path)

    @property
    def name(self) -> str | None:
        """The file's path, for a JSON line."""
        return str(self.path) if self.path else None

    def write(self, rows: Sequence[Any]) -> None:
        """Write the command, versions, config and all `rows` so far."""
        if self._folder is None:
            return
        self._about = self._about or provenance.about()
        record = provenance.without_paths({**self._about, "config": self._config, "rows": list(rows)})
        text = json.dumps(record, indent=1) + "\n"  # before a file is made: rows that cannot be serialised leave none
        if self.path is None:
            stem = f"{self._what}_{self._shape}_{self._about['gpu']}_{datetime.now(UTC):%Y-%m-%d}"
            self.path = _new_file(Path(self._folder), stem)
        half = self.path.with_name(f".{self.path.name}.part")
        half.write_text(text, "utf-8")
        half.replace(self.path)


def write_results(folder: str | Path, what: str, shape: str, config: dict[str, Any], rows: Sequence[Any]) -> Path:
    """Write all rows of a run at once, and the page; return the path. See `ResultFile`."""
    with ResultFile(folder, what, shape, config) as file:
        file.write(rows)
    assert file.path is not None
    return file.path


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
