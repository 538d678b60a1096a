"""Result files of measurements: one JSON each, with the command, versions and rows."""

import json
import platform
import shlex
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from itertools import count
from pathlib import Path
from typing import Any

import torch
import transformers


def write_results(
    folder: str | Path,
    what: str,
    shape: str,
    config: dict[str, Any],
    rows: Sequence[Any],
    path: Path | None = None,
) -> Path:
    """Write `<what>_<shape>_<gpu>_<date>.json` with the command, versions and rows; return its path.

    An existing file belongs to another run and is left alone: `-2`, `-3`, … are added to the name. A run that writes
    several times passes as `path` what the first call returned. No reader ever sees half a file.
    """
    gpu = torch.cuda.get_device_name().lower().replace(" ", "-") if torch.cuda.is_available() else "cpu"
    versions = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
    command = shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]])
    record = {"command": command, "versions": versions, "gpu": gpu, "config": config, "rows": list(rows)}
    text = json.dumps(record, indent=1) + "\n"  # before a file is created: rows that cannot be serialised leave none
    if path is None:
        path = _new_file(Path(folder), f"{what}_{shape}_{gpu}_{datetime.now(UTC):%Y-%m-%d}")
    half = path.with_name(f".{path.name}.part")
    half.write_text(text, "utf-8")
    half.replace(path)
    return path


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
