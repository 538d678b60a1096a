"""Reads and writes the Llama-like layers of draft heads in config.json.

The file is untrusted: SCHEMA has the valid values of every key that is read. Other keys are not checked. A missing key
or null passes; readers check for the keys they need.
"""

from collections.abc import Callable, Collection, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

from specdec.reach.checkpoints.folders import shortened
from specdec.reach.heads.base import LayerConfig, layer_rope
from specdec.reach.heads.files import HeadFiles

AUX_IDS = "eagle_aux_hidden_state_layer_ids"  # of EAGLE-3: as files count layers
AUX_LAYERS = "specdec_aux_layers"  # our own: indices of the layers whose output is read, unambiguously
OWN_KEY = "specdec_nextn"  # our own: fields of NextNConfig that differ from its defaults
MOST_DIM = 1 << 16  # of a head: far above any real one, and small enough for the tables that check its rope
SIZES = ("hidden_size", "intermediate_size", "num_attention_heads", "vocab_size")  # that a layer cannot do without


class Rule(NamedTuple):
    """A kind of value in config.json: `fits` tests one, `words` describe it in errors."""

    words: str
    fits: Callable[[Any], bool]


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)  # true and false are no numbers in JSON


def _integer(low: int) -> Rule:
    high = 2**31 - 1
    return Rule(f"an integer of {low}..{high}", lambda v: _is_number(v) and isinstance(v, int) and low <= v <= high)


def _list(kind: Rule) -> Rule:
    return Rule(f"a list, each {kind.words}", lambda v: isinstance(v, list) and all(map(kind.fits, v)))


FLAG = Rule("true or false", lambda v: isinstance(v, bool))
TEXT = Rule("a string", lambda v: isinstance(v, str))
OBJECT = Rule("an object", lambda v: isinstance(v, dict))
SIZE = _integer(1)
POSITIVE = Rule("a number above 0, up to 1e18", lambda v: _is_number(v) and 0 < v <= 1e18)
NUMBER = Rule("a number of [0, 1e6]", lambda v: _is_number(v) and 0 <= v <= 1e6)
WHOLE_HEADS = Rule("1: draft layers rotate whole heads", lambda v: _is_number(v) and v == 1)

# Keys of any object in the file; those that hold an object themselves are checked inside, too.
_KEYS: tuple[tuple[Rule, str], ...] = (
    (OBJECT, f"rope_scaling rope_parameters eagle_config dflash_config transformer_layer_config text_config {OWN_KEY}"),
    (SIZE, " ".join((*SIZES, "num_key_value_heads head_dim num_hidden_layers max_position_embeddings"))),
    (SIZE, "draft_vocab_size target_hidden_size original_max_position_embeddings block_size"),
    (
        _integer(0),
        "mask_token_id markov_rank sliding_window num_nextn_predict_layers mtp_num_hidden_layers num_mtp_layers",
    ),
    (POSITIVE, "rope_theta factor low_freq_factor high_freq_factor attention_factor beta_fast beta_slow mscale"),
    (NUMBER, "rms_norm_eps mscale_all_dim logit_scale"),
    (WHOLE_HEADS, "partial_rotary_factor"),
    (TEXT, "hidden_act model_type rope_type type markov_head_type projector_type speculators_model_type"),
    (FLAG, "use_sliding_window attention_bias qkv_bias bias fc_norm norm_before_fc norm_before_residual norm_output"),
    (FLAG, "lm_head_from_target use_aux_hidden_state truncate mtp_hidden_states_first hidden_first recycles_normed"),
    (FLAG, "causal is_causal causal_head sample_from_anchor is_neox_style"),
    (_list(TEXT), "architectures layer_types"),
    (_list(_integer(-1)), f"{AUX_IDS} {AUX_LAYERS} target_layer_ids aux_hidden_state_layer_ids"),
)
SCHEMA: Mapping[str, Rule] = MappingProxyType({key: kind for kind, keys in _KEYS for key in keys.split()})
# Rope scalings that follow from the config alone, not from a sequence's length, and the keys that each requires.
ROPE_NEEDS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "linear": ("factor",),
        "yarn": ("factor", "original_max_position_embeddings"),
        "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    }
)


def value_problems(raw: Mapping[str, Any], at: str = "", keys: Collection[str] = SCHEMA) -> list[str]:
    """List invalid values of `keys` in `raw` and its parts; at: the path of `raw`, such as "eagle_config."."""
    problems = []
    for key in [key for key in keys if raw.get(key) is not None]:
        if not SCHEMA[key].fits(raw[key]):
            problems.append(f"config.json has {at}{key}={shortened(repr(raw[key]), 60)}: expected {SCHEMA[key].words}")
        elif isinstance(raw[key], dict):
            problems += value_problems(raw[key], f"{at}{key}.", keys)
    return problems


def is_sound(files: HeadFiles, layer: Mapping[str, Any], at: str = "") -> bool:
    """Return whether all values are valid and all sizes are there; if not, adds to `files.problems`.

    layer: the config of the draft's layers, at the path `at` in the file.
    """
    found = value_problems(files.raw)
    found += [f"config.json lacks {key!r} (an integer)" for key in SIZES if layer.get(key) is None]
    files.problems += found or _size_problems(layer, at)
    return not files.problems


