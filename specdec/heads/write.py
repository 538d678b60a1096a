"""Writes draft heads: config.json and model.safetensors of each layout, from the head alone."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from specdec.checkpoints.replacing import check_free, write_checkpoint
from specdec.draft.head import DraftHead
from specdec.heads.custom_generate import write_custom_generate
from specdec.heads.formats import formats, layouts


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
    """Write `head` to `folder` (config.json, model.safetensors, custom_generate/generate.py), floats as `dtype`.

    layout: "eagle", "eagle3" (official), "speculators" or "nextn" (DeepSeek-V3's names); None: the official one, or
    speculators for an EAGLE-3 head that the official one cannot express. lm_head_from_target leaves out EAGLE-3's
    lm_head, whose rows must then be the target's. verifier: speculators' `speculators_config.verifier`, the target.
    num_layers: the target's; if given, aux ids that are every reader's default are left out. Embeddings and output
    heads shared with the target are not stored. overwrite: replace a checkpoint in `folder`. ValueError names what a
    layout cannot express, or what is in `folder`.
    """
    kind = formats()[head.algo]
    name = layout or kind.default_layout(head)
    if name not in kind.written:
        raise ValueError(f"layout={name!r}: expected one of {kind.written} for a head of {head.algo!r}")
    if lm_head_from_target and not kind.shares_lm_head_rows:
        raise ValueError(f"lm_head_from_target=True: a head of {head.algo!r} has no lm_head of its own to leave out")
    check_free(folder, overwrite)
    config = kind.config_json(name, head, lm_head_from_target, verifier, num_layers)
    state = {n: t.detach().cpu() for n, t in head.state_dict().items()}
    if lm_head_from_target:
        del state["lm_head.weight"]
    weights = dict(head.named_parameters(remove_duplicate=False))  # buffers that transformers keeps in fp32 stay so
    state = {n: t.to(dtype) if n in weights else t for n, t in state.items()}
    state, depth = kind.to_write(head, state)
    named = {layouts()[name].theirs(n, depth): t.contiguous() for n, t in state.items()}
    write_checkpoint(folder, config, named)
    write_custom_generate(folder)
