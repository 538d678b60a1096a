"""Heads out of opened files: makes them without memory, holds every tensor against them, then reads and assigns."""

import warnings
from dataclasses import replace
from typing import Any

import torch

from specdec.checkpoints.fitting import (
    ANOTHER_TARGET,
    full_vocab_ids,
    full_vocab_problems,
    is_copy,
    tensor_problems,
    vocab_problems,
    warn_if_random,
    warn_of_weights,
)
from specdec.checkpoints.folders import told_of
from specdec.errors import CheckpointError
from specdec.heads.base import DraftHead, layer_rope
from specdec.heads.eagle import EagleConfig, EagleHead
from specdec.heads.eagle3 import Eagle3Config, Eagle3Head
from specdec.heads.files import HeadConfig, HeadFiles
from specdec.heads.nextn import NextNConfig, NextNHead, full_attention_layer
from specdec.heads.nextn_weights import fuse_experts, per_expert
from specdec.targets.shape import TargetShape

Wanted = dict[str, tuple[int, ...]]


def build_head(files: HeadFiles, target: TargetShape, dtype: torch.dtype, device: torch.device) -> DraftHead:
    """The head in `files` for `target`, frozen. CheckpointError lists every problem."""
    reading, config = files.read_config(target.num_layers)
    problems = reading.problems
    if config is None:
        raise CheckpointError(str(files.folder), problems)
    problems += _target_problems(config, target)
    for doubt in reading.doubts:
        warnings.warn(f"{files.folder}: {doubt}", stacklevel=3)
    config = _with_own_copies(files, config, target)
    head = _make(files, config, target, problems)
    wanted, optional = wanted_tensors(files, head)
    problems += head_problems(files, head, wanted, optional)
    if problems:
        raise CheckpointError(str(files.folder), problems)
    _fill(files, head, wanted, target, dtype, device)
    warn_of_weights(head, str(files.folder))
    return head.eval().requires_grad_(False)


def _target_problems(config: HeadConfig, target: TargetShape) -> list[str]:
    """What config.json says of the target, against the target."""
    if isinstance(config, NextNConfig):
        return []
    width = config.target_hidden_size if isinstance(config, Eagle3Config) else config.layer.hidden_size
    problems = []
    if width != target.hidden_size:
        problems.append(f"made for hidden size {width}, the target has {target.hidden_size}: another target's head")
    if config.vocab_size != target.vocab_size:
        problems.append(f"made for a vocabulary of {config.vocab_size}, the target has {target.vocab_size}")
    return problems


def _with_own_copies(files: HeadFiles, config: HeadConfig, target: TargetShape) -> HeadConfig:
    """`config` with what the head keeps for itself: stored embeddings and heads that are not the target's."""
    if isinstance(config, EagleConfig):
        return replace(config, own_embedding=_is_own(files, "embed_tokens.weight", target.embed_tokens))
    if isinstance(config, Eagle3Config):
        is_narrow = config.layer.hidden_size != target.hidden_size
        return replace(config, own_embedding=is_narrow or _is_own(files, "embed_tokens.weight", target.embed_tokens))
    return replace(
        config,
        own_embedding=_is_own(files, "embed_tokens.weight", target.embed_tokens),
        own_head=_is_own(files, "lm_head.weight", target.lm_head),
    )


def _is_own(files: HeadFiles, name: str, module: Any) -> bool:
    """Whether a stored [V, h] differs from the target's."""
    if not files.is_float(name, tuple(module.weight.shape)):
        return False  # absent, or of a shape that is told as a problem
    stored = files.read([name])[name]
    for again, ours in files.copies.items():
        if ours == name and not torch.equal(files.files.read([again])[again], stored):
            raise CheckpointError(
                str(files.folder), [f"{again} differs from {files.named(name)}: expected one for all"]
            )
    if is_copy(stored, module.weight):
        return False
    if name == "embed_tokens.weight":
        warn_if_random(stored, module.weight, str(files.folder))
    return True


