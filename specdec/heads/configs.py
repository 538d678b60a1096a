"""Reads the config.json of EAGLE heads together with their tensors' shapes; notes where each value came from.

Nothing here sees the target: its sizes are passed as numbers, or as None where a checkpoint is only inspected.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from transformers import AutoConfig

from specdec.checkpoints.tensors import Shapes
from specdec.heads.base import LayerConfig
from specdec.heads.eagle import EagleConfig
from specdec.heads.eagle3 import Eagle3Config, default_aux_layers
from specdec.heads.layouts import AUX_IDS, AUX_LAYERS
from specdec.heads.schema import AUX, HEAD, ROPE_NEEDS, layer_problems, value_problems

ROPE_TYPES = tuple(sorted(ROPE_NEEDS))  # those that follow from the config alone, not from a sequence's length
SIZES = ("hidden_size", "intermediate_size", "num_attention_heads", "vocab_size")


@dataclass
class Reading:
    """A config being read. tensors: shapes by OUR names. num_layers: the target's, if known.

    problems: why the head cannot be read. doubts: where config.json contradicts the tensors, which then win.
    """

    raw: Mapping[str, Any]
    tensors: Shapes
    num_layers: int | None = None
    notes: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    doubts: list[str] = field(default_factory=list)

    def has(self, prefix: str) -> bool:
        """Return whether there is a tensor of this name, or below it."""
        return any(name == prefix or name.startswith(prefix + ".") for name in self.tensors)

    def count(self, prefix: str) -> int:
        """Return the number of numbered modules below `prefix`."""
        below = (n.removeprefix(prefix + ".").split(".")[0] for n in self.tensors if n.startswith(prefix + "."))
        return len({number for number in below if number.isdigit()})

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of our tensor `name`, () if there is none."""
        return self.tensors[name][0] if name in self.tensors else ()

    def compare(self, key: str, stated: Any, found: int) -> None:
        """Note a doubt if `stated`, the value of `key`, differs from what the tensors say, which wins."""
        if stated is not None and stated != found:
            self.doubts.append(f"config.json has {key}={stated}, the tensors say {found}, which is taken")

    def flag(self, key: str, tensor: str, absent: bool | None = False) -> bool:
        """Return whether `tensor` exists; a problem if the bool `key` says otherwise.

        A missing key means `absent`; None: whatever the tensors say.
        """
        has_tensor = self.has(tensor)
        value = self.raw.get(key, absent)
        if key not in self.raw and (value or has_tensor):
            taken = has_tensor if absent is None else absent
            self.notes.append(f"{key}: {str(taken).lower()}; config.json does not say")
        if value is not None and bool(value) != has_tensor:
            whence = f"{key}={value}" if key in self.raw else f"no {key!r}, which means {str(value).lower()}"
            self.problems.append(
                f"config.json has {whence}, but there is {'a' if has_tensor else 'no'} tensor {tensor}"
            )
        return has_tensor


def eagle_config(reading: Reading) -> EagleConfig | None:
    """Read the config of an EAGLE-1/2 head; None if it cannot be made.

    `bias` of fc is true where config.json does not say, as in the official reader; fc.bias must agree.
    """
    if not _is_sound(reading, reading.raw):
        return None
    has_bias = reading.flag("bias", "fc.bias", absent=True)
    layer = _layer(reading, reading.raw, "layers.0", bias_key="qkv_bias")
    num_layers = max(1, reading.count("layers"))
    reading.compare("num_hidden_layers", reading.raw.get("num_hidden_layers"), num_layers)
    return EagleConfig(layer, reading.raw["vocab_size"], has_bias, num_layers)


def eagle3_config(reading: Reading) -> Eagle3Config | None:
    """Read the config of an EAGLE-3 head in the official layout (SafeAILab, SpecForge); None if impossible.

    `norm_output` (SpecForge) only says that a norm precedes lm_head, which is always so: states before it are recycled.
    """
    raw = reading.raw
    if not _is_sound(reading, raw):
        return None
    for key in ("norm_before_residual", "norm_before_fc"):
        if raw.get(key):
            reading.problems.append(
                f"config.json sets {key}, which this layout cannot say; expected layers.0.* tensors"
            )
    if "norm_output" in raw:
        reading.notes.append(f"norm_output={raw['norm_output']}: here only that lm_head reads normed states")
    layer = _layer(reading, raw, "midlayer", bias_key="attention_bias")
    if layer.rope_theta != 10000.0 and "LlamaForCausalLMEagle3" not in (raw.get("architectures") or ()):
        reading.notes.append("SafeAILab's EAGLE-3 trainer used rope theta 10000 whatever config.json says")
    num_layers = 1 + reading.count("additional_layers")
    reading.compare("num_hidden_layers", raw.get("num_hidden_layers"), num_layers)
    return _eagle3(
        reading,
        layer,
        num_layers=num_layers,
        fc_norm=reading.flag("fc_norm", "fc_norm", absent=None),
    )


