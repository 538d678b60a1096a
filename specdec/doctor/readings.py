"""A table of other ways to read a head: what each changes, and which defect it reveals where it helps.

Each alternative changes one thing, the head or its input. The list follows bug reports of heads that load without an
error and have almost no drafts accepted.
"""

import copy
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from specdec.doctor.rows import NORMED, Reading
from specdec.heads.base import DraftHead, LayerConfig
from specdec.heads.formats import formats

OFFICIAL_THETA = 10000.0  # what EAGLE-3's official trainer builds, whatever config.json says


@dataclass(frozen=True)
class TargetFacts:
    """Target facts for alternatives: layers, if un-normed states exist, embedding, rope (theta, scaling or None)."""

    num_layers: int
    has_unnormed: bool
    embed_tokens: nn.Module
    rope: tuple[float, dict[str, Any] | None] | None

    @classmethod
    def of(cls, model: PreTrainedModel) -> "TargetFacts":
        """Return the facts of `model`."""
        config = model.config.get_text_config()
        rope = getattr(config, "rope_parameters", None)
        found = None
        if isinstance(rope, dict) and rope.get("rope_theta") is not None:
            rest = {k: v for k, v in rope.items() if k != "rope_theta"}
            found = (float(rope["rope_theta"]), None if rest.get("rope_type", "default") == "default" else rest)
        has_norm = isinstance(getattr(model.get_decoder(), "norm", None), nn.Module)
        return cls(config.num_hidden_layers, has_norm, model.get_input_embeddings(), found)


def _copied(head: DraftHead) -> Any:
    """Return a copy to change; embeddings and output heads, which no alternative changes, stay shared."""
    shared = [m for m in (head.embed_tokens, head.lm_head) if m is not None]
    return copy.deepcopy(head, {id(m): m for m in shared})


Change = Callable[[Reading, TargetFacts], Reading | None]


@dataclass(frozen=True)
class Alternative:
    """One alternative. name: what it changes. defect: what is wrong if that repairs the draft, and what to do.

    change: returns None where it does not apply. leaks: the head is shown the token to predict, which no engine can do.
    """

    name: str
    defect: str
    change: Change
    leaks: bool = False


def _moved(token: int, feature: int) -> Change:
    return lambda reading, _: replace(reading, token_offset=token, feature_offset=feature)


