"""Finds checkpoints: local paths, Hub snapshots, JSON files. Knows no tensors.

Repositories are untrusted: a name that leads out of its folder, or an invalid file, raises CheckpointError.
"""

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from specdec.core.errors import CheckpointError

WEIGHTS = "model.safetensors"
LEGACY_WEIGHTS = "pytorch_model.bin"
INDEX = ".index.json"


def local_path(path_or_id: Any) -> Path:
    """Return `path_or_id` as a Path, which need not exist; ValueError if it is neither a string nor a path."""
    if not isinstance(path_or_id, str | os.PathLike) or not os.fspath(path_or_id):
        raise ValueError(f"{path_or_id!r}: expected the path of a folder or a .gguf file, or a Hub id owner/name")
    path = Path(path_or_id)
    try:
        path = path.expanduser()
        path.exists()
    except (OSError, RuntimeError, ValueError) as error:  # a name too long, no such user
        raise CheckpointError(shortened(str(path_or_id)), [f"it is not a path: {error}"]) from error
    return path


def locate(path_or_id: str | Path, weights: tuple[str, str] = (WEIGHTS, LEGACY_WEIGHTS)) -> tuple[Path, str | None]:
    """Find a checkpoint: (folder, None), or (Hub snapshot, repository id). A snapshot has the repository's JSON files,
    and a file of `weights` unless they are sharded. CheckpointError if neither disk nor Hub has it."""
    path = local_path(path_or_id)
    if path.is_dir():
        return path, None
    if path.exists():
        raise CheckpointError(str(path), ["it is a file; expected the folder that holds config.json and the weights"])
    repo = str(path_or_id)
    if path.is_absolute() or repo.startswith((".", "~")) or repo.count("/") != 1:
        raise CheckpointError(repo, ["no such folder (and not a Hub id of the form owner/name)"])
    from huggingface_hub import snapshot_download

    try:
        folder = Path(snapshot_download(repo, allow_patterns=["*.json"]))
        for name in weights:
            if not any((folder / f).is_file() for f in (weights[0] + INDEX, weights[0], weights[1] + INDEX)):
                snapshot_download(repo, allow_patterns=[name])
    except Exception as error:
        raise CheckpointError(repo, [f"no such folder, and the Hub download failed: {error}"]) from error
    return folder, repo


def download(repo: str, name: str) -> Path:
    """Download one file of a Hub repository; CheckpointError if that fails."""
    from huggingface_hub import hf_hub_download

    try:
        return Path(hf_hub_download(repo, name))
    except Exception as error:
        raise CheckpointError(repo, [f"the Hub download of {name} failed: {error}"]) from error


def read_json(folder: Path, name: str) -> dict[str, Any]:
    """Read the JSON object in the file `name` of `folder`; CheckpointError if it is missing or not an object."""
    path = folder / name
    if not path.is_file():
        raise CheckpointError(str(folder), [f"there is no {name}"])
    try:
        value = json.loads(path.read_text("utf-8"))
    except (ValueError, OSError, RecursionError) as error:
        raise CheckpointError(str(folder), [f"{name} is not JSON: {error}; download it again"]) from error
    if not isinstance(value, dict):
        raise CheckpointError(str(folder), [f"{name} holds a {type(value).__name__}; expected a JSON object"])
    return value


def read_weight_map(folder: Path, name: str) -> dict[str, str]:
    """Read the file name of each tensor from the index `name`; CheckpointError for one outside `folder`."""
    weight_map = read_json(folder, name).get("weight_map")
    if not isinstance(weight_map, dict):
        raise CheckpointError(str(folder), [f"{name} has no 'weight_map' (an object); download it again"])
    for file in {str(value): value for value in weight_map.values()}.values():
        if not _is_inside(folder, file):
            what = "expected the name of a file in the folder; do not trust it, or download it again"
            raise CheckpointError(str(folder), [f"{name} names the file {shortened(repr(file))}: {what}"])
    return weight_map


def _is_inside(folder: Path, name: Any) -> bool:
    """Return whether `name` is a file below `folder`. The file itself may be a link, as all are in Hub snapshots; the
    folders in its path may not lead out."""
    try:
        return isinstance(name, str) and (folder / name).parent.resolve().is_relative_to(folder.resolve())
    except (ValueError, OSError, RuntimeError):  # a NUL in it, a link to itself
        return False


@contextmanager
def as_checkpoint_error(folder: str | Path, what: str) -> Iterator[None]:
    """Turn any exception within this context into a CheckpointError that begins with `what`.

    The last resort for untrusted files, after checks with better messages; a CheckpointError passes unchanged.
    """
    try:
        yield
    except CheckpointError:
        raise
    except Exception as error:
        said = str(error).strip() or "no reason was given"
        problem = f"{what}: {type(error).__name__}: {shortened(said, 400)}"
        raise CheckpointError(str(folder), [problem]) from error


def shortened(text: str, length: int = 120) -> str:
    """Return `text`, its middle cut out if it is longer than `length` characters."""
    return text if len(text) <= length else f"{text[: length // 2]}…{text[-length // 2 :]}"


def json_text(value: Mapping[str, Any]) -> str:
    """Format `value` as the JSON that we write to files."""
    return json.dumps(value, indent=2) + "\n"
