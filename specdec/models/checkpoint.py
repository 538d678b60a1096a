"""Files of a checkpoint folder: which tensors lie where, and reading some of them. Knows no layout."""

import json
import pickle
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from specdec.errors import CheckpointError

WEIGHTS = "model.safetensors"
LEGACY_WEIGHTS = "pytorch_model.bin"
INDEX = ".index.json"

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}

FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)  # that need no scales

Shapes = dict[str, tuple[tuple[int, ...], Any]]


@dataclass(frozen=True)
class Checkpoint:
    """What a folder holds, without its data.

    layout: a name of `specdec.models.layouts`; algo: what it drafts with. config: config.json as it is. tensors: shape
    and dtype of each tensor by its name in the file; of a head inside a target, the head's only. notes: what was read
    from where, and defaults taken.
    """

    folder: Path
    layout: str
    algo: str
    config: Mapping[str, Any]
    tensors: Mapping[str, tuple[tuple[int, ...], Any]]
    notes: list[str]


@dataclass(frozen=True)
class TensorFiles:
    """Where each tensor of a checkpoint lies; nothing is read before it is asked for.

    repo: the Hub repository whose snapshot the folder is, if any; parts that are not there yet come from it.
    """

    folder: Path
    files: Mapping[str, str]
    repo: str | None = None

    @classmethod
    def at(cls, path_or_id: str | Path) -> "TensorFiles":
        """A folder, or a Hub repository. CheckpointError if it has no weights or they are cut off."""
        folder, repo = locate(path_or_id)
        candidates = (WEIGHTS + INDEX, WEIGHTS, LEGACY_WEIGHTS + INDEX, LEGACY_WEIGHTS)
        name = next((f for f in candidates if (folder / f).is_file()), None)
        if name is None:
            what = f"there is neither {WEIGHTS} nor {LEGACY_WEIGHTS}, nor an index of either's parts"
            raise CheckpointError(str(folder), [what])
        if name.endswith(INDEX):
            weight_map = read_json(folder, name).get("weight_map")
            if not isinstance(weight_map, dict):
                raise CheckpointError(str(folder), [f"{name} has no 'weight_map'"])
            return cls(folder, weight_map, repo)
        with _opened(folder, name) as file:
            return cls(folder, dict.fromkeys(file.keys(), name), repo)

    def shapes(self, names: Iterable[str]) -> Shapes:
        """Shape and dtype of the tensors `names`."""
        found: Shapes = {}
        for file_name, wanted in self._by_file(names).items():
            with _opened(self.folder, file_name, self.repo) as file:
                for name in wanted:
                    if isinstance(file, dict):
                        found[name] = (tuple(file[name].shape), file[name].dtype)
                        continue
                    part = file.get_slice(name)
                    found[name] = (tuple(part.get_shape()), _DTYPES.get(part.get_dtype(), part.get_dtype()))
        return found

    def read(self, names: Iterable[str]) -> dict[str, torch.Tensor]:
        """The tensors `names` as stored, on the CPU; they may share pages with the file: copy what you keep."""
        found: dict[str, torch.Tensor] = {}
        for file_name, wanted in self._by_file(names).items():
            with _opened(self.folder, file_name, self.repo) as file:
                found.update({n: file[n] if isinstance(file, dict) else file.get_tensor(n) for n in wanted})
        return found

    def _by_file(self, names: Iterable[str]) -> dict[str, list[str]]:
        grouped: dict[str, list[str]] = {}
        for name in names:
            grouped.setdefault(self.files[name], []).append(name)
        return grouped


def locate(path_or_id: str | Path) -> tuple[Path, str | None]:
    """(folder, None), or the snapshot of a Hub repository with its JSON files and its weights, if they are one file."""
    path = Path(path_or_id).expanduser()
    if path.is_dir():
        return path, None
    if path.exists():
        raise CheckpointError(str(path), ["it is a file; expected the folder that holds config.json and the weights"])
    repo = str(path_or_id)
    if path.is_absolute() or repo.startswith(".") or repo.count("/") != 1:
        raise CheckpointError(repo, ["no such folder (and not a Hub id of the form owner/name)"])
    from huggingface_hub import snapshot_download

    try:
        folder = Path(snapshot_download(repo, allow_patterns=["*.json"]))
        for name in (WEIGHTS, LEGACY_WEIGHTS):
            if not any((folder / f).is_file() for f in (WEIGHTS + INDEX, WEIGHTS, LEGACY_WEIGHTS + INDEX)):
                snapshot_download(repo, allow_patterns=[name])
    except Exception as error:
        raise CheckpointError(repo, [f"no such folder, and the Hub did not give it: {error}"]) from error
    return folder, repo


def read_json(folder: Path, name: str) -> dict[str, Any]:
    """The JSON object in the file `name` of `folder`."""
    path = folder / name
    if not path.is_file():
        raise CheckpointError(str(folder), [f"there is no {name}"])
    try:
        value = json.loads(path.read_text("utf-8"))
    except ValueError as error:
        raise CheckpointError(str(folder), [f"{name} is not JSON: {error}"]) from error
    if not isinstance(value, dict):
        raise CheckpointError(str(folder), [f"{name} holds a {type(value).__name__}; expected a JSON object"])
    return value


def _load_legacy(path: Path) -> dict[str, torch.Tensor]:
    state = torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    return {name: t for name, t in state.items() if isinstance(t, torch.Tensor)}


@contextmanager
def _opened(folder: Path, name: str, repo: str | None = None) -> Iterator[Any]:
    """The file `name`: safetensors' handle, or a dict of a .bin file. Errors of reading it are the checkpoint's."""
    path = folder / name
    if repo is not None and not path.is_file():
        path = _download(repo, name)
    if not path.is_file():
        raise CheckpointError(str(folder), [f"the index of its parts names {name}, which is not there: download it"])
    try:
        if name.endswith(".bin"):
            yield _load_legacy(path)
        else:
            with safe_open(path, "pt") as file:
                yield file
    except (SafetensorError, pickle.UnpicklingError, RuntimeError, EOFError, OSError, KeyError) as error:
        problem = f"{name} is truncated, corrupted or not what its index says: {error}; download it anew"
        raise CheckpointError(str(folder), [problem]) from error


def _download(repo: str, name: str) -> Path:
    """One file of a Hub repository."""
    from huggingface_hub import hf_hub_download

    try:
        return Path(hf_hub_download(repo, name))
    except Exception as error:
        raise CheckpointError(repo, [f"the Hub did not give {name}: {error}"]) from error
