"""The tensors of a head's folder under our names, and their shapes."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from specdec.checkpoints.tensors import FLOATS, Shapes, TensorFiles
from specdec.heads.layouts import Layout


@dataclass(frozen=True)
class HeadFiles:
    """The files of a head.

    names: our tensor name to the file's; tensors unknown to us keep the file's. found: shape and dtype, by the same
    keys. mtp_index: number of the first MTP layer. copies: file name to our name, for tensors whose name of ours is
    taken already.
    """

    folder: Path
    layout: Layout
    raw: Mapping[str, Any]
    files: TensorFiles
    names: Mapping[str, str]
    found: Shapes
    mtp_index: int | None
    copies: Mapping[str, str]

    def named(self, ours: str) -> str:
        """Return the file's name of our tensor, whether it is there or not."""
        return self.names.get(ours) or self.layout.theirs(ours, self.mtp_index)

    def read(self, ours: Sequence[str]) -> dict[str, torch.Tensor]:
        """Read tensors by our names, as they are stored."""
        stored = self.files.read([self.names[name] for name in ours])
        return {name: stored[self.names[name]] for name in ours}

    def is_float(self, ours: str, shape: tuple[int, ...]) -> bool:
        """Return whether our tensor is there with `shape`, in plain floats."""
        return ours in self.found and self.found[ours][0] == shape and self.found[ours][1] in FLOATS