def _swapped(reading: Reading, _: TargetFacts) -> Reading | None:
    head = _copied(reading.head)
    for name, module in head.named_modules():
        if re.fullmatch(formats()[head.algo].combining, name):
            weight = module.get_parameter("weight")
            weight.data = weight.data.roll(weight.shape[1] // 2, 1)
    return replace(reading, head=head)


def _layers_moved(by: int) -> Change:
    def change(reading: Reading, target: TargetFacts) -> Reading | None:
        sources = tuple(k + by for k in reading.sources)
        last = target.num_layers if target.has_unnormed else target.num_layers - 1
        if NORMED in reading.sources or not all(0 <= k <= last for k in sources):
            return None
        return replace(reading, sources=sources)

    return change


def _layers_reversed(reading: Reading, _: TargetFacts) -> Reading | None:
    return replace(reading, sources=reading.sources[::-1]) if len(reading.sources) > 1 else None


def _unnormed(reading: Reading, target: TargetFacts) -> Reading | None:
    if NORMED not in reading.sources or not target.has_unnormed:
        return None
    return replace(reading, sources=tuple(target.num_layers if k == NORMED else k for k in reading.sources))


def _recycled_otherwise(reading: Reading, _: TargetFacts) -> Reading | None:
    if isinstance(reading.head.out_norm(), nn.Identity):
        return None
    head = _copied(reading.head)
    head.recycles_normed = not head.recycles_normed
    return replace(reading, head=head)


def _absolute(reading: Reading, _: TargetFacts) -> Reading | None:
    stored = getattr(reading.head, "d2t", None)
    if stored is None or bool((stored < 0).any()) or bool((stored.diff() <= 0).any()):
        return None  # offsets may repeat; absolute ids do not
    head = _copied(reading.head)
    head.d2t = stored - torch.arange(stored.numel(), device=stored.device)
    return replace(reading, head=head)


def _with_rope(head: DraftHead, theta: float, scaling: dict[str, Any] | None) -> DraftHead | None:
    layer = getattr(getattr(head, "config", None), "layer", None)
    if not isinstance(layer, LayerConfig) or (layer.rope_theta, layer.rope_scaling) == (theta, scaling):
        return None
    changed = _copied(head)
    changed.config = replace(changed.config, layer=replace(layer, rope_theta=theta, rope_scaling=scaling))
    return changed


def _official_theta(reading: Reading, _: TargetFacts) -> Reading | None:
    head = _with_rope(reading.head, OFFICIAL_THETA, None)
    return None if head is None else replace(reading, head=head)


def _targets_theta(reading: Reading, target: TargetFacts) -> Reading | None:
    head = None if target.rope is None else _with_rope(reading.head, *target.rope)
    return None if head is None else replace(reading, head=head)


def _targets_embedding(reading: Reading, target: TargetFacts) -> Reading | None:
    own = reading.head.embed_tokens
    if own is None or own.get_parameter("weight").shape != target.embed_tokens.get_parameter("weight").shape:
        return None
    head = _copied(reading.head)
    head.embed_tokens = None
    return replace(reading, head=head)


# Where two repair equally well, the first is named.
ALTERNATIVES: tuple[Alternative, ...] = (
    Alternative(
        "embedding and feature swapped",
        "it was trained on the other order of embedding and feature: its checkpoint is read in the wrong order",
        _swapped,
    ),
    Alternative(
        "un-normed features",
        "it was trained on the last hidden state BEFORE the target's final norm: export it for normed states, or norm "
        "the features it is trained on",
        _unnormed,
    ),
    Alternative(
        "aux layers one lower",
        "its aux layer ids are one too high: in config.json id k is the stream after k layers, the output of layer k-1",
        _layers_moved(-1),
    ),
    Alternative(
        "aux layers one higher",
        "its aux layer ids are one too low: in config.json id k is the stream after k layers, the output of layer k-1",
        _layers_moved(1),
    ),
    Alternative(
        "aux layers high to low",
        "it was trained on aux layers from high to low; expected low to high",
        _layers_reversed,
    ),
    Alternative(
        "d2t holds absolute ids",
        "d2t holds absolute target ids; expected offsets (target id = draft id + d2t[draft id])",
        _absolute,
    ),
    Alternative(
        "the target's rope",
        "it was trained with the target's rope: set rope_theta and rope_scaling in its config.json to the target's",
        _targets_theta,
    ),
    Alternative(
        "rope theta 10000",
        "it was trained with rope theta 10000, as the official EAGLE-3 trainer does: set rope_theta in its config.json",
        _official_theta,
    ),
    Alternative(
        "the target's embedding",
        "its own embedding is not the one it was trained with (random, or of another vocabulary order): drop it from "
        "the checkpoint, so that the target's is used",
        _targets_embedding,
    ),
    Alternative(
        "state recycled after the other norm",
        "it was trained to be fed back its state on the other side of the out norm (recycles_normed, norm_output)",
        _recycled_otherwise,
    ),
    Alternative(
        "tokens not shifted",
        "it was trained with token p beside feature p; expected token p+1 beside feature p",
        _moved(-1, 0),
    ),
    Alternative(
        "features one earlier",
        "it was trained with features one token late: token p+1 beside feature p-1",
        _moved(0, -1),
    ),
    Alternative(
        "tokens one ahead",
        "it was trained with ids shifted twice, so that it saw the token it had to predict: train it again",
        _moved(1, 0),
        leaks=True,
    ),
    Alternative(
        "features one ahead",
        "it repeats what the feature that it is given says already: it was trained on features that knew the token it "
        "had to predict (p+1 beside p+1), or hardly at all; train it again",
        _moved(0, 1),
        leaks=True,
    ),
)
