"""A folder as a head's layout sees it: our names of its tensors, and their shapes."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from specdec.checkpoints.tensors import FLOATS, Shapes, TensorFiles
from specdec.heads.layouts import Layout


@dataclass(frozen=True)
class HeadFiles:
    """names: the file's name by ours; what has none of ours goes by its own. found: shape and dtype, keyed alike.

    mtp_index: number of the first MTP layer. copies: further tensors of the file that have the same name of ours.
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
        """The file's name of our tensor, whether it is there or not."""
        return self.names.get(ours) or self.layout.theirs(ours, self.mtp_index)

    def read(self, ours: Sequence[str]) -> dict[str, torch.Tensor]:
        """Tensors by our names, as they are stored."""
        stored = self.files.read([self.names[name] for name in ours])
        return {name: stored[self.names[name]] for name in ours}

    def is_float(self, ours: str, shape: tuple[int, ...]) -> bool:
        """Whether there is such a tensor of plain floats."""
        return ours in self.found and self.found[ours][0] == shape and self.found[ours][1] in FLOATS
