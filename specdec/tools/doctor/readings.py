"""Other ways to read a head, each with the defect that it reveals if it helps, and the search for those that do.

Each alternative changes one thing, the head or its input. The table follows bug reports of heads that load without an
error and whose drafts are almost never accepted.
"""

import copy
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from specdec.core.draft.head import BlockDraftHead, DraftHead, RecyclingHead
from specdec.reach.checkpoints.fitting import ABSOLUTE
from specdec.reach.heads.base import LayerConfig
from specdec.reach.heads.formats import formats
from specdec.tools.doctor.rows import NORMED, Agreement, Observed, Reading, agreement, final_norm

OFFICIAL_ROPE = (10000.0, None)  # what EAGLE-3's official trainer builds, whatever config.json says
LEAST_GAIN = 0.05  # accepted drafts of a chain of two; a smaller gain is not reported
USEFUL = 0.25  # in the same unit: the least score of a correctly read draft
LEAKS = 0.5  # share of rows; a head that is shown the answer repeats it more often

Change = Callable[[Reading, PreTrainedModel], Reading | None]


def _with(reading: Reading, **attributes: Any) -> Reading:
    """Return `reading` of a copy of its head with other `attributes`; embedding and output head stay shared."""
    shared = [m for m in (reading.head.embed_tokens, reading.head.lm_head) if m is not None]
    head = copy.deepcopy(reading.head, {id(m): m for m in shared})
    for name, value in attributes.items():
        setattr(head, name, value)
    return replace(reading, head=head)


def _swapped(reading: Reading, _: PreTrainedModel) -> Reading | None:
    if isinstance(reading.head, BlockDraftHead):
        return None  # no layer of it reads both
    changed = _with(reading)
    for name, module in changed.head.named_modules():
        if re.fullmatch(formats()[changed.head.algo].combining, name):
            weight = module.get_parameter("weight")
            weight.data = weight.data.roll(weight.shape[1] // 2, 1)
    return changed


def _layers_moved(by: int) -> Change:
    def change(reading: Reading, model: PreTrainedModel) -> Reading | None:
        sources = tuple(k + by for k in reading.sources)
        is_known = all(0 <= k <= _num_layers(model) - (final_norm(model) is None) for k in sources)
        return replace(reading, sources=sources) if is_known and NORMED not in reading.sources else None

    return change


def _unnormed(reading: Reading, model: PreTrainedModel) -> Reading | None:
    if NORMED not in reading.sources or final_norm(model) is None:
        return None
    return replace(reading, sources=tuple(_num_layers(model) if k == NORMED else k for k in reading.sources))


def _num_layers(model: PreTrainedModel) -> int:
    return int(model.config.get_text_config().num_hidden_layers)


def _recycled_otherwise(reading: Reading, _: PreTrainedModel) -> Reading | None:
    if not isinstance(reading.head, RecyclingHead) or isinstance(reading.head.out_norm(), nn.Identity):
        return None
    return _with(reading, recycles_normed=not reading.head.recycles_normed)


def _block(attribute: str) -> Change:
    def change(reading: Reading, _: PreTrainedModel) -> Reading | None:
        is_block = isinstance(reading.head, BlockDraftHead)
        return _with(reading, **{attribute: not getattr(reading.head, attribute)}) if is_block else None

    return change


def _absolute(reading: Reading, _: PreTrainedModel) -> Reading | None:
    stored = getattr(reading.head, "d2t", None)
    if stored is None or bool((stored < 0).any()) or bool((stored.diff() <= 0).any()):
        return None  # offsets may repeat; absolute ids do not
    return _with(reading, d2t=stored - torch.arange(stored.numel(), device=stored.device))


def _with_rope(reading: Reading, theta: float, scaling: dict[str, Any] | None) -> Reading | None:
    config: Any = getattr(reading.head, "config", None)
    layer = getattr(config, "layer", None)
    if not isinstance(layer, LayerConfig) or (layer.rope_theta, layer.rope_scaling) == (theta, scaling):
        return None
    return _with(reading, config=replace(config, layer=replace(layer, rope_theta=theta, rope_scaling=scaling)))


def _targets_rope(reading: Reading, model: PreTrainedModel) -> Reading | None:
    rope = getattr(model.config.get_text_config(), "rope_parameters", None)
    if not isinstance(rope, dict) or rope.get("rope_theta") is None:
        return None
    rest = {k: v for k, v in rope.items() if k != "rope_theta"}
    return _with_rope(
        reading, float(rope["rope_theta"]), rest if rest.get("rope_type", "default") != "default" else None
    )


def _targets_embedding(reading: Reading, model: PreTrainedModel) -> Reading | None:
    own, theirs = reading.head.embed_tokens, model.get_input_embeddings().get_parameter("weight")
    return None if own is None or own.weight.shape != theirs.shape else _with(reading, embed_tokens=None)


@dataclass(frozen=True)
class Alternative:
    """One alternative. name: what it changes. defect: the cause if it repairs the draft, and what to do.

    change: returns None where it does not apply. leaks: the head is shown the token to predict, which no engine can do.
    """

    name: str
    defect: str
    change: Change
    leaks: bool = False


# Of equally good repairs, the first is named.
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
        lambda reading, _: replace(reading, sources=reading.sources[::-1]) if len(reading.sources) > 1 else None,
    ),
    Alternative(
        "d2t holds absolute ids",
        ABSOLUTE,
        _absolute,
    ),
    Alternative(
        "the target's rope",
        "it was trained with the target's rope: set rope_theta and rope_scaling in its config.json to the target's",
        _targets_rope,
    ),
    Alternative(
        "rope theta 10000",
        "it was trained with rope theta 10000, as the official EAGLE-3 trainer does: set rope_theta in its config.json",
        lambda reading, _: _with_rope(reading, *OFFICIAL_ROPE),
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
        "the other mask in blocks",
        "its blocks were trained with the other mask: set causal in its config.json (dflash_config)",
        _block("causal"),
    ),
    Alternative(
        "rows predict the other position",
        "its rows were trained to predict the token at the other position, their own or the next: set "
        "sample_from_anchor in its config.json",
        _block("predicts_next"),
    ),
    Alternative(
        "tokens not shifted",
        "it was trained with token p beside feature p; expected token p+1 beside feature p",
        lambda reading, _: replace(reading, token_offset=-1),
    ),
    Alternative(
        "features one earlier",
        "it was trained with features one token late: token p+1 beside feature p-1",
        lambda reading, _: replace(reading, feature_offset=-1),
    ),
    Alternative(
        "tokens one ahead",
        "it was trained with ids shifted twice, so that it saw the token it had to predict: train it again",
        lambda reading, _: replace(reading, token_offset=1),
        leaks=True,
    ),
    Alternative(
        "features one ahead",
        "it repeats what its input feature already contains: it was trained on features that knew the token it "
        "had to predict (p+1 beside p+1), or hardly at all; train it again",
        lambda reading, _: replace(reading, feature_offset=1),
        leaks=True,
    ),
)


