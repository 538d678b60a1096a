"""Valid values of a config.json: one row per key. The file is untrusted, so each value is checked before it is used;
keys that are not read are not checked. A missing key is always fine here: readers know what they need."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from specdec.checkpoints.folders import shortened
from specdec.heads.layouts import AUX_IDS, AUX_LAYERS, OWN_KEY


@dataclass(frozen=True)
class Kind:
    """A kind of value: `fits` tests one; `words` say what was expected. May be null unless `is_needed`."""

    words: str
    fits: Callable[[Any], bool]
    is_needed: bool = False

    def accepts(self, value: Any) -> bool:
        """Return whether a value that is present will do."""
        return not self.is_needed if value is None else self.fits(value)


def is_integer(value: Any) -> bool:
    """Return whether `value` is an integer; JSON's true and false are not, although Python's are."""
    return isinstance(value, int) and not isinstance(value, bool)


def is_number(value: Any) -> bool:
    """Return whether `value` is an integer or a finite float; Python's JSON reads NaN and Infinity, too."""
    try:
        return (is_integer(value) or isinstance(value, float)) and math.isfinite(value)
    except OverflowError:  # an integer of hundreds of digits
        return False


def integer(low: int, high: int, *, is_needed: bool = False) -> Kind:
    """Make the kind of an integer in [low, high]."""
    return Kind(f"an integer of {low}..{high}", lambda v: is_integer(v) and low <= v <= high, is_needed)


def positive(high: float, *, is_needed: bool = False) -> Kind:
    """Make the kind of a number in (0, high]."""
    return Kind(f"a number above 0, up to {high:g}", lambda v: is_number(v) and 0 < v <= high, is_needed)


def items(kind: Kind) -> Kind:
    """Make the kind of a list of `kind`."""
    return Kind(f"a list, each {kind.words}", lambda v: isinstance(v, list) and all(map(kind.fits, v)))


FLAG = Kind("true or false", lambda v: isinstance(v, bool))
TEXT = Kind("a string", lambda v: isinstance(v, str))
OBJECT = Kind("an object", lambda v: isinstance(v, dict))
# Bounds are far above any model's, yet low enough for a product of three to be the size of a tensor.
SIZE, COUNT, LAYERS = integer(1, 1 << 24), integer(1, 1 << 16), integer(1, 1 << 12)
LENGTH = integer(1, 1 << 40)
FACTOR, THETA = positive(1e6), positive(1e18)

