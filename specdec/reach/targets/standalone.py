"""Standalone drafts: live causal LMs, admitted as targets are, that must have the target's vocabulary."""

import warnings
from pathlib import Path
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from specdec.core.errors import AttachError, CheckpointError
from specdec.core.text.prompts import tokenizer_fingerprint, tokenizer_match
from specdec.reach.checkpoints.folders import local_path, read_json
from specdec.reach.targets.hf import HFTarget
from specdec.reach.targets.pretrained import open_draft_model

NOTE = "specdec.json"  # beside an exported draft without a tokenizer: `tokenizer_sha256` of the target's
LOADED = frozenset({"_name_or_path", "dtype", "torch_dtype", "transformers_version"})  # config keys that may differ


def load_standalone(draft: str | Path | nn.Module, target: HFTarget, tokenizer: Any) -> HFTarget:
    """Attach the draft model. A folder or Hub id is loaded in the target's dtype onto its device.

    tokenizer: the target's, if known; it is compared with the draft's own. ValueError says what does not match,
    AttachError why the model cannot be run.
    """
    model, own = open_draft_model(draft, dtype=target.dtype, device=target.device)
    if model is target.model:
        raise ValueError("the draft is the target itself: it would propose what it then verifies; give a smaller model")
    assert isinstance(model, PreTrainedModel)
    _warn_if_same(model, target.model)
    check_vocabulary(model, target, own, tokenizer)
    if own is None and tokenizer is not None and not isinstance(draft, nn.Module):
        _check_note(draft, tokenizer)
    try:
        attached = HFTarget(model, keeps_latents=target.keeps_latents)
    except AttachError as error:
        raise AttachError(f"the draft, a {type(model).__name__}", error.reasons) from None
    if attached.device != target.device:
        attached.detach()
        raise ValueError(f"the draft is on {attached.device}, the target on {target.device}; move one of them")
    return attached


def _warn_if_same(model: PreTrainedModel, target: PreTrainedModel) -> None:
    """Warn of a draft that has the target's config and was loaded from the same place."""
    place = _place(target)
    if not target.name_or_path or _place(model) != place or _described(model) != _described(target):
        return
    warnings.warn(
        f"the draft is the same model as the target (a {type(target).__name__} of {place!r}): it drafts no faster than "
        "the target decodes, so nothing is gained. Give a smaller model of the same vocabulary, a trained head, or "
        "algo='lookup' without a draft; for MTP layers, the original repository that holds them",
        stacklevel=7,  # at the call of attach
    )


def _place(model: PreTrainedModel) -> str:
    """Return the folder that `model` was loaded from, or its Hub id."""
    path = local_path(model.name_or_path or ".")
    return str(path.resolve()) if path.exists() else str(model.name_or_path)


def _described(model: PreTrainedModel) -> dict[str, Any]:
    """Return the config of `model` without the keys that loading sets."""
    config = model.config.to_dict()
    return {name: value for name, value in config.items() if name not in LOADED}


def check_vocabulary(model: PreTrainedModel, target: HFTarget, own: Any, tokenizer: Any) -> None:
    """Raise ValueError unless ids mean the same tokens to both."""
    head = model.get_output_embeddings()
    if head is None:
        raise ValueError(f"the draft, a {type(model).__name__}, has no output head; expected a causal LM")
    size = head.weight.shape[0]
    if size != target.spec.vocab_size:
        raise ValueError(
            f"the draft scores {size} tokens, the target {target.spec.vocab_size}: the draft must have the target's "
            "vocabulary; use a model of the same family, or resize its embeddings"
        )
    match = tokenizer_match(tokenizer, own)
    if match not in (None, "equal"):
        raise ValueError(
            f"the draft's tokenizer is not the target's: {match}; its ids would mean other tokens. Use a draft with "
            "the target's tokenizer"
        )


def named_tokenizer(draft: str | Path) -> str | None:
    """Return the fingerprint of the tokenizer that a draft was trained with, from its folder's note, if any."""
    path = local_path(draft)
    folder = path if path.is_dir() else path.parent
    if not (folder / NOTE).is_file():
        return None
    named = read_json(folder, NOTE).get("tokenizer_sha256")
    if named is not None and not isinstance(named, str):
        raise CheckpointError(str(folder), [f"{NOTE} has tokenizer_sha256={named!r}: expected a string of 64 digits"])
    return named


def _check_note(draft: str | Path, tokenizer: Any) -> None:
    wanted, found = named_tokenizer(draft), tokenizer_fingerprint(tokenizer)
    if wanted is not None and wanted != found:
        raise ValueError(
            f"{NOTE} says the draft was trained with the tokenizer {wanted[:12]}…, the target's is {found[:12]}…: "
            "its ids would mean other tokens. Use a draft made for this target"
        )