def _size_problems(raw: Mapping[str, Any], at: str) -> list[str]:
    """List sizes that do not fit together, each being valid by itself."""
    heads, size = raw["num_attention_heads"], raw["hidden_size"]
    kv_heads = raw.get("num_key_value_heads") or heads
    dim = raw.get("head_dim") or size // heads
    problems = []
    if heads % kv_heads:
        problems.append(
            f"config.json has {at}num_key_value_heads={kv_heads}: expected a divisor of {heads} query heads"
        )
    if not raw.get("head_dim") and size % heads:
        problems.append(f"config.json has no {at}head_dim, and {heads} heads do not share hidden_size={size} equally")
    if dim % 2 or dim > MOST_DIM:
        problems.append(f"heads of {dim} elements: expected an even number up to {MOST_DIM}, rotated in pairs")
    return problems


def read_layer(files: HeadFiles, raw: Mapping[str, Any], at: str, bias_key: str) -> LayerConfig:
    """Read the first layer of a sound config `raw`; at: our name of it."""
    if (raw.get("hidden_act") or "silu") != "silu":
        files.problems.append(f"hidden_act={raw['hidden_act']!r}: expected silu, which draft layers are made with")
    heads = raw["num_attention_heads"]
    theta, scaling = _rope(files, raw)
    eps = raw.get("rms_norm_eps")
    layer = LayerConfig(
        hidden_size=raw["hidden_size"],
        intermediate_size=raw["intermediate_size"],
        num_heads=heads,
        num_kv_heads=raw.get("num_key_value_heads") or heads,
        head_dim=raw.get("head_dim") or raw["hidden_size"] // heads,
        rms_norm_eps=1e-6 if eps is None else float(eps),
        rope_theta=theta,
        rope_scaling=scaling,
        qkv_bias=files.flag(bias_key, f"{at}.self_attn.q_proj.bias", absent=None),
        qk_norm=files.has(f"{at}.self_attn.q_norm"),
        window=_window(files, raw),
    )
    if not files.problems:
        files.problems += _angle_problems(layer)
    return layer


def _rope(files: HeadFiles, raw: Mapping[str, Any]) -> tuple[float, dict[str, Any] | None]:
    """Read (theta, scaling) in transformers' old or new spelling."""
    new, old = raw.get("rope_parameters") or {}, raw.get("rope_scaling") or {}
    theta, whence = 10000.0, "the default; config.json does not say"
    for holder, said in ((raw, "from rope_theta"), (new, "from rope_parameters.rope_theta")):
        if holder.get("rope_theta") is not None:
            theta, whence = float(holder["rope_theta"]), said
    kind = new.get("rope_type") or old.get("rope_type") or old.get("type") or "default"
    files.notes.append(f"rope theta {theta:g}, {whence}" + (f"; scaling {kind}" if kind != "default" else ""))
    if kind == "default":
        return theta, None
    scaling = {key: value for key, value in {**old, **new}.items() if key not in ("rope_theta", "type")}
    if "original_max_position_embeddings" not in scaling and raw.get("max_position_embeddings"):
        scaling["original_max_position_embeddings"] = raw["max_position_embeddings"]
    if kind not in ROPE_NEEDS:
        files.problems.append(f"rope_type={kind!r}: expected default or one of {', '.join(sorted(ROPE_NEEDS))}")
    lacking = [key for key in ROPE_NEEDS.get(kind, ()) if scaling.get(key) is None]
    if lacking:
        what = f"rope_type={kind!r} without {', '.join(lacking)}: expected a number for each in config.json"
        files.problems.append(what)
    return theta, {**scaling, "rope_type": kind}


def _angle_problems(c: LayerConfig) -> list[str]:
    """Check that the rope tables of two positions are finite and as wide as a head."""
    cos, sin = layer_rope(c, torch.arange(2), torch.float32)
    if cos.shape[-1] == c.head_dim and bool(torch.isfinite(cos).all() & torch.isfinite(sin).all()):
        return []
    said = f"rope_theta={c.rope_theta:g} and rope_scaling={c.rope_scaling}"
    return [f"{said} give no finite angles for heads of {c.head_dim} elements"]


def _window(files: HeadFiles, raw: Mapping[str, Any]) -> int | None:
    """Return the number of keys a draft layer sees, None if all."""
    kinds = set(raw.get("layer_types") or ())
    if len(kinds) > 1:
        files.problems.append(f"layer_types={sorted(kinds)}: expected draft layers of one kind")
    is_sliding = kinds == {"sliding_attention"} if kinds else raw.get("use_sliding_window", True)
    window = (raw.get("sliding_window") if is_sliding else None) or None
    if window:
        files.notes.append(f"sliding window of {window}")
    return window


def layer_json(c: LayerConfig) -> dict[str, Any]:
    """Return the keys of config.json for a Llama-like layer."""
    scaling = {"rope_scaling": c.rope_scaling} if c.rope_scaling is not None else {}
    return {
        "hidden_size": c.hidden_size,
        "intermediate_size": c.intermediate_size,
        "num_attention_heads": c.num_heads,
        "num_key_value_heads": c.num_kv_heads,
        "head_dim": c.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": c.rms_norm_eps,
        "rope_theta": c.rope_theta,
        **scaling,
    }


def layers_json(c: LayerConfig, num_layers: int, vocab_size: int) -> dict[str, Any]:
    """Return the keys of config.json for a draft's layers in speculators' and z-lab's layouts: windows and QK norms."""
    window: dict[str, Any] = {}
    if c.window is not None:
        kinds = ["sliding_attention"] * num_layers
        window = {"sliding_window": c.window, "use_sliding_window": True, "layer_types": kinds}
    return {
        "model_type": "qwen3" if c.qk_norm else "llama",
        "num_hidden_layers": num_layers,
        **layer_json(c),
        "attention_bias": c.qkv_bias,
        "vocab_size": vocab_size,
        "tie_word_embeddings": False,
        **window,
    }