@dataclass(frozen=True)
class Trial:
    """An alternative and the draft's agreement under it."""

    alternative: Alternative
    agreement: Agreement


def search(
    head: DraftHead, model: PreTrainedModel, texts: Sequence[Observed]
) -> tuple[Agreement, list[Trial], list[Trial]]:
    """Return (agreement as the engine reads it, all trials, repairs: one trial per defect, each on top of the last).

    A trial repairs if clearly more drafts of a chain of two are accepted under it. One that leaks ends the search.
    """
    now: Reading | None = Reading.of(head)
    base = current = agreement(Reading.of(head), model, texts)
    trials, repairs = list[Trial](), list[Trial]()
    while now is not None:
        used = [trial.alternative for trial in repairs]
        changed = ((a, a.change(now, model)) for a in ALTERNATIVES if a not in used and not (a.leaks and used))
        tried = [Trial(a, agreement(reading, model, texts)) for a, reading in changed if reading is not None]
        trials, best = trials or tried, _best(tried, current)
        if best is None:
            break
        repairs.append(best)
        now = None if best.alternative.leaks else best.alternative.change(now, model)
        current = best.agreement
    return base, trials, repairs


def doubts(trials: Sequence[Trial], base: Agreement) -> list[str]:
    """Return a remark on the reading that seems to gain most over `base`, though it may be chance; [] if there is
    none."""
    gaining = [t for t in trials if not t.alternative.leaks and _is_clear(t.agreement, base, num_errors=1.5)]
    best = max(gaining, key=lambda t: t.agreement.score, default=None)
    if best is None:
        return []
    return [
        f"it may read better with {best.alternative.name!r} ({best.agreement.score:.2f} of two drafts accepted, not "
        f"{base.score:.2f}); {base.num_rows} rows are too few to tell, give more prompts"
    ]


def _best(trials: Sequence[Trial], base: Agreement) -> Trial | None:
    """Return the trial that clearly gains most over `base`. One that leaks must gain twice what others do and be right
    in most rows, since any head does better when it is shown the answer."""
    clear = [t for t in trials if _is_clear(t.agreement, base)]
    honest = [t for t in clear if not t.alternative.leaks]
    best = max(honest, key=lambda t: t.agreement.score, default=None)
    least = base.score if best is None else 2 * best.agreement.score - base.score
    leaks = [t for t in clear if t.alternative.leaks and t.agreement.first > LEAKS and t.agreement.score > least]
    return max(leaks, key=lambda t: t.agreement.score, default=best)


def _is_clear(found: Agreement, base: Agreement, num_errors: float = 3) -> bool:
    gain, error = found.gain_over(base)
    return found.score > USEFUL and gain > max(LEAST_GAIN, num_errors * error)
