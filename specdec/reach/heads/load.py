"""Detects, inspects, loads, checks and saves draft heads in every layout of `reach.heads.formats`; all problems of a
checkpoint are reported at once."""

import re
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from specdec.core.draft.head import DraftHead
from specdec.core.errors import CheckpointError
from specdec.reach.checkpoints.fitting import warn_of_weights
from specdec.reach.checkpoints.folders import local_path, read_json
from specdec.reach.checkpoints.replacing import check_free, write_checkpoint
from specdec.reach.checkpoints.tensors import Checkpoint, TensorFiles
from specdec.reach.heads.custom_generate import FILE, write_custom_generate
from specdec.reach.heads.files import HeadFiles
from specdec.reach.heads.format import Saving, renamed
from specdec.reach.heads.formats import ASSISTANT, STANDALONE, WHOLE, formats, layouts, layouts_of, pick_layout
from specdec.reach.targets.pretrained import BUNDLED, gguf_of
from specdec.reach.targets.shape import LAST, TargetShape

# In any layout: buffers that older transformers stored, which follow from the config.
IGNORED = re.compile(r"(^|\.)rotary_emb\.inv_freq$")


def detect_algo(path_or_id: str | Path, wanted: str | None = None) -> str:
    """Return the draft algorithm of a folder, .gguf file or Hub repository, by its tensor names: "eagle", "eagle3",
    "nextn", "block", "assistant" or "standalone" (an ordinary causal LM).

    A target with an MTP layer can draft as "nextn" or "standalone": `wanted` chooses, by default "nextn". Raises
    CheckpointError if it cannot be opened or its layout is unknown.
    """
    return open_draft(path_or_id, wanted)[0]


def open_draft(path_or_id: str | Path, wanted: str | None = None) -> tuple[str, TensorFiles | None]:
    """Return the result of `detect_algo`, and the opened files for `load_head`, or None for a whole model."""
    if str(path_or_id) == BUNDLED or gguf_of(path_or_id) is not None:
        return STANDALONE, None
    files = TensorFiles.at(path_or_id)
    names = list(files.files)
    found = [layout.algo for layout in layouts_of(names)]
    if wanted is None or wanted not in found:
        wanted = pick_layout(files.folder, names, wanted if wanted == STANDALONE and not found else None).algo
    return wanted, None if wanted in WHOLE else files


def open_head(files: TensorFiles, algo: str | None = None) -> HeadFiles:
    """Open the head in `files` and read the shapes of its own tensors. CheckpointError if there is none."""
    raw = read_json(files.folder, "config.json")
    listed = [name for name in files.files if not IGNORED.search(name)]
    layout = pick_layout(files.folder, listed, algo)
    modules = layout.modules(listed)
    pairs = layout.pairs(next(iter(modules), 0))
    names: dict[str, str] = {}
    copies: dict[str, str] = {}
    for name in listed:
        ours = renamed(name, pairs)
        if ours is not None and ours in names:  # MTP layers after the first contain the same embedding and head again
            copies[name] = ours
        elif ours is not None:
            names[ours] = name
        elif not layout.holds_target or (layout.name != "nextn" and re.match(layout.mark, name)):
            names[name] = name
    shapes = files.shapes(names.values())
    found = {ours: shapes[name] for ours, name in names.items()}
    return HeadFiles(files.folder, layout, raw, files, names, found, modules, copies)


def inspect(path_or_id: str | Path) -> Checkpoint:
    """Describe a draft's checkpoint without a target: layout, algorithm, tensors, and how its config is read.

    Raises CheckpointError if it cannot be opened; problems inside it are listed in `notes` as "problem: …".
    """
    if str(path_or_id) == BUNDLED or gguf_of(path_or_id) is not None:
        notes = ["a GGUF file, loaded as a whole model"]
        return Checkpoint(local_path(path_or_id), STANDALONE, STANDALONE, {}, {}, notes)
    files = TensorFiles.at(path_or_id)
    layout = pick_layout(files.folder, list(files.files), None)
    if layout.algo not in formats():
        config, tensors = read_json(files.folder, "config.json"), files.shapes(files.files)
        note = "attends to the target's K/V" if layout.algo == ASSISTANT else "an ordinary model"
        return Checkpoint(files.folder, layout.name, layout.algo, config, tensors, [note])
    head = open_head(files)
    try:
        formats()[layout.algo].read(head, None)
        problems = head.problems
    except CheckpointError as error:
        problems = list(error.problems)
    notes = [*head.notes, *head.doubts, *(f"problem: {problem}" for problem in problems)]
    tensors = {head.names[ours]: facts for ours, facts in head.found.items()}
    return Checkpoint(files.folder, layout.name, layout.algo, head.raw, tensors, notes)