def speculators_config(reading: Reading) -> Eagle3Config | None:
    """Read the config of an EAGLE-3 head in the layout of speculators; None if impossible.

    norm_before_residual, norm_before_fc, fc_norm and norm_output (recycle states AFTER the norm) are false where
    config.json does not say. Sizes that `transformer_layer_config` leaves out are the defaults of its model_type.
    """
    raw = reading.raw
    layer_raw = _with_defaults(raw.get("transformer_layer_config"), reading)
    if layer_raw is None or not _is_sound(reading, layer_raw, "transformer_layer_config."):
        return None
    num_layers = max(1, 1 + reading.count("additional_layers"))
    if (layer_raw.get("num_hidden_layers") or num_layers) != num_layers:
        reading.problems.append(f"num_hidden_layers={layer_raw['num_hidden_layers']}, but {num_layers} have tensors")
    for key in ("norm_before_residual", "norm_output"):
        if key not in raw:
            reading.notes.append(f"{key}: false; config.json does not say")
    return _eagle3(
        reading,
        _layer(reading, layer_raw, "midlayer", bias_key="attention_bias"),
        num_layers=num_layers,
        vocab_size=layer_raw["vocab_size"],
        norm_before_residual=bool(raw.get("norm_before_residual")),
        norm_before_fc=reading.flag("norm_before_fc", "input_norm"),
        fc_norm=reading.flag("fc_norm", "fc_norm"),
        recycles_normed=bool(raw.get("norm_output")),
    )


def _eagle3(reading: Reading, layer: LayerConfig, **more: Any) -> Eagle3Config:
    """Make the config from what both layouts of EAGLE-3 store in the same way."""
    raw = reading.raw
    vocab_size = more.pop("vocab_size", None) or raw["vocab_size"]
    scored = (reading.shape("lm_head.weight") or reading.shape("d2t") or (vocab_size,))[0]
    reading.notes.append(f"recycled state: {'after' if more.get('recycles_normed') else 'before'} the out norm")
    return Eagle3Config(
        layer=layer,
        target_hidden_size=raw.get("target_hidden_size") or layer.hidden_size,
        vocab_size=vocab_size,
        draft_vocab_size=raw.get("draft_vocab_size") or scored,
        aux_layers=_aux_layers(reading),
        **more,
    )


def _is_sound(reading: Reading, layer: Mapping[str, Any], at: str = "") -> bool:
    """Return whether the file's values are valid for their keys, and all sizes are there; else there are problems.

    layer: the config of the draft's layers, which is `at` a path in the file.
    """
    eagle = reading.raw.get("eagle_config")
    found = value_problems(reading.raw, HEAD) + layer_problems(layer, at)
    found += value_problems(eagle, AUX, "eagle_config.") if isinstance(eagle, dict) else []
    found += [f"config.json lacks {key!r} (an integer)" for key in SIZES if layer.get(key) is None]
    reading.problems += found
    return not found


def _with_defaults(raw: Any, reading: Reading) -> dict[str, Any] | None:
    """Return `transformer_layer_config` with the sizes it leaves out: it is stored as a difference to its class."""
    if not isinstance(raw, dict):
        reading.problems.append("config.json lacks 'transformer_layer_config' (an object)")
        return None
    kind = raw.get("model_type", "llama")
    if not isinstance(kind, str) or kind not in ("llama", "qwen3"):
        reading.problems.append(f"transformer_layer_config.model_type={kind!r}: expected llama or qwen3")
        return None
    defaults = AutoConfig.for_model(kind).to_dict()
    keys = (*SIZES, "num_key_value_heads", "head_dim", "rms_norm_eps", "use_sliding_window")
    kept = {key: defaults[key] for key in keys if key in defaults}
    if kind == "llama":  # these two follow from others
        kept = {**kept, "num_key_value_heads": None, "head_dim": None}
    return {**kept, **raw}


def _layer(reading: Reading, raw: Mapping[str, Any], at: str, bias_key: str) -> LayerConfig:
    """Read the first layer; `at` is our name of it."""
    act = raw.get("hidden_act", "silu")
    if act != "silu":
        reading.problems.append(f"hidden_act={act!r}: expected silu, which draft layers are made with")
    heads = raw["num_attention_heads"]
    theta, scaling, whence = rope_of(raw, reading.problems)
    reading.notes.append(whence)
    has_bias = reading.flag(bias_key, f"{at}.self_attn.q_proj.bias", absent=None)
    return LayerConfig(
        hidden_size=raw["hidden_size"],
        intermediate_size=raw["intermediate_size"],
        num_heads=heads,
        num_kv_heads=raw.get("num_key_value_heads") or heads,
        head_dim=raw.get("head_dim") or raw["hidden_size"] // heads,
        rms_norm_eps=float(raw.get("rms_norm_eps", 1e-6)),
        rope_theta=theta,
        rope_scaling=scaling,
        qkv_bias=has_bias,
        qk_norm=reading.has(f"{at}.self_attn.q_norm"),
        window=_window(reading, raw),
    )


