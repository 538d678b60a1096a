"""Files of a checkpoint folder: which tensors lie where, and reading some of them. Knows no layout."""

import json
import pickle
import zipfile
from collections.abc import Iterable, Mapping
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
    """Where each tensor of a folder lies; nothing is read before it is asked for."""

    folder: Path
    files: Mapping[str, str]

    @classmethod
    def of(cls, folder: Path) -> "TensorFiles":
        """CheckpointError if the folder has no weights or they are cut off."""
        candidates = (WEIGHTS + INDEX, WEIGHTS, LEGACY_WEIGHTS + INDEX, LEGACY_WEIGHTS)
        name = next((f for f in candidates if (folder / f).is_file()), None)
        if name is None:
            what = f"there is neither {WEIGHTS} nor {LEGACY_WEIGHTS}, nor an index of either's parts"
            raise CheckpointError(str(folder), [what])
        if name.endswith(INDEX):
            weight_map = read_json(folder, name).get("weight_map")
            if not isinstance(weight_map, dict):
                raise CheckpointError(str(folder), [f"{name} has no 'weight_map'"])
            return cls(folder, weight_map)
        with _complete(folder, name):
            if name == LEGACY_WEIGHTS:
                return cls(folder, dict.fromkeys(_load_legacy(folder / name), name))
            with safe_open(folder / name, "pt") as file:
                return cls(folder, dict.fromkeys(file.keys(), name))

    def shapes(self, names: Iterable[str]) -> Shapes:
        """Shape and dtype of the tensors `names`."""
        found: Shapes = {}
        for file_name, wanted in self._by_file(names).items():
            with _complete(self.folder, file_name):
                if file_name.endswith(".bin"):
                    state = _load_legacy(self.folder / file_name)
                    found.update({n: (tuple(state[n].shape), state[n].dtype) for n in wanted})
                    continue
                with safe_open(self.folder / file_name, "pt") as file:
                    for name in wanted:
                        part = file.get_slice(name)
                        found[name] = (tuple(part.get_shape()), _DTYPES.get(part.get_dtype(), part.get_dtype()))
        return found

    def read(self, names: Iterable[str]) -> dict[str, torch.Tensor]:
        """The tensors `names` as stored, on the CPU; they may share pages with the file: copy what you keep."""
        found: dict[str, torch.Tensor] = {}
        for file_name, wanted in self._by_file(names).items():
            with _complete(self.folder, file_name):
                if file_name.endswith(".bin"):
                    state = _load_legacy(self.folder / file_name)
                    found.update({n: state[n] for n in wanted})
                    continue
                with safe_open(self.folder / file_name, "pt") as file:
                    found.update({n: file.get_tensor(n) for n in wanted})
        return found

    def _by_file(self, names: Iterable[str]) -> dict[str, list[str]]:
        grouped: dict[str, list[str]] = {}
        for name in names:
            grouped.setdefault(self.files[name], []).append(name)
        return grouped


def resolve(path_or_id: str | Path) -> Path:
    """A local checkpoint folder: `path_or_id` itself, or the snapshot of a Hub repository of that name."""
    path = Path(path_or_id).expanduser()
    if path.is_dir():
        return path
    if path.exists():
        raise CheckpointError(str(path), ["it is a file; expected the folder that holds config.json and the weights"])
    if path.is_absolute() or str(path_or_id).startswith(".") or str(path_or_id).count("/") != 1:
        raise CheckpointError(str(path_or_id), ["no such folder (and not a Hub id of the form owner/name)"])
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(str(path_or_id), allow_patterns=["*.json", "*.safetensors", "*.bin"]))
    except Exception as error:
        raise CheckpointError(str(path_or_id), [f"no such folder, and the Hub did not give it: {error}"]) from error


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
def _complete(folder: Path, name: str) -> Any:
    """Within, errors of reading the file `name` are the checkpoint's."""
    if not (folder / name).is_file():
        raise CheckpointError(str(folder), [f"the index of its parts names {name}, which is not there: download it"])
    try:
        yield
    except (SafetensorError, pickle.UnpicklingError, RuntimeError, EOFError, OSError, ValueError, KeyError) as error:
        if isinstance(error, CheckpointError):
            raise
        problem = f"{name} is truncated, corrupted or not what its index says: {error}; download it anew"
        raise CheckpointError(str(folder), [problem]) from error