@torch.no_grad()
def load_head(
    source: str | Path | TensorFiles,
    target: TargetShape,
    dtype: torch.dtype,
    device: torch.device,
    algo: str | None = None,
) -> DraftHead:
    """Load a draft head of any known layout for `target`, frozen, in `dtype` on `device`.

    source: a folder, a Hub id, or opened files. algo: the head to take if there are several. Raises CheckpointError
    with every missing, unexpected or misshapen tensor and every other problem; warns of weights that cannot draft.
    """
    files = open_head(source if isinstance(source, TensorFiles) else TensorFiles.at(source), algo)
    where = str(files.folder)
    if files.layout.algo not in formats():
        raise CheckpointError(where, ["it is a whole model, not a head: load it with load_pretrained"])
    stored = formats()[files.layout.algo].read(files, target)
    for doubt in files.doubts:
        warnings.warn(f"{where}: {doubt}", stacklevel=3)
    if files.problems or stored is None:
        raise CheckpointError(where, files.problems)
    state = {}
    for name, tensor in stored.tensors:
        to = stored.kept.get(name, dtype) if tensor.is_floating_point() else tensor.dtype
        state[name] = tensor.to(device=device, dtype=to, copy=True)  # never the file's own pages
    head = stored.head
    if problems := _narrow_embeddings(head, target):
        raise CheckpointError(where, problems)
    head.load_state_dict(state, assign=True)
    warn_of_weights(head, where)
    return head.to(device).eval().requires_grad_(False)


def _narrow_embeddings(head: DraftHead, target: TargetShape) -> list[str]:
    """Return a problem if a head reads the target's embeddings and these are narrower than its layers (OPT-350m)."""
    width = getattr(target.embed_tokens, "embedding_dim", target.hidden_size)
    if head.embed_tokens is not None or width == target.hidden_size or head.hidden_size != target.hidden_size:
        return []
    return [f"it is {head.hidden_size} wide, and reads the target's embeddings, which are {width} wide"]


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
    problems += _narrow_embeddings(head, target)
    if head.aux_layers != (LAST,) and max(head.aux_layers) >= target.num_layers - 1:
        problems.append(f"aux layers {head.aux_layers} do not fit a target of {target.num_layers} layers")
    if problems:
        raise CheckpointError(type(head).__name__, problems)
    warn_of_weights(head, type(head).__name__)


def save_head(
    folder: str | Path,
    head: DraftHead,
    *,
    layout: str | None = None,
    dtype: torch.dtype,
    lm_head_from_target: bool = False,
    verifier: Mapping[str, Any] | None = None,
    num_layers: int | None = None,
    overwrite: bool = False,
) -> None:
    """Write a draft head to `folder` (config.json, model.safetensors, custom_generate/generate.py), floats as `dtype`.

    layout: "eagle", "eagle3" (official), "speculators", "nextn" (DeepSeek-V3's names), "dflash" (z-lab's) or
    "speculators-block"; None: the official one, or speculators' for a head that the official one cannot express.
    lm_head_from_target: leave out the lm_head of an EAGLE-3 or block head, whose rows must then be the target's.
    verifier: the target, as written in speculators' `speculators_config.verifier`. num_layers: the target's; if given,
    default aux layer ids are left out. Embeddings and output heads shared with the target are not stored.
    overwrite: replace a checkpoint in `folder`. ValueError names the feature that the layout cannot express, or the
    file that is in `folder` already.
    """
    kind = formats()[head.algo]
    written = kind.written(head)
    name = layout or written[0]
    if name not in written:
        raise ValueError(f"layout={name!r}: expected one of {tuple(sorted(written))} for a head of {head.algo!r}")
    if lm_head_from_target and not kind.shares_lm_head_rows:
        raise ValueError(f"lm_head_from_target=True: a head of {head.algo!r} has no lm_head of its own to leave out")
    check_free(folder, overwrite, (str(FILE),))
    config, tensors = kind.write(head, Saving(name, lm_head_from_target, verifier, num_layers))
    buffers = dict(head.named_buffers())  # those that transformers keeps in fp32 stay so
    tensors = {n: t.detach().cpu() if n in buffers else t.detach().to("cpu", dtype) for n, t in tensors.items()}
    first = config.get("num_hidden_layers") or 0
    write_checkpoint(folder, config, {layouts()[name].theirs(n, first): t.contiguous() for n, t in tensors.items()})
    write_custom_generate(folder)
