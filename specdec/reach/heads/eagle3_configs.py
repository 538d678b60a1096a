"""config.json of EAGLE-3 heads, in the official layout (SafeAILab, SpecForge, SGLang) and in speculators' (vLLM)."""

from collections.abc import Mapping
from typing import Any

from transformers import AutoConfig

from specdec.reach.heads.base import LayerConfig
from specdec.reach.heads.configs import AUX_IDS, AUX_LAYERS, SIZES, is_sound, layer_json, layers_json, read_layer
from specdec.reach.heads.eagle3 import Eagle3Config, default_aux_layers
from specdec.reach.heads.files import LM_HEAD, HeadFiles


def read_config(files: HeadFiles, num_layers: int | None) -> Eagle3Config | None:
    """Read config.json of either layout for a target of `num_layers`; None if its values are invalid."""
    raw, is_official = files.raw, files.layout.name == "eagle3"
    at = "" if is_official else "transformer_layer_config."
    layer_raw = raw if is_official else with_defaults(files, raw.get("transformer_layer_config"))
    if layer_raw is None or not is_sound(files, layer_raw, at):
        return None
    layer = read_layer(files, layer_raw, "midlayer", bias_key="attention_bias")
    vocab_size, depth = layer_raw["vocab_size"], 1 + files.count("additional_layers")
    stated = layer_raw.get("num_hidden_layers")
    if is_official:
        files.compare("num_hidden_layers", stated, depth)
        flags = _official_flags(files, layer)
    else:
        if stated not in (None, depth):
            files.problems.append(f"num_hidden_layers={stated}, but {depth} have tensors")
        flags = _speculators_flags(files)
    scored = (files.shape(LM_HEAD) or files.shape("d2t") or (vocab_size,))[0]
    files.notes.append(f"recycled state: {'after' if flags.get('recycles_normed') else 'before'} the out norm")
    return Eagle3Config(
        layer=layer,
        target_hidden_size=raw.get("target_hidden_size") or layer.hidden_size,
        vocab_size=vocab_size,
        draft_vocab_size=raw.get("draft_vocab_size") or scored,
        aux_layers=_aux_layers(files, num_layers),
        num_layers=depth,
        **flags,
    )


def _official_flags(files: HeadFiles, layer: LayerConfig) -> dict[str, bool]:
    """Read flags of Eagle3Config from the official layout. `norm_output` (SpecForge) only says there that a norm
    precedes lm_head, which is always so: states before it are recycled."""
    raw = files.raw
    for key in ("norm_before_residual", "norm_before_fc"):
        if raw.get(key):
            files.problems.append(f"config.json sets {key}: this layout cannot express it; expected layers.0.* tensors")
    if "norm_output" in raw:
        files.notes.append(f"norm_output={raw['norm_output']}: here only that lm_head reads normed states")
    if layer.rope_theta != 10000.0 and "LlamaForCausalLMEagle3" not in (raw.get("architectures") or ()):
        files.notes.append("SafeAILab's EAGLE-3 trainer used rope theta 10000 whatever config.json says")
    return {"fc_norm": files.flag("fc_norm", "fc_norm", absent=None)}


def _speculators_flags(files: HeadFiles) -> dict[str, bool]:
    """Read flags of Eagle3Config from speculators' layout: false where config.json does not say. `norm_output` recycles
    states AFTER the norm."""
    for key in ("norm_before_residual", "norm_output"):
        if key not in files.raw:
            files.notes.append(f"{key}: false; config.json does not say")
    return {
        "norm_before_residual": bool(files.raw.get("norm_before_residual")),
        "norm_before_fc": files.flag("norm_before_fc", "input_norm"),
        "fc_norm": files.flag("fc_norm", "fc_norm"),
        "recycles_normed": bool(files.raw.get("norm_output")),
    }


def with_defaults(files: HeadFiles, raw: Any) -> dict[str, Any] | None:
    """Return `transformer_layer_config` completed by the defaults of its config class, which files leave out."""
    if not isinstance(raw, dict):
        files.problems.append("config.json lacks 'transformer_layer_config' (an object)")
        return None
    kind = raw.get("model_type", "llama")
    if kind not in ("llama", "qwen3"):
        files.problems.append(f"transformer_layer_config.model_type={kind!r}: expected llama or qwen3")
        return None
    keys = {*SIZES, "rms_norm_eps", "use_sliding_window"}
    keys |= {"num_key_value_heads", "head_dim"} if kind == "qwen3" else set()  # Llama's follow from others
    defaults = AutoConfig.for_model(kind).to_dict()
    return {**{key: defaults[key] for key in keys if key in defaults}, **raw}


