"""Tensors of a checkpoint folder: which file holds each, and reading some of them. Knows no layout."""

import zipfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from specdec.checkpoints.folders import (
    INDEX,
    LEGACY_WEIGHTS,
    WEIGHTS,
    as_checkpoint_error,
    download,
    locate,
    read_weight_map,
)
from specdec.errors import CheckpointError

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

FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)  # dtypes that need no scales

Shapes = dict[str, tuple[tuple[int, ...], Any]]


@dataclass(frozen=True)
class Checkpoint:
    """Contents of a checkpoint folder, without the data.

    layout: a name of `specdec.heads.formats.layouts`; algo: the algorithm it drafts with. config: config.json as it is.
    tensors: shape and dtype of each tensor by its name in the file; of a head inside a target, the head's only. notes:
    where values were read from, and defaults taken.
    """

    folder: Path
    layout: str
    algo: str
    config: Mapping[str, Any]
    tensors: Mapping[str, tuple[tuple[int, ...], Any]]
    notes: list[str]


@dataclass(frozen=True)
class TensorFiles:
    """The file of each tensor of a checkpoint; no tensor is read before it is asked for.

    repo: the Hub repository whose snapshot the folder is, if any; missing files are downloaded from it.
    """

    folder: Path
    files: Mapping[str, str]
    repo: str | None = None

    @classmethod
    def at(cls, path_or_id: str | Path) -> "TensorFiles":
        """Open a folder, or a Hub repository. CheckpointError if it has no weights or they are truncated."""
        folder, repo = locate(path_or_id)
        candidates = (WEIGHTS + INDEX, WEIGHTS, LEGACY_WEIGHTS + INDEX, LEGACY_WEIGHTS)
        name = next((f for f in candidates if (folder / f).is_file()), None)
        if name is None:
            what = f"there is neither {WEIGHTS} nor {LEGACY_WEIGHTS}, nor an index of either's parts"
            raise CheckpointError(str(folder), [what])
        if name.endswith(INDEX):
            return cls(folder, read_weight_map(folder, name), repo)
        with _opened(folder, name) as file:
            return cls(folder, dict.fromkeys(file.keys(), name), repo)

    def shapes(self, names: Iterable[str]) -> Shapes:
        """Return shape and dtype of the tensors `names`."""
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
        """Read the tensors `names` as stored, on the CPU; they may share pages with the file: copy what you keep."""
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


@contextmanager
def _opened(folder: Path, name: str, repo: str | None = None) -> Iterator[Any]:
    """Open the file `name`: a safetensors handle, or a dict of a .bin file. Read errors become CheckpointError."""
    path = folder / name
    if repo is not None and not path.is_file():
        path = download(repo, name)
    if not path.is_file():
        raise CheckpointError(str(folder), [f"the index of its parts names {name}, which is not there: download it"])
    if name.endswith(".bin"):
        yield _load_legacy(folder, path)
        return
    try:
        with safe_open(path, "pt") as file:
            yield file
    except (SafetensorError, RuntimeError, OSError, KeyError) as error:
        problem = f"{name} is truncated, corrupted or not what its index says: {error}; download it anew"
        raise CheckpointError(str(folder), [problem]) from error


class _State(dict[str, torch.Tensor]):
    """The tensors of a .bin file. A name that its index lists and the file lacks raises CheckpointError."""

    def __init__(self, folder: Path, name: str, state: Mapping[str, torch.Tensor]):
        super().__init__(state)
        self.folder, self.name = folder, name

    def __missing__(self, name: str) -> torch.Tensor:
        raise CheckpointError(
            str(self.folder), [f"{self.name} has no {name!r}, which its index says: download it anew"]
        )


def _load_legacy(folder: Path, path: Path) -> _State:
    """Load the plain tensors in the pickle `path`; no code in it is run."""
    with as_checkpoint_error(folder, f"{path.name} is truncated, corrupted or no file of tensors; download it anew"):
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    named = state if isinstance(state, dict) else {}
    tensors = {name: t for name, t in named.items() if isinstance(t, torch.Tensor)}
    if not tensors or not all(isinstance(name, str) for name in named):
        what = "no tensors by names" if isinstance(state, dict) else f"a {type(state).__name__}"
        raise CheckpointError(str(folder), [f"{path.name} holds {what}: expected a dict of tensors by their names"])
    odd = {name: _oddity(t) for name, t in tensors.items() if _oddity(t)}
    if odd:
        name, why = next(iter(odd.items()))
        more = f" and {len(odd) - 1} more" if len(odd) > 1 else ""
        problem = f"{path.name}: {name}{more} is {why}: expected plain, dense tensors; save them so"
        raise CheckpointError(str(folder), [problem])
    return _State(folder, path.name, tensors)


def _oddity(tensor: torch.Tensor) -> str | None:
    """Return what kind of tensor a stored one is, if it is not a plain one."""
    if tensor.is_meta:
        return "a meta tensor, which has no data"
    if tensor.layout is not torch.strided:
        return f"stored as {tensor.layout}"
    return "quantised" if tensor.is_quantized else "nested" if tensor.is_nested else None