def rope_of(raw: Mapping[str, Any], problems: list[str]) -> tuple[float, dict[str, Any] | None, str]:
    """Return (theta, scaling, where theta was found) of a config in transformers' old or new spelling."""
    new = raw.get("rope_parameters") or {}
    old = raw.get("rope_scaling") or {}
    if new.get("rope_theta") is not None:
        theta, whence = float(new["rope_theta"]), "from rope_parameters.rope_theta"
    elif raw.get("rope_theta") is not None:
        theta, whence = float(raw["rope_theta"]), "from rope_theta"
    else:
        theta, whence = 10000.0, "the default; config.json does not say"
    scaling = {key: value for key, value in {**old, **new}.items() if key not in ("rope_theta", "type")}
    kind = new.get("rope_type") or old.get("rope_type") or old.get("type") or "default"
    if kind == "default":
        return theta, None, f"rope theta {theta:g}, {whence}"
    if kind not in ROPE_TYPES:
        problems.append(f"rope_type={kind!r}: expected default or one of {', '.join(ROPE_TYPES)}")
    if "original_max_position_embeddings" not in scaling and raw.get("max_position_embeddings"):
        scaling["original_max_position_embeddings"] = raw["max_position_embeddings"]
    lacking = [key for key in ROPE_NEEDS.get(kind, ()) if scaling.get(key) is None]
    if lacking:
        problems.append(f"rope_type={kind!r} without {', '.join(lacking)}: expected a number for each in config.json")
    return theta, {**scaling, "rope_type": kind}, f"rope theta {theta:g}, {whence}; scaling {kind}"


def _window(reading: Reading, raw: Mapping[str, Any]) -> int | None:
    """Return the number of keys a draft layer sees, None if all."""
    kinds = set(raw.get("layer_types") or ())
    if len(kinds) > 1:
        reading.problems.append(f"layer_types={sorted(kinds)}: expected draft layers of one kind")
    is_sliding = kinds == {"sliding_attention"} if kinds else raw.get("use_sliding_window", True)
    window = raw.get("sliding_window") if is_sliding else None
    if window:
        reading.notes.append(f"sliding window of {window}")
    return window or None


def _aux_layers(reading: Reading) -> tuple[int, ...]:
    """Return the layers whose OUTPUT is read. A file's id k means the residual stream after k layers: layer k-1.

    vLLM and others read ids so; SGLang adds one to each. The paper's own layers are recognised in either spelling, and
    our own key names the layers themselves.
    """
    raw = reading.raw
    eagle = raw.get("eagle_config") or {}
    if eagle.get("use_aux_hidden_state") is False:
        reading.problems.append("use_aux_hidden_state=False: expected a head that reads outputs of several layers")
    ids, own = eagle.get(AUX_IDS) or raw.get(AUX_IDS), raw.get(AUX_LAYERS)
    if own and (not ids or list(ids) == [i + 1 for i in own]):
        ids, is_ours = [i + 1 for i in own], True
    else:
        is_ours = False
    if not ids:
        reading.notes.append("aux layer ids: the default [2, n//2, n-3] of a target of n layers")
        try:
            return default_aux_layers(reading.num_layers) if reading.num_layers else (0, 1, 2)
        except ValueError as error:
            reading.problems.append(str(error))
            return (0, 1, 2)
    reading.notes.append(f"aux layer ids: {list(ids)}, from {AUX_LAYERS if is_ours else AUX_IDS}")
    last = (reading.num_layers or max(ids) + 1) - 1
    if list(ids) != sorted(set(ids)) or not all(1 <= i <= last for i in ids):
        reading.problems.append(
            f"aux layer ids {list(ids)} do not fit {last + 1} layers (ascending, of 1..{last}): "
            "the head was trained on another target, or on the last layer's output, which transformers hands out normed"
        )
        return tuple(range(len(ids)))
    if not is_ours and reading.num_layers and list(ids) == [1, reading.num_layers // 2 - 1, reading.num_layers - 4]:
        reading.notes.append("aux layer ids are the paper's layers as SGLang counts them: taken as outputs of layers")
        return tuple(ids)
    return tuple(i - 1 for i in ids)
