"""Tensors of a checkpoint folder: finds the file of each tensor and reads some of them. Knows no layout."""

import zipfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from specdec.core import grouped
from specdec.core.errors import CheckpointError
from specdec.reach.checkpoints.folders import (
    INDEX,
    LEGACY_WEIGHTS,
    WEIGHTS,
    as_checkpoint_error,
    download,
    locate,
    read_weight_map,
    shortened,
)

_FLOAT_NAMES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_DTYPES = {
    **_FLOAT_NAMES,
    **{"F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "BOOL": torch.bool, "U8": torch.uint8},
    **{f"I{bits}": getattr(torch, f"int{bits}") for bits in (8, 16, 32, 64)},
}

FLOATS = tuple(_FLOAT_NAMES.values())  # dtypes that need no scales

Shapes = dict[str, tuple[tuple[int, ...], Any]]


@dataclass(frozen=True)
class Checkpoint:
    """Description of a draft's checkpoint, without the tensors' data.

    layout: a name of `reach.heads.formats.layouts`; algo: its draft algorithm. config: config.json, unchanged.
    tensors: shape and dtype of each tensor by its name in the file; for a head inside a target, only the head's. notes:
    sources of config values, defaults taken, and problems.
    """

    folder: Path
    layout: str
    algo: str
    config: Mapping[str, Any]
    tensors: Mapping[str, tuple[tuple[int, ...], Any]]
    notes: list[str]


@dataclass(frozen=True)
class TensorFiles:
    """An opened checkpoint: the file of each tensor by name; tensors are read on demand.

    repo: Hub repository of a snapshot, from which missing files are downloaded; None for a local folder.
    """

    folder: Path
    files: Mapping[str, str]
    repo: str | None = None

    @classmethod
    def at(cls, path_or_id: str | Path, weights: tuple[str, str] = (WEIGHTS, LEGACY_WEIGHTS)) -> "TensorFiles":
        """Open a folder or Hub repository. weights: names of the weight file, in order of preference.

        CheckpointError if there is none, or one is truncated."""
        folder, repo = locate(path_or_id, weights)
        name = next((f for w in weights for f in (w + INDEX, w) if (folder / f).is_file()), None)
        if name is None:
            what = f"there is neither {weights[0]} nor {weights[1]}, nor an index of either's parts"
            raise CheckpointError(str(folder), [what])
        if name.endswith(INDEX):
            return cls(folder, read_weight_map(folder, name), repo)
        with _opened(folder, name) as file:
            return cls(folder, dict.fromkeys(file.keys(), name), repo)

    def shapes(self, names: Iterable[str]) -> Shapes:
        """Return shape and dtype of the tensors `names`."""
        found: Shapes = {}
        for file_name, wanted in grouped(names, self.files.__getitem__).items():
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
        for file_name, wanted in grouped(names, self.files.__getitem__).items():
            with _opened(self.folder, file_name, self.repo) as file:
                get = file.__getitem__ if isinstance(file, dict) else file.get_tensor
                found.update({name: get(name) for name in wanted})
        return found


@contextmanager
def _opened(folder: Path, name: str, repo: str | None = None) -> Iterator[Any]:
    """Open the file `name`: a safetensors handle, or the dict of tensors in a .bin file, whose code is not run."""
    with as_checkpoint_error(folder, f"{name} is truncated, corrupted or not what its index says; download it again"):
        path = folder / name
        if repo is not None and not path.is_file():
            path = download(repo, name)
        if not path.is_file():
            what = f"the index of its parts names {shortened(name)}, which is not there: download it"
            raise CheckpointError(str(folder), [what])
        if not name.endswith(".bin"):
            with safe_open(path, "pt") as file:
                yield file
            return
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
        named = state.items() if isinstance(state, dict) else ()
        tensors = {n: t for n, t in named if isinstance(n, str) and isinstance(t, torch.Tensor)}
        if not tensors:
            what = f"{name} holds a {type(state).__name__}: expected a dict of tensors by their names"
            raise CheckpointError(str(folder), [what])
        yield tensors
