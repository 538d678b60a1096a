"""config.json of block drafters in three dialects: z-lab's, DeepSpec's and SpecForge's, and speculators'."""

from collections.abc import Mapping
from typing import Any

from specdec.reach.heads.block import BlockConfig
from specdec.reach.heads.configs import AUX_LAYERS, is_sound, layers_json, read_layer
from specdec.reach.heads.eagle3_configs import proposal_json, with_defaults
from specdec.reach.heads.files import LM_HEAD, HeadFiles

KIND = "speculators_model_type"  # speculators' own key: dflash or dspark
GATES = {"vanilla": False, "gated": True}  # kinds of Markov terms
DSPARK = ("Qwen3DSparkModel", "DSparkDraftModel")


def read_config(files: HeadFiles, num_layers: int | None) -> BlockConfig | None:
    """Read config.json of any dialect for a target of `num_layers`; None if its values are invalid."""
    raw = files.raw
    is_speculators = KIND in raw
    at = "transformer_layer_config." if is_speculators else ""
    layer_raw = with_defaults(files, raw.get("transformer_layer_config")) if is_speculators else raw
    if layer_raw is None or not is_sound(files, layer_raw, at):
        return None
    said = {**raw, **(raw.get("dflash_config") or {})}
    layer = read_layer(files, layer_raw, "layers.0", bias_key="attention_bias")
    depth, vocab_size = files.count("layers"), layer_raw["vocab_size"]
    files.compare("num_hidden_layers", layer_raw.get("num_hidden_layers"), depth)
    has_mask = files.has("mask_embedding")
    for key, needed in (("block_size", True), ("mask_token_id", not has_mask)):
        if said.get(key) is None and needed:
            files.problems.append(f"config.json lacks {key!r} (an integer)")
    for key, fixed in (("logit_scale", 1), ("is_neox_style", True)):
        if said.get(key) not in (None, fixed):
            files.problems.append(f"config.json has {key}={said[key]}: expected {fixed}")
    rank, gated = _markov(files, said)
    return BlockConfig(
        layer=layer,
        target_hidden_size=raw.get("target_hidden_size") or layer.hidden_size,
        vocab_size=vocab_size,
        draft_vocab_size=raw.get("draft_vocab_size")
        or (files.shape("d2t") or files.shape(LM_HEAD) or (vocab_size,))[0],
        aux_layers=_aux_layers(files, said, num_layers),
        block_size=said.get("block_size") or 2,
        mask_token_id=_mask_token(files, said, vocab_size),
        num_layers=depth,
        causal=_is_causal(files, said, layer.window is not None),
        predicts_next=_predicts_next(files, said),
        has_mask_embedding=has_mask,
        markov_rank=rank,
        markov_gated=gated,
    )


def _mask_token(files: HeadFiles, said: Mapping[str, Any], vocab_size: int) -> int:
    token: int = said.get("mask_token_id") or 0
    if token >= vocab_size:
        files.problems.append(f"config.json has mask_token_id={token}: expected an id below vocab_size={vocab_size}")
    return token


def _is_causal(files: HeadFiles, said: Mapping[str, Any], slides: bool) -> bool:
    """Return whether rows of a block see only those before them. Without the key it follows from the layers: readers
    take sliding ones as causal, others as bidirectional."""
    stated = [said[key] for key in ("causal", "is_causal", "causal_head") if said.get(key) is not None]
    if not stated and said.get("sliding_window_non_causal") and slides:
        stated = [False]
    causal = bool(stated[0]) if stated else slides
    files.notes.append(f"block: {'causal' if causal else 'bidirectional'}" + ("" if stated else "; by its layers"))
    if slides and not causal:
        files.problems.append("a bidirectional block with a sliding window: expected a causal one, or full attention")
    return causal


