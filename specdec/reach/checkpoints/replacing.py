"""Writes checkpoints to a temporary folder and moves them into place: a crash leaves the older files whole, and no
checkpoint is overwritten unless that was asked for."""

import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from shutil import rmtree
from tempfile import mkdtemp
from typing import Any

import torch
from safetensors.torch import save_file

from specdec.reach.checkpoints.folders import INDEX, LEGACY_WEIGHTS, WEIGHTS, json_text

CONFIG = "config.json"
CHECKPOINT = (CONFIG, WEIGHTS, LEGACY_WEIGHTS, "*.gguf")
INDICES = (WEIGHTS + INDEX, LEGACY_WEIGHTS + INDEX)


def check_free(folder: str | Path, overwrite: bool, also: Sequence[str] = ()) -> None:
    """Raise ValueError if `folder` is a file, or holds a checkpoint or one of the files `also`, unless `overwrite`.

    A sharded checkpoint with an index is never overwritten: readers would go on loading the old shards.
    """
    if not str(folder):
        raise ValueError("the folder to write to is '': expected its name, '.' for the current one")
    folder = Path(folder)
    check_place(folder)
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"{str(folder)!r} is a file: expected a folder to write to")
    found = sorted(f.name for pattern in (*CHECKPOINT, *INDICES) for f in folder.glob(pattern))
    found = found or [name for name in also if (folder / name).exists()]
    if found and not overwrite:
        raise ValueError(
            f"{str(folder)!r} holds {', '.join(found)} already: expected a folder without them; choose "
            "another, or pass overwrite=True (--overwrite)"
        )
    listed = [name for name in found if name.endswith(INDEX)]
    if listed:
        raise ValueError(
            f"{str(folder)!r} holds {listed[0]}, which readers would load instead: remove that checkpoint first"
        )


def check_place(path: Path) -> None:
    """Raise ValueError if a parent folder of `path` is a file, or the folder that would hold it is not writable."""
    whole = path.absolute()
    nearest = whole if whole.is_dir() else next(parent for parent in whole.parents if parent.exists())
    if not nearest.is_dir():
        raise ValueError(f"{str(path)!r} cannot be written: {str(nearest)!r} is a file, expected a folder")
    if not os.access(nearest, os.W_OK):
        raise ValueError(f"{str(path)!r} cannot be written: no permission to write to {str(nearest)!r}")


def write_checkpoint(folder: str | Path, config: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> None:
    """Write config.json and model.safetensors to `folder`, replacing those there; see `check_free`."""
    with replacing(folder, CHECKPOINT) as partial:
        save_file(_apart(tensors), str(partial / WEIGHTS), metadata={"format": "pt"})
        (partial / CONFIG).write_text(json_text(config), "utf-8")


def _apart(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return `tensors`, with copies of those that share memory with others: tied ones are stored under each of their
    names, since readers look for every name, and safetensors refuses shared memory."""
    places = {name: tensor.untyped_storage().data_ptr() for name, tensor in tensors.items()}
    many = Counter(places.values())
    return {name: t.clone() if many[places[name]] > 1 else t for name, t in tensors.items()}


def write_text(path: Path, text: str) -> None:
    """Write a text file atomically."""
    with replacing(path.parent) as partial:
        (partial / path.name).write_text(text, "utf-8")


@contextmanager
def replacing(folder: str | Path, stale: Sequence[str] = ()) -> Iterator[Path]:
    """Yield a temporary folder in `folder`; on exit its files replace those of the same names, weights first.

    stale: patterns of files of the old checkpoint to delete unless written again. An error within leaves `folder` as it
    was, or removes it if it is new.
    """
    folder = Path(folder)
    is_new = not folder.exists()
    folder.mkdir(parents=True, exist_ok=True)
    partial = Path(mkdtemp(prefix=".partial-", dir=folder))
    try:
        yield partial
        _share(partial)
        # weights first: without their config they do not load; a config without them might, as another head
        written = [f.name for f in sorted(partial.iterdir(), key=lambda file: (file.suffix == ".json", file.name))]
        for name in written:
            os.replace(partial / name, folder / name)
        for file in [f for pattern in stale for f in folder.glob(pattern) if f.name not in written]:
            file.unlink()
    finally:
        rmtree(partial)
        if is_new and not any(folder.iterdir()):
            folder.rmdir()


def _share(folder: Path) -> None:
    """Give all files in `folder` the mode of new files here; safetensors makes its own readable by the owner only."""
    probe = folder / ".probe"
    probe.touch()
    mode = probe.stat().st_mode
    probe.unlink()
    for file in folder.iterdir():
        file.chmod(mode)
