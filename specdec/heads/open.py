"""Opens the folder of a head: detects its layout, maps its tensor names to ours, and reads its config.json."""

import re
from pathlib import Path
from typing import Any

from specdec.checkpoints.folders import as_checkpoint_error, read_json
from specdec.checkpoints.tensors import TensorFiles
from specdec.errors import CheckpointError
from specdec.heads.configs import Reading
from specdec.heads.files import HeadFiles
from specdec.heads.formats import formats, layouts_of
from specdec.heads.layouts import IGNORED, STANDALONE, WHOLE_MODEL, Layout


def open_head(files: TensorFiles, algo: str | None = None) -> HeadFiles:
    """Open the head in `files`, with the shapes of its own tensors only. CheckpointError if there is none."""
    folder = files.folder
    raw = read_json(folder, "config.json")
    listed = [name for name in files.files if not IGNORED.search(name)]
    layout = pick_layout(folder, listed, algo)
    index = None if layout is WHOLE_MODEL else formats()[layout.algo].first_index(layout, listed)
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


def read_config(files: HeadFiles, num_layers: int | None = None) -> tuple[Reading, Any | None]:
    """Read the head's config for a target of `num_layers`, with notes and problems; None if it cannot be made."""
    reading = Reading(files.raw, files.found, num_layers)
    with as_checkpoint_error(files.folder, f"config.json cannot be read as that of {files.layout.name!r}"):
        kind = formats()[files.layout.algo]
        return reading, kind.read_config(reading, files.layout, list(files.names.values()))


def pick_layout(folder: Path, names: list[str], algo: str | None) -> Layout:
    """Return the layout of tensors `names`; of a target with an MTP layer the one for `algo`, else the MTP layer's."""
    layouts = layouts_of(names)
    if not layouts and (algo == STANDALONE or _is_causal_lm(folder)):
        return WHOLE_MODEL
    if not layouts:
        known = (
            "eagle3 has midlayer.* or layers.0.hidden_norm, eagle fc and layers.0, nextn eh_proj, mtp.* or mtp_layers"
        )
        raise CheckpointError(str(folder), [f"unknown layout: it holds {sorted(names)[:6]} …; {known}"])
    asked = [layout for layout in layouts if layout.algo == algo]
    if algo is not None and not asked:
        found = " and ".join(layout.algo for layout in layouts)
        raise CheckpointError(str(folder), [f"algo={algo!r}, but it holds {found!r}{why_absent(algo, found)}"])
    return (asked or layouts)[0]


def why_absent(algo: str, found: str) -> str:
    """Say why a checkpoint of `found` has nothing for `algo`, after a colon; "" if no cause is known."""
    if algo != "nextn" or found != STANDALONE:
        return ""
    names = [layout.prefixes[0][0].format(m=0, at="N") + "*" for layout in formats()[algo].layouts]
    return (
        f": an MTP layer is not in this checkpoint; looked for {', '.join(names)} (transformers drops it when it saves "
        "a model; take the original repository). For a target that never had one, `specdec train run --algo nextn` "
        "trains one"
    )


def _is_causal_lm(folder: Path) -> bool:
    """Return whether config.json names a class of transformers that has an output head."""
    classes = read_json(folder, "config.json").get("architectures")
    names = [name for name in classes if isinstance(name, str)] if isinstance(classes, list) else []
    return any(name.endswith(("ForCausalLM", "LMHeadModel")) for name in names)