def _make(files: HeadFiles, config: HeadConfig, target: TargetShape, problems: list[str]) -> DraftHead:
    """The head on the meta device."""
    if isinstance(config, NextNConfig):
        assert target.model is not None, "an MTP layer is made like the live target's: TargetShape.model"
        try:
            with torch.device("meta"):
                return NextNHead(target.model, config)
        except ValueError as error:
            raise CheckpointError(str(files.folder), [*problems, str(error)]) from error
    if problems:  # sizes or ropes that were refused are not tried
        return _shell(config)
    with told_of(files.folder, "config.json describes a head that cannot be made"):
        head = _shell(config)
        _try_rope(files, head)
    return head


def _shell(config: EagleConfig | Eagle3Config) -> EagleHead | Eagle3Head:
    with torch.device("meta"):
        return EagleHead(config) if isinstance(config, EagleConfig) else Eagle3Head(config)


def _try_rope(files: HeadFiles, head: EagleHead | Eagle3Head) -> None:
    """CheckpointError if two positions cannot be told apart by finite tables as wide as a head."""
    c = head.config.layer
    cos, sin = layer_rope(c, torch.arange(2), torch.float32)
    if cos.shape[-1] != c.head_dim or not bool(torch.isfinite(cos).all() & torch.isfinite(sin).all()):
        said = f"rope_theta={c.rope_theta:g} and rope_scaling={c.rope_scaling}"
        raise CheckpointError(str(files.folder), [f"{said} give no finite angles for heads of {c.head_dim} elements"])


def wanted_tensors(files: HeadFiles, head: DraftHead) -> tuple[Wanted, Wanted]:
    """(tensors that must be there, tensors that may be), with their shapes."""
    wanted: Wanted = {}
    for name, tensor in head.state_dict().items():
        parts = per_expert(name, tuple(tensor.shape)) if name not in files.found else {}
        wanted.update(parts or {name: tuple(tensor.shape)})
    optional: Wanted = {"embed_tokens.weight": (head.vocab_size, head.hidden_size)}
    if isinstance(head, NextNHead):
        optional["lm_head.weight"] = (head.vocab_size, head.hidden_size)
    if isinstance(head, Eagle3Head):
        if files.raw.get("lm_head_from_target"):
            optional["lm_head.weight"] = wanted.pop("lm_head.weight")
        if _scores_all(head):  # the maps are identities, often left out or zero
            optional.update({name: wanted.pop(name) for name in ("d2t", "t2d")})
    return wanted, optional


def head_problems(files: HeadFiles, head: DraftHead, wanted: Wanted, optional: Wanted) -> list[str]:
    """What is wrong with the tensors of `files`, by name, shape and likely cause."""

    def why(name: str, shape: tuple[int, ...] | None) -> str:
        return _why(head, name, shape)

    problems = tensor_problems(wanted, optional, files.found, files.named, why) + _vocab_problems(files, wanted)
    if isinstance(head, Eagle3Head) and _scores_all(head):
        maps = _stored_maps(files, head)
        problems += full_vocab_problems(maps.get("d2t"), maps.get("t2d"))
    return problems


def _stored_maps(files: HeadFiles, head: Eagle3Head) -> dict[str, torch.Tensor]:
    """d2t and t2d, as far as they are stored in their shapes."""
    sizes = {"d2t": head.config.draft_vocab_size, "t2d": head.config.vocab_size}
    return files.read([name for name, size in sizes.items() if files.found.get(name, (None,))[0] == (size,)])


def _scores_all(head: Eagle3Head) -> bool:
    return head.config.draft_vocab_size == head.config.vocab_size


def _why(head: DraftHead, name: str, shape: tuple[int, ...] | None) -> str:
    """The likely cause of a problem with our tensor `name`; shape: what it has, None if it is missing."""
    if isinstance(head, NextNHead):
        return "" if name in ("embed_tokens.weight", "lm_head.weight") else "an MTP layer of another family or size"
    if shape is None:
        is_narrow = name == "embed_tokens.weight"
        return "absent embedding: the head's width differs from the target's, so it needs its own" if is_narrow else ""
    if name == "embed_tokens.weight":
        return "the vocabulary or the hidden size of another target"
    if name.endswith("layers.0.input_layernorm.weight") and head.algo == "eagle":
        return "the first layer of EAGLE-1/2 has no input norm"
    if name == "fc.weight" and len(shape) == 2:
        return _why_fc(head, shape)
    if name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight")) and name.startswith("midlayer"):
        return "the first layer of EAGLE-3 reads [embedding, feature], twice the head's width"
    if name == "lm_head.weight" or name in ("d2t", "t2d"):
        return "draft_vocab_size or vocab_size in config.json is not what the head was trained with"
    return "config.json and weights do not belong together" if name in head.state_dict() else ""