def _aux_layers(files: HeadFiles, num_layers: int | None) -> tuple[int, ...]:
    """Return the layers whose OUTPUT is read. A file's id k means the residual stream after k layers: layer k-1.

    vLLM and others read ids so; SGLang adds one to each. The paper's own layers are recognised in either spelling, and
    our own key names the layers themselves.
    """
    eagle = files.raw.get("eagle_config") or {}
    if eagle.get("use_aux_hidden_state") is False:
        files.problems.append("use_aux_hidden_state=False: expected a head that reads outputs of several layers")
    ids, own = list(eagle.get(AUX_IDS) or files.raw.get(AUX_IDS) or ()), files.raw.get(AUX_LAYERS) or ()
    ours = [i + 1 for i in own]
    is_ours = bool(ours) and ids in ([], ours)
    ids = ours if is_ours else ids
    if not ids:
        files.notes.append("aux layer ids: the default [2, n//2, n-3] of a target of n layers")
        try:
            return default_aux_layers(num_layers) if num_layers else (0, 1, 2)
        except ValueError as error:
            files.problems.append(str(error))
            return (0, 1, 2)
    files.notes.append(f"aux layer ids: {ids}, from {AUX_LAYERS if is_ours else AUX_IDS}")
    last = (num_layers or max(ids) + 1) - 1
    if ids != sorted(set(ids)) or not all(1 <= i <= last for i in ids):
        files.problems.append(
            f"aux layer ids {ids} do not fit {last + 1} layers (ascending, of 1..{last}): "
            "the head was trained on another target, or on the last layer's output, which transformers returns normed"
        )
    elif not is_ours and num_layers and ids == [1, num_layers // 2 - 1, num_layers - 4]:
        files.notes.append("aux layer ids are the paper's layers as SGLang counts them: taken as outputs of layers")
        return tuple(ids)
    return tuple(i - 1 for i in ids)


def inexpressible(c: Eagle3Config) -> list[str]:
    """List the features of a head that the official EAGLE-3 layout cannot express."""
    flags = {
        "norm_before_residual": c.norm_before_residual,
        "norm_before_fc": c.norm_before_fc,
        "norm_output (recycles_normed)": c.recycles_normed,
        "sliding_window": c.layer.window is not None,
        "q_norm and k_norm (qwen3)": c.layer.qk_norm,
        f"{c.num_layers} layers": c.num_layers > 1,
    }
    return [name for name, is_set in flags.items() if is_set]


def official_json(c: Eagle3Config, lm_head_from_target: bool) -> dict[str, Any]:
    """Return config.json of the official EAGLE-3 layout, like SpecForge's. ValueError names what it cannot express."""
    flags = inexpressible(c)
    if flags:
        raise ValueError(f"the official EAGLE-3 layout cannot express {', '.join(flags)}; keep it in speculators'")
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "num_hidden_layers": 1,
        "target_hidden_size": c.target_hidden_size,
        **layer_json(c.layer),
        "attention_bias": c.layer.qkv_bias,
        "vocab_size": c.vocab_size,
        "draft_vocab_size": c.draft_vocab_size,
        "tie_word_embeddings": False,
        "fc_norm": c.fc_norm,
        "lm_head_from_target": lm_head_from_target,
        "eagle_config": {**_aux_ids(c), "use_aux_hidden_state": True},
        AUX_LAYERS: list(c.aux_layers),
    }


def speculators_json(c: Eagle3Config) -> dict[str, Any]:
    """Return config.json of speculators' EAGLE-3 layout, except for `proposal_json`."""
    return {
        "architectures": ["Eagle3DraftModel"],
        "speculators_model_type": "eagle3",
        "transformer_layer_config": layers_json(c.layer, c.num_layers, c.vocab_size),
        "draft_vocab_size": c.draft_vocab_size,
        "target_hidden_size": None if c.target_hidden_size == c.layer.hidden_size else c.target_hidden_size,
        "norm_before_residual": c.norm_before_residual,
        "norm_before_fc": c.norm_before_fc,
        "fc_norm": c.fc_norm,
        "norm_output": c.recycles_normed,
        "embed_requires_grad": False,
        **_aux_ids(c),
        AUX_LAYERS: list(c.aux_layers),
    }


def proposal_json(verifier: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return `speculators_config`: how to draft, and for which target ({"name_or_path", "architectures"})."""
    greedy = {"proposal_type": "greedy", "speculative_tokens": 3, "verifier_accept_k": 1, "accept_tolerance": 0.0}
    return {
        "algorithm": "eagle3",
        "default_proposal_method": "greedy",
        "proposal_methods": [greedy],
        "verifier": dict(verifier or {"name_or_path": None, "architectures": []}),
    }


def _aux_ids(c: Eagle3Config) -> dict[str, list[int]]:
    """Return aux ids as files count them: the residual stream after k layers is the output of layer k-1."""
    return {AUX_IDS: [i + 1 for i in c.aux_layers]}