def _predicts_next(files: HeadFiles, said: Mapping[str, Any]) -> bool:
    """Return whether a row predicts the token after its own position (DSpark) or its own (DFlash)."""
    value = said.get("sample_from_anchor")
    if value is None:
        kinds = (*(said.get("architectures") or ()), said.get(KIND), said.get("projector_type"))
        value = "dspark" in kinds or any(name in kinds for name in DSPARK)
    files.notes.append(f"row j of a block predicts the token {'after' if value else 'at'} its position")
    return bool(value)


def _markov(files: HeadFiles, said: Mapping[str, Any]) -> tuple[int, bool]:
    """Return the rank of the Markov term, 0 if there is none, and whether it is gated."""
    rank = said.get("markov_rank") or 0
    if not rank:
        return 0, False
    kind = said.get("markov_head_type") or "vanilla"
    if kind not in GATES:
        files.problems.append(f"config.json has markov_head_type={kind!r}: expected one of {sorted(GATES)}")
    return rank, GATES.get(kind, False)


def _aux_layers(files: HeadFiles, said: Mapping[str, Any], num_layers: int | None) -> tuple[int, ...]:
    """Return the layers whose OUTPUT is read; speculators' ids are one higher."""
    ours = said.get(AUX_LAYERS)
    shifted = said.get("aux_hidden_state_layer_ids")
    ids = ours or said.get("target_layer_ids") or [i - 1 for i in shifted or ()]
    if not ids:
        files.problems.append("config.json names no target layers: expected target_layer_ids")
        return (0,)
    last = (num_layers or max(ids) + 2) - 1
    if list(ids) != sorted(set(ids)) or not all(0 <= i < last for i in ids):
        files.problems.append(
            f"target layers {list(ids)} do not fit {last + 1} layers (ascending, of 0..{last - 1}): the head was "
            "trained on another target, or on the last layer's output, which transformers returns normed"
        )
    return tuple(ids)


def inexpressible(c: BlockConfig) -> list[str]:
    """List the features of a head that the dflash layout cannot express."""
    flags = {
        "a part of the vocabulary": c.draft_vocab_size < c.vocab_size,
        "target_hidden_size": c.target_hidden_size != c.layer.hidden_size,
    }
    return [name for name, is_set in flags.items() if is_set]


def dflash_json(c: BlockConfig, num_layers: int | None) -> dict[str, Any]:
    """Return config.json of z-lab's layout, with DeepSpec's keys for a Markov term. ValueError names what it cannot
    express. num_layers: the target's."""
    if found := inexpressible(c):
        raise ValueError(f"the dflash layout cannot express {', '.join(found)}; keep it in speculators-block")
    own = {"target_layer_ids": list(c.aux_layers), "mask_token_id": c.mask_token_id, "causal": c.causal}
    return {
        "architectures": ["DFlashDraftModel"],
        **layers_json(c.layer, c.num_layers, c.vocab_size),
        "block_size": c.block_size,
        "num_target_layers": num_layers,
        "dflash_config": own,
        **_dspark(c),
    }


def speculators_json(c: BlockConfig, verifier: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return config.json of speculators' layout. verifier: the target, see `proposal_json`."""
    kind = "dspark" if c.predicts_next else "dflash"
    return {
        "architectures": ["DSparkDraftModel" if c.predicts_next else "DFlashDraftModel"],
        KIND: kind,
        "transformer_layer_config": layers_json(c.layer, c.num_layers, c.vocab_size),
        "draft_vocab_size": c.draft_vocab_size,
        "target_hidden_size": c.target_hidden_size,
        "aux_hidden_state_layer_ids": [i + 1 for i in c.aux_layers],
        "mask_token_id": c.mask_token_id,
        "block_size": c.block_size,
        "causal": c.causal,
        **_dspark(c),
        "speculators_config": {**proposal_json(verifier), "algorithm": kind},
    }


def _dspark(c: BlockConfig) -> dict[str, Any]:
    kind = next(name for name, gated in GATES.items() if gated == c.markov_gated)
    markov = {"markov_rank": c.markov_rank, "markov_head_type": kind} if c.markov_rank else {}
    return {"sample_from_anchor": c.predicts_next, **markov}
