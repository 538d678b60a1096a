"""A folder as a head's layout sees it: our names of its tensors, their shapes, and its config."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from specdec.checkpoints.folders import read_json, told_of
from specdec.checkpoints.tensors import FLOATS, Shapes, TensorFiles
from specdec.errors import CheckpointError
from specdec.heads.configs import Reading, eagle3_config, eagle_config, speculators_config
from specdec.heads.eagle import EagleConfig
from specdec.heads.eagle3 import Eagle3Config
from specdec.heads.layouts import IGNORED, LAYOUTS, STANDALONE, Layout, layouts_of, mtp_indices
from specdec.heads.nextn import NextNConfig
from specdec.heads.nextn_weights import nextn_config

DROPPED = (
    "an MTP layer is not in this checkpoint (transformers drops it when it saves a model; take the original repository)"
)

HeadConfig = EagleConfig | Eagle3Config | NextNConfig
READERS: Mapping[str, Callable[[Reading], HeadConfig | None]] = MappingProxyType(
    {"eagle": eagle_config, "eagle3": eagle3_config, "speculators": speculators_config}
)


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

    def read_config(self, num_layers: int | None = None) -> tuple[Reading, HeadConfig | None]:
        """The head's config for a target of `num_layers`, with notes and problems; None if it cannot be made."""
        reading = Reading(self.raw, self.found, num_layers)
        with told_of(self.folder, f"config.json cannot be read as that of {self.layout.name!r}"):
            if self.layout.algo == "nextn":
                return reading, nextn_config(reading, self.layout, list(self.names.values()))
            return reading, READERS[self.layout.name](reading)


def pick_layout(folder: Path, names: list[str], algo: str | None) -> Layout:
    """The layout that tensors `names` make up; of a target with an MTP layer the one for `algo`, else the MTP layer."""
    layouts = layouts_of(names)
    if not layouts and (algo == STANDALONE or _is_causal_lm(folder)):
        return LAYOUTS[STANDALONE]
    if not layouts:
        known = (
            "eagle3 has midlayer.* or layers.0.hidden_norm, eagle fc and layers.0, nextn eh_proj, mtp.* or mtp_layers"
        )
        raise CheckpointError(str(folder), [f"unknown layout: it holds {sorted(names)[:6]} …; {known}"])
    asked = [layout for layout in layouts if layout.algo == algo]
    if algo is not None and not asked:
        found = " and ".join(layout.algo for layout in layouts)
        is_dropped = algo == "nextn" and layouts[0].name == STANDALONE
        raise CheckpointError(str(folder), [f"algo={algo!r}, but it holds {found!r}" + f": {DROPPED}" * is_dropped])
    return (asked or layouts)[0]


def _is_causal_lm(folder: Path) -> bool:
    """Whether config.json names a class of transformers that has an output head."""
    classes = read_json(folder, "config.json").get("architectures")
    names = [name for name in classes if isinstance(name, str)] if isinstance(classes, list) else []
    return any(name.endswith(("ForCausalLM", "LMHeadModel")) for name in names)


def open_head(files: TensorFiles, algo: str | None = None) -> HeadFiles:
    """The head in `files`, with the shapes of its own tensors only. CheckpointError if there is none."""
    folder = files.folder
    raw = read_json(folder, "config.json")
    listed = [name for name in files.files if not IGNORED.search(name)]
    layout = pick_layout(folder, listed, algo)
    indices = mtp_indices(layout, listed) if layout.algo == "nextn" else []
    index = indices[0] if indices else None
    names: dict[str, str] = {}
    copies: dict[str, str] = {}
    for name in listed:
        ours = layout.ours(name, index)
        if ours is not None and ours in names:  # MTP layers after the first bring the same embedding and head along
            copies[name] = ours
        elif ours is not None:
            names[ours] = name
        elif not layout.holds_target or (layout.name != "nextn" and re.match(layout.mark, name)):
            names[name] = name
    shapes = files.shapes(names.values())
    found = {ours: shapes[name] for ours, name in names.items()}
    return HeadFiles(folder, layout, raw, files, names, found, index, copies)