LAYER: Mapping[str, Kind] = MappingProxyType(
    {
        "hidden_size": SIZE,
        "intermediate_size": SIZE,
        "vocab_size": SIZE,
        "num_attention_heads": COUNT,
        "num_key_value_heads": COUNT,
        "head_dim": COUNT,
        "num_hidden_layers": LAYERS,
        "max_position_embeddings": LENGTH,
        "rms_norm_eps": Kind("a number of [0, 1)", lambda v: is_number(v) and 0 <= v < 1, is_needed=True),
        "rope_theta": THETA,
        "rope_scaling": OBJECT,
        "rope_parameters": OBJECT,
        "hidden_act": Kind(TEXT.words, TEXT.fits, is_needed=True),
        "layer_types": items(TEXT),
        "sliding_window": integer(0, 1 << 40),
        "use_sliding_window": FLAG,
        "attention_bias": FLAG,
        "qkv_bias": FLAG,
        "model_type": TEXT,
    }
)
HEAD: Mapping[str, Kind] = MappingProxyType(
    {
        "architectures": items(TEXT),
        "bias": FLAG,
        "fc_norm": FLAG,
        "norm_before_fc": FLAG,
        "norm_before_residual": FLAG,
        "norm_output": FLAG,
        "lm_head_from_target": FLAG,
        "draft_vocab_size": SIZE,
        "target_hidden_size": SIZE,
        "eagle_config": OBJECT,
        "transformer_layer_config": OBJECT,
        AUX_IDS: items(integer(-1, 1 << 12)),
        AUX_LAYERS: items(integer(-1, 1 << 12)),
    }
)
AUX: Mapping[str, Kind] = MappingProxyType({AUX_IDS: HEAD[AUX_IDS], "use_aux_hidden_state": FLAG})
MTP: Mapping[str, Kind] = MappingProxyType(
    {
        "text_config": OBJECT,
        "transformer_layer_config": OBJECT,
        OWN_KEY: OBJECT,
        "mtp_hidden_states_first": FLAG,
        "num_nextn_predict_layers": integer(0, 1 << 12),
        "mtp_num_hidden_layers": integer(0, 1 << 12),
        "num_mtp_layers": integer(0, 1 << 12),
        "hidden_size": SIZE,
        "vocab_size": SIZE,
        "num_hidden_layers": LAYERS,
    }
)
OWN_MTP: Mapping[str, Kind] = MappingProxyType({"hidden_first": FLAG, "recycles_normed": FLAG})
ROPE: Mapping[str, Kind] = MappingProxyType(
    {
        "rope_type": TEXT,
        "type": TEXT,
        "rope_theta": THETA,
        "factor": FACTOR,
        "low_freq_factor": FACTOR,
        "high_freq_factor": FACTOR,
        "attention_factor": FACTOR,
        "beta_fast": FACTOR,
        "beta_slow": FACTOR,
        "mscale": FACTOR,
        "mscale_all_dim": Kind("a number of [0, 1e6]", lambda v: is_number(v) and 0 <= v <= 1e6),
        "original_max_position_embeddings": LENGTH,
        "partial_rotary_factor": Kind("1: draft layers turn whole heads", lambda v: is_number(v) and v == 1),
        "truncate": FLAG,
    }
)
# Keys that each kind of rope scaling requires.
ROPE_NEEDS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "linear": ("factor",),
        "yarn": ("factor", "original_max_position_embeddings"),
        "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    }
)


def value_problems(raw: Mapping[str, Any], schema: Mapping[str, Kind], at: str = "") -> list[str]:
    """List what is wrong with the values in `raw`, by key; at: the path of `raw` in the file, "rope_scaling." say."""
    wrong = [key for key, kind in schema.items() if key in raw and not kind.accepts(raw[key])]
    return [f"config.json has {at}{key}={_shown(raw[key])}: expected {schema[key].words}" for key in wrong]


def _shown(value: Any) -> str:
    try:
        return shortened(repr(value), 60)
    except (ValueError, RecursionError):  # an integer of more digits than Python prints
        return "a number of thousands of digits"


def layer_problems(raw: Mapping[str, Any], at: str = "") -> list[str]:
    """List what is wrong in the config of a Llama-like layer, and in its rope."""
    problems = value_problems(raw, LAYER, at)
    for name in ("rope_parameters", "rope_scaling"):
        if isinstance(raw.get(name), dict):
            problems += value_problems(raw[name], ROPE, f"{at}{name}.")
    return problems or _relations(raw, at)


def _relations(raw: Mapping[str, Any], at: str) -> list[str]:
    """List sizes that do not fit together, each being valid by itself."""
    heads, kv_heads, size = (raw.get(k) for k in ("num_attention_heads", "num_key_value_heads", "hidden_size"))
    problems = []
    if heads and kv_heads and heads % kv_heads:
        problems.append(
            f"config.json has {at}num_key_value_heads={kv_heads}: expected a divisor of {heads} query heads"
        )
    if heads and size and not raw.get("head_dim") and size % heads:
        problems.append(f"config.json has no {at}head_dim, and {heads} heads do not share hidden_size={size} equally")
    dim = raw.get("head_dim") or (size // heads if heads and size else 2)
    if dim % 2:
        problems.append(f"heads of {dim} elements: expected an even number, which rope turns in pairs")
    return problems
