"""Result files of measurements: one JSON each with command, versions, commit and rows.

Absolute paths of the machine are cut to their last part.
"""

import json
import platform
import re
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from itertools import count
from pathlib import Path
from typing import Any

import torch
import transformers

from specdec import __version__
from specdec.reach.checkpoints.replacing import check_place, write_text

ABSOLUTE = re.compile(r"(?<![\w.:/-])/(?P<top>[\w.+-]+)(?:/[\w.+-]+)*/?")


class ResultFile:
    """`<what>_<shape>_<gpu>_<date>.json` of a run, rewritten as rows arrive.

    An existing file belongs to another run and is left alone: `-2`, `-3`, … are added to the name, in which "/" becomes
    "-". Readers never see a partial file. path: None until the first `write`, and always if `folder` is None: then
    nothing is written.
    """

    def __init__(self, folder: str | Path | None, what: str, shape: str, config: dict[str, Any]):
        if folder is not None:
            check_place(Path(folder, what))  # now, before the first row is measured
        self.path: Path | None = None
        self._folder, self._what, self._shape = folder, what, shape
        self._config = config  # written in its state at that time: its lists may grow
        self._about: dict[str, Any] | None = None

    @property
    def name(self) -> str | None:
        """The file's path, for a JSON line."""
        return str(self.path) if self.path else None

    def write(self, rows: Sequence[Any]) -> None:
        """Write the command, versions, config and all `rows` so far."""
        if self._folder is None:
            return
        self._about = self._about or about()
        record = without_paths({**self._about, "config": self._config, "rows": list(rows)})
        content = json.dumps(record, indent=1) + "\n"  # before a file is created: rows that are not JSON leave none
        if self.path is None:
            stem = f"{self._what}_{self._shape}_{self._about['gpu']}_{datetime.now(UTC):%Y-%m-%d}"
            self.path = _new_file(Path(self._folder), stem.replace("/", "-"))
        write_text(self.path, content)


def write_results(folder: str | Path, what: str, shape: str, config: dict[str, Any], rows: Sequence[Any]) -> Path:
    """Write all rows of a run at once; return the path. See `ResultFile`."""
    file = ResultFile(folder, what, shape, config)
    file.write(rows)
    assert file.path is not None
    return file.path


def about() -> dict[str, Any]:
    """Return the facts of a run that every record has: command, versions, gpu, and the commit if known."""
    has_gpu, commit = torch.cuda.is_available(), _commit()
    return {
        "command": shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]]),
        "versions": {
            **{"python": platform.python_version(), "torch": torch.__version__},
            **{"transformers": transformers.__version__, "specdec": __version__},
        },
        "gpu": torch.cuda.get_device_name().lower().replace(" ", "-") if has_gpu else "cpu",
        **({"commit": commit} if commit else {}),
    }


def without_paths(value: Any) -> Any:
    """Return `value` (JSON values or paths) with every absolute path of this machine cut to its last part."""
    if isinstance(value, str | Path):
        return ABSOLUTE.sub(_last_part, str(value))
    if isinstance(value, Mapping):
        return {name: without_paths(one) for name, one in value.items()}
    return [without_paths(one) for one in value] if isinstance(value, list | tuple) else value


def _last_part(found: re.Match[str]) -> str:
    """Return the last part of a path whose first folder exists here; URLs such as "/v1/models" stay."""
    whole = found.group()
    return Path(whole).name if Path("/", found["top"]).is_dir() else whole


def _commit() -> str | None:
    """Return the short hash of the checkout of this program, with "+" if files differ; None outside a checkout."""
    own = Path(__file__).resolve()
    run: dict[str, Any] = {"cwd": own.parent, "capture_output": True, "text": True, "timeout": 10, "check": True}
    try:
        subprocess.run(["git", "ls-files", "--error-unmatch", own.name], **run)  # fails for environments in a checkout
        found = subprocess.run(["git", "describe", "--always", "--exclude=*", "--dirty=+"], **run)
    except (OSError, subprocess.SubprocessError):
        return None
    return str(found.stdout).strip()


def _new_file(folder: Path, stem: str) -> Path:
    """Create an empty file of that name, or of the first free numbered one; concurrent runs never share one."""
    folder.mkdir(parents=True, exist_ok=True)
    for number in count(1):
        path = folder / (f"{stem}.json" if number == 1 else f"{stem}-{number}.json")
        try:
            path.touch(exist_ok=False)
            break
        except FileExistsError:
            continue
    return path
