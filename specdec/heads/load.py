"""Loads, checks and saves draft heads in every layout of `specdec.heads.formats`; all problems of a checkpoint are
reported at once.

Beyond the layouts: EAGLE-3's `lm_head.weight` may be absent where config.json says `lm_head_from_target`; its rows are
then the target's.
"""

from pathlib import Path

import torch

from specdec.checkpoints.fitting import warn_of_weights
from specdec.checkpoints.folders import local_path, read_json
from specdec.checkpoints.tensors import Checkpoint, TensorFiles
from specdec.draft.head import DraftHead
from specdec.errors import CheckpointError
from specdec.heads.build import build_head
from specdec.heads.formats import layouts_of
from specdec.heads.layouts import STANDALONE
from specdec.heads.open import open_head, pick_layout, read_config
from specdec.heads.write import save_head
from specdec.targets.pretrained import BUNDLED, gguf_of
from specdec.targets.shape import LAST, TargetShape

__all__ = [
    "Checkpoint",
    "TargetShape",
    "check_head",
    "detect_algo",
    "inspect",
    "load_head",
    "save_head",
]


def detect_algo(path_or_id: str | Path, wanted: str | None = None) -> str:
    """Detect what a folder, a .gguf file or a Hub repository drafts with, by its tensor names: "eagle", "eagle3",
    "nextn" or "standalone" (an ordinary causal LM).

    A target with an MTP layer serves as both: `wanted` says which, else it is "nextn".
    """
    return open_draft(path_or_id, wanted)[0]


def open_draft(path_or_id: str | Path, wanted: str | None = None) -> tuple[str, TensorFiles | None]:
    """Return the result of `detect_algo`, and the opened files, for `load_head`; None for a whole model."""
    if str(path_or_id) == BUNDLED or gguf_of(path_or_id) is not None:
        return STANDALONE, None
    files = TensorFiles.at(path_or_id)
    names = list(files.files)
    found = [layout.algo for layout in layouts_of(names)]
    if wanted is None or wanted not in found:
        wanted = pick_layout(files.folder, names, wanted if wanted == STANDALONE and not found else None).algo
    return wanted, None if wanted == STANDALONE else files


def inspect(path_or_id: str | Path) -> Checkpoint:
    """Describe what a checkpoint holds and how it would be read, without a target and without its data.

    Raises CheckpointError if it cannot be opened; what is wrong inside is noted as "problem: …".
    """
    if str(path_or_id) == BUNDLED or gguf_of(path_or_id) is not None:
        return Checkpoint(
            local_path(path_or_id), STANDALONE, STANDALONE, {}, {}, ["a GGUF file, loaded as a whole model"]
        )
    files = TensorFiles.at(path_or_id)
    folder = files.folder
    layout = pick_layout(folder, list(files.files), None)
    if layout.name == STANDALONE:
        config = read_json(folder, "config.json")
        return Checkpoint(folder, layout.name, layout.algo, config, files.shapes(files.files), ["an ordinary model"])
    head = open_head(files)
    reading, _ = read_config(head)
    notes = [*reading.notes, *reading.doubts, *(f"problem: {problem}" for problem in reading.problems)]
    tensors = {head.names[ours]: facts for ours, facts in head.found.items()}
    return Checkpoint(folder, layout.name, layout.algo, head.raw, tensors, notes)


def load_head(
    source: str | Path | TensorFiles,
    target: TargetShape,
    dtype: torch.dtype,
    device: torch.device,
    algo: str | None = None,
) -> DraftHead:
    """Load the head of any layout for `target`, frozen, in `dtype` on `device`.

    source: a folder, a Hub id, or opened files; algo: which head to take where there are several. Raises
    CheckpointError with every problem found.
    """
    head = open_head(source if isinstance(source, TensorFiles) else TensorFiles.at(source), algo)
    if head.layout.name == STANDALONE:
        raise CheckpointError(str(head.folder), ["it is a whole model, not a head: load it with load_pretrained"])
    return build_head(head, target, dtype, device)


def check_head(head: DraftHead, target: TargetShape, dtype: torch.dtype, device: torch.device) -> None:
    """Raise CheckpointError if a loaded head does not fit the target it is attached to; warn of broken weights."""
    weight = head.weight
    facts = {
        "hidden size": (head.target_hidden_size, target.hidden_size),
        "vocabulary": (head.vocab_size, target.vocab_size),
        "dtype": (weight.dtype, dtype),
        "device": (weight.device, device),
    }
    problems = [f"{name} is {has}, the target has {wants}" for name, (has, wants) in facts.items() if has != wants]
    shared = [what for what in ("embed_tokens", "lm_head") if getattr(head, what) is None]
    if head.hidden_size != target.hidden_size and shared:
        problems.append(f"it is {head.hidden_size} wide, so it cannot share the target's {' and '.join(shared)}")
    if head.aux_layers != (LAST,) and max(head.aux_layers) >= target.num_layers - 1:
        problems.append(f"aux layers {head.aux_layers} do not fit a target of {target.num_layers} layers")
    if problems:
        raise CheckpointError(type(head).__name__, problems)
    warn_of_weights(head, type(head).__name__)
