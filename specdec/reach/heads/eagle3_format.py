"""EAGLE-3 checkpoints: SafeAILab's layout (arXiv 2503.01840), which SpecForge and SGLang write too, and vLLM's."""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Any

import torch

from specdec.reach.checkpoints.fitting import full_vocab_problems, target_ids, vocab_problems
from specdec.reach.heads import fresh
from specdec.reach.heads.base import HotVocabHead
from specdec.reach.heads.configs import AUX_IDS
from specdec.reach.heads.eagle3 import Eagle3Head, default_aux_layers
from specdec.reach.heads.eagle3_configs import (
    inexpressible,
    official_json,
    proposal_json,
    read_config,
    speculators_json,
)
from specdec.reach.heads.eagle_format import why_of_eagle
from specdec.reach.heads.files import EMBEDDING, LM_HEAD, HeadFiles, shapes_of
from specdec.reach.heads.format import HeadFormat, Layout, Saving, Stored, Tensors, Training, same
from specdec.reach.targets.shape import TargetShape

MAX_EXTRA_LAYERS = 16  # beyond the first
_SHARED = same("fc.", "fc_norm.", "input_norm.", "norm.", "lm_head.", "embed_tokens.", "d2t", "t2d")
OFFICIAL = Layout("eagle3", "eagle3", r"midlayer\.", (*same("midlayer.", "additional_layers."), *_SHARED))
SPECULATORS = Layout(
    "speculators",
    "eagle3",
    mark=r"layers\.0\.hidden_norm\.|d2t$",
    prefixes=(
        ("layers.0.", "midlayer."),
        *((f"layers.{i + 1}.", f"additional_layers.{i}.") for i in range(MAX_EXTRA_LAYERS)),
        *_SHARED,
    ),
)


def read(files: HeadFiles, target: TargetShape | None) -> Stored | None:
    """Read the head in `files`; see `HeadFormat`. `lm_head.weight` may be absent where config.json says
    `lm_head_from_target`, and the maps d2t and t2d of a head that scores all tokens."""
    config = files.parse(read_config, target and target.num_layers)
    if config is None:
        return None
    width, vocab_size = config.layer.hidden_size, config.vocab_size
    files.check_target(target, config.target_hidden_size, vocab_size)
    is_narrow = target is not None and width != target.hidden_size
    head = files.make(Eagle3Head, replace(config, own_embedding=is_narrow or files.is_own(EMBEDDING, target)))
    wanted, scores_all = shapes_of(head), config.draft_vocab_size == vocab_size
    rows_fit = width == config.target_hidden_size
    derived = [LM_HEAD] if files.raw.get("lm_head_from_target") and rows_fit else []
    derived += ["d2t", "t2d"] if scores_all else []
    optional = {EMBEDDING: (vocab_size, width)} | {name: wanted.pop(name) for name in derived}
    files.check(wanted, optional, partial(_why, head))
    return Stored(head, hot_tensors(files, head, list(wanted), hot_maps(files, head), target))


def hot_maps(files: HeadFiles, head: HotVocabHead) -> Tensors:
    """Read d2t and t2d, if present; their problems are added to `files.problems`."""
    maps = files.read([n for n in ("d2t", "t2d") if files.shape(n) == tuple(head.get_buffer(n).shape)])
    if head.d2t.shape[0] == head.vocab_size:
        files.problems += full_vocab_problems(maps.get("d2t"), maps.get("t2d"))
    elif len(maps) == 2:
        files.problems += vocab_problems(**maps)
    return maps


def hot_tensors(
    files: HeadFiles, head: HotVocabHead, wanted: list[str], maps: Tensors, target: TargetShape | None
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield a head's tensors: those of `wanted` that the files have, the maps d2t and t2d, and its lm_head, if it has
    one, in the target's order if it scores all tokens."""
    yield from files.items([name for name in wanted if name not in (LM_HEAD, "d2t", "t2d")])
    order, scored = None, head.d2t.shape[0]
    if scored == head.vocab_size:
        order = target_ids(maps["d2t"]).argsort() if "d2t" in maps else None
        maps = {"d2t": torch.zeros(scored, dtype=torch.int64), "t2d": torch.ones(scored, dtype=torch.bool)}
    yield from maps.items()
    if head.lm_head is None:
        return
    if LM_HEAD in files.found:
        rows = files.read([LM_HEAD])[LM_HEAD]
        yield LM_HEAD, rows if order is None else rows[order]
    else:
        assert target is not None, "the rows of lm_head are its target's"
        rows = target.lm_head_rows()
        yield LM_HEAD, rows[target_ids(maps["d2t"]).to(rows.device)]


def _why(head: Eagle3Head, name: str, shape: tuple[int, ...] | None) -> str:
    if shape is not None and name in (LM_HEAD, "d2t", "t2d"):
        return "draft_vocab_size or vocab_size in config.json is not what the head was trained with"
    if shape is not None and name in [f"midlayer.self_attn.{part}_proj.weight" for part in "qkv"]:
        return "the first layer of EAGLE-3 reads [embedding, feature], twice the head's width"
    return why_of_eagle(head, len(head.aux_layers), name, shape)


def write(head: Eagle3Head, saving: Saving) -> tuple[dict[str, Any], Tensors]:
    """Return config.json and the tensors. ValueError names what the layout cannot express."""
    own, theirs = head.hidden_size, head.target_hidden_size
    if saving.lm_head_from_target and own != theirs:
        raise ValueError(
            f"lm_head_from_target=True: the head is {own} wide, but its target's rows {theirs}: they do not fit"
        )
    if saving.layout == "eagle3":
        config = official_json(head.config, saving.lm_head_from_target)
    else:
        ours = {"lm_head_from_target": True} if saving.lm_head_from_target else {}
        config = {**speculators_json(head.config), **ours, "speculators_config": proposal_json(saving.verifier)}
    depth = saving.num_layers or 0
    if depth > 7 and head.aux_layers == default_aux_layers(depth):
        # every reader's default is left out: SGLang counts given ids differently from vLLM
        config.get("eagle_config", config).pop(AUX_IDS)
    tensors = head.state_dict()
    if saving.lm_head_from_target:
        del tensors[LM_HEAD]
    return config, tensors


EAGLE3 = HeadFormat(
    algo="eagle3",
    layouts=(OFFICIAL, SPECULATORS),
    read=read,
    write=write,
    fresh=partial(fresh.hot_head, fresh.eagle3_config, fresh.new_eagle3),
    written=lambda head: ("speculators", "eagle3") if inexpressible(head.config) else ("eagle3", "speculators"),
    training=Training(
        MappingProxyType({}),
        frozenset({"intermediate_size", "num_layers", "draft_vocab_size", "aux_layers"}),
        "EAGLE-3 draft head",
        "Official EAGLE-3 layout, for targets of the same hidden size, vocabulary and layers.",
    ),
    features="aux",
    shares_lm_head_rows=True,
    combining=r"midlayer\.self_attn\.[qkv]_proj",
)
