"""Builds heads from opened files: makes them on the meta device, checks every tensor, then reads and assigns."""

import warnings
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch

from specdec.checkpoints.fitting import is_copy, tensor_problems, warn_if_random, warn_of_weights
from specdec.checkpoints.folders import as_checkpoint_error
from specdec.draft.head import DraftHead
from specdec.errors import CheckpointError
from specdec.heads.files import HeadFiles
from specdec.heads.format import HeadFormat, Wanted
from specdec.heads.formats import formats
from specdec.heads.nextn_weights import fuse_experts, per_expert
from specdec.heads.open import read_config
from specdec.targets.shape import TargetShape


def build_head(files: HeadFiles, target: TargetShape, dtype: torch.dtype, device: torch.device) -> DraftHead:
    """Build the head in `files` for `target`, frozen. CheckpointError lists every problem."""
    kind = formats()[files.layout.algo]
    reading, config = read_config(files, target.num_layers)
    problems = reading.problems
    if config is None:
        raise CheckpointError(str(files.folder), problems)
    problems += _target_problems(kind.sizes(config), target)
    for doubt in reading.doubts:
        warnings.warn(f"{files.folder}: {doubt}", stacklevel=3)
    config = kind.with_own_copies(config, target, partial(_is_own, files, target))
    head = _make(kind, files, config, target, problems)
    wanted, optional = wanted_tensors(files, head)
    problems += head_problems(files, head, wanted, optional)
    if problems:
        raise CheckpointError(str(files.folder), problems)
    _fill(kind, files, head, wanted, target, dtype, device)
    warn_of_weights(head, str(files.folder))
    return head.eval().requires_grad_(False)


def _target_problems(sizes: tuple[int, int] | None, target: TargetShape) -> list[str]:
    """Compare the target's sizes in config.json with the target."""
    if sizes is None:
        return []
    (width, vocab_size), problems = sizes, []
    if width != target.hidden_size:
        problems.append(f"made for hidden size {width}, the target has {target.hidden_size}: another target's head")
    if vocab_size != target.vocab_size:
        problems.append(f"made for a vocabulary of {vocab_size}, the target has {target.vocab_size}")
    return problems


def _is_own(files: HeadFiles, target: TargetShape, name: str, module: Any) -> bool:
    """Return whether a stored [V, h] differs from the target's."""
    if not files.is_float(name, (target.vocab_size, module.weight.shape[1])):
        return False  # absent, or of a shape that is reported as a problem
    weight = target.rows_of(module)
    stored = files.read([name])[name]
    for again, ours in files.copies.items():
        if ours == name and not torch.equal(files.files.read([again])[again], stored):
            raise CheckpointError(
                str(files.folder), [f"{again} differs from {files.named(name)}: expected one for all"]
            )
    if is_copy(stored, weight):
        return False
    if name == "embed_tokens.weight":
        warn_if_random(stored, weight, str(files.folder))
    return True


def _make(kind: HeadFormat, files: HeadFiles, config: Any, target: TargetShape, problems: list[str]) -> DraftHead:
    """Make the head on the meta device; try it out if nothing is wrong with its config so far."""
    described = as_checkpoint_error(files.folder, "config.json describes a head that cannot be made")
    is_described = kind.sizes(config) is not None and not problems  # else made like the target, or refused already
    try:
        with described if is_described else nullcontext(), torch.device("meta"):
            head = kind.make(config, target)
    except CheckpointError:
        raise
    except ValueError as error:
        raise CheckpointError(str(files.folder), [*problems, str(error)]) from error
    if not problems:
        with as_checkpoint_error(files.folder, "config.json describes a head that cannot be made"):
            wrong = kind.try_out(head)
        if wrong:
            raise CheckpointError(str(files.folder), wrong)
    return head


def wanted_tensors(files: HeadFiles, head: DraftHead) -> tuple[Wanted, Wanted]:
    """Return (required tensors, optional tensors), with their shapes."""
    wanted: Wanted = {}
    for name, tensor in head.state_dict().items():
        parts = per_expert(name, tuple(tensor.shape)) if name not in files.found else {}
        wanted.update(parts or {name: tuple(tensor.shape)})
    return wanted, formats()[files.layout.algo].leave_out(files, head, wanted)


def head_problems(files: HeadFiles, head: DraftHead, wanted: Wanted, optional: Wanted) -> list[str]:
    """List what is wrong with the tensors of `files`, by name, shape and likely cause."""
    kind = formats()[files.layout.algo]
    problems = tensor_problems(wanted, optional, files.found, files.named, partial(kind.why, head))
    return problems + kind.value_problems(files, head, wanted)


@torch.no_grad()
def _fill(
    kind: HeadFormat,
    files: HeadFiles,
    head: DraftHead,
    wanted: Wanted,
    target: TargetShape,
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    """Load the weights of `head`: every tensor once, in its final dtype and place."""
    kept = kind.kept_dtypes(head, target)
    state: dict[str, torch.Tensor] = {}
    for name, tensor in head.state_dict().items():
        parts = per_expert(name, tuple(tensor.shape)) if name not in files.found else {}
        if name not in wanted and not parts:
            continue
        stored = fuse_experts(name, files.read(list(parts))) if parts else files.read([name])[name]
        to = kept.get(name, dtype) if stored.is_floating_point() else stored.dtype
        state[name] = stored.to(device=device, dtype=to, copy=True)  # never the file's own pages
    kind.complete(files, head, state, target, dtype, device)
    head.load_state_dict(state, assign=True)
    kind.finish(head, device)
