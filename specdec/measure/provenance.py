"""Where a result comes from: the command, the versions, the commit; and no path of the machine that it ran on."""

import platform
import re
import shlex
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers

from specdec import __version__

ABSOLUTE = re.compile(r"(?<![\w.:/-])/(?P<top>[\w.+-]+)(?:/[\w.+-]+)*/?")


def about() -> dict[str, Any]:
    """Return what a record says of its run, whatever it measures: command, versions, gpu, and the commit if known."""
    found = {"command": command(), "versions": versions(), "gpu": gpu_name()}
    return {**found, "commit": hash_} if (hash_ := commit()) else found


def gpu_name() -> str:
    """Return the device as file names have it: "nvidia-h200", or "cpu"."""
    return torch.cuda.get_device_name().lower().replace(" ", "-") if torch.cuda.is_available() else "cpu"


def versions() -> dict[str, str]:
    """Return the versions that a result depends on, by package."""
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "specdec": __version__,
    }


def command() -> str:
    """Return the command line of this process."""
    return shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]])


def commit() -> str | None:
    """Return the short hash of the checkout that the program runs from, "+" added where files differ; else None."""
    own = Path(__file__).resolve()
    if _git(own.parent, "ls-files", "--error-unmatch", own.name) is None:  # such as an environment inside a checkout
        return None
    found = _git(own.parent, "rev-parse", "--short", "HEAD")
    changed = _git(own.parent, "status", "--porcelain", "--untracked-files=no")
    return f"{found}+" if found and changed else found


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(["git", *arguments], cwd=folder, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def without_paths(value: Any) -> Any:
    """Return `value` (what JSON holds, or paths) with every absolute path of this machine cut to its last part."""
    if isinstance(value, str | Path):
        value = str(value)
        return ABSOLUTE.sub(_last_part, value)
    if isinstance(value, Mapping):
        return {name: without_paths(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [without_paths(one) for one in value]
    return value


def _last_part(found: re.Match[str]) -> str:
    """Return the last part of a path whose first folder exists here; "/v1/models" of a URL stays."""
    whole = found.group()
    return Path(whole).name if Path("/", found["top"]).is_dir() else whole