def _why_fc(head: DraftHead, shape: tuple[int, ...]) -> str:
    num_features, rest = divmod(shape[1], head.target_hidden_size)
    expected = 2 if head.algo == "eagle" else len(head.aux_layers)
    if rest or num_features == expected:
        return ANOTHER_TARGET
    return f"it reads {num_features} parts of {head.target_hidden_size}, where config.json and layout mean {expected}"


def _vocab_problems(files: HeadFiles, wanted: Wanted) -> list[str]:
    maps = [name for name in ("d2t", "t2d") if name in wanted]
    if not maps or any(name not in files.found or files.found[name][0] != wanted[name] for name in maps):
        return []
    read = files.read(maps)
    return vocab_problems(read["d2t"], read["t2d"])


@torch.no_grad()
def _fill(
    files: HeadFiles, head: DraftHead, wanted: Wanted, target: TargetShape, dtype: torch.dtype, device: torch.device
) -> None:
    """Give `head` its memory: every tensor once, in its final dtype and place."""
    kept = _kept_dtypes(head, target)
    state: dict[str, torch.Tensor] = {}
    for name, tensor in head.state_dict().items():
        parts = per_expert(name, tuple(tensor.shape)) if name not in files.found else {}
        if name not in wanted and not parts:
            continue
        stored = fuse_experts(name, files.read(list(parts))) if parts else files.read([name])[name]
        to = kept.get(name, dtype) if stored.is_floating_point() else stored.dtype
        state[name] = stored.to(device=device, dtype=to, copy=True)  # never the file's own pages
    if isinstance(head, Eagle3Head):
        _fill_eagle3(files, head, state, target, dtype, device)
    head.load_state_dict(state, assign=True)
    if isinstance(head, NextNHead):
        head.rotary = type(head.rotary)(config=head.hf_config).to(device)


def _fill_eagle3(
    files: HeadFiles,
    head: Eagle3Head,
    state: dict[str, torch.Tensor],
    target: TargetShape,
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    """What an EAGLE-3 file may leave out: maps that are identities, rows of the target's output head."""
    if "lm_head.weight" in files.found:
        state["lm_head.weight"] = files.read(["lm_head.weight"])["lm_head.weight"].to(device, dtype, copy=True)
    if _scores_all(head):
        d2t = _stored_maps(files, head).get("d2t")
        if d2t is not None and "lm_head.weight" in state:  # rows go where d2t leads: hot ids are ascending
            state["lm_head.weight"] = state["lm_head.weight"][full_vocab_ids(d2t).argsort().to(device)]
        state["d2t"] = torch.zeros(head.config.draft_vocab_size, dtype=torch.int64, device=device)
        state["t2d"] = torch.ones(head.config.vocab_size, dtype=torch.bool, device=device)
    if "lm_head.weight" not in state:
        rows = target.lm_head.get_parameter("weight").detach()
        hot = state["d2t"] + torch.arange(state["d2t"].numel(), device=device)
        state["lm_head.weight"] = rows[hot.to(rows.device)].to(device=device, dtype=dtype)


def _kept_dtypes(head: DraftHead, target: TargetShape) -> dict[str, torch.dtype]:
    """Dtypes of an MTP layer's tensors that transformers keeps in fp32 in the target's own layers, by our names."""
    if not isinstance(head, NextNHead):
        return {}
    layers = target.model.get_decoder().layers
    weight = target.embed_tokens.weight
    twin = layers[full_attention_layer(head.hf_config)].state_dict()
    kept = {name: t.dtype for name, t in twin.items() if t.dtype != weight.dtype}
    return {f"mtp.{m}.layer.{name}": dtype for m in range(head.num_modules) for name, dtype in kept.items()}
