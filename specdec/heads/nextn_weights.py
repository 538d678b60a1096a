"""Translation of MTP layers between files and transformers: config keys, and experts one by one or fused."""

import re
from collections.abc import Mapping
from typing import Any

import torch

from specdec.heads.configs import Reading
from specdec.heads.layouts import OWN_KEY, Layout, mtp_indices
from specdec.heads.nextn import NextNConfig
from specdec.heads.schema import MTP, OWN_MTP, value_problems

COUNTS = ("num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_layers")
_FUSED = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
_EXPERTS = re.compile(r"(.*\.experts\.)(gate_up_proj|down_proj)$")


def nextn_config(reading: Reading, layout: Layout, names: list[str]) -> NextNConfig | None:
    """Read the config of a head; None if config.json holds invalid values. names: the file's.

    `mtp_hidden_states_first` is transformers' own key.
    """
    reading.problems += _value_problems(reading.raw)
    if reading.problems:
        return None
    raw = reading.raw.get("text_config") or reading.raw
    own = raw.get(OWN_KEY) or {}
    hidden_first = own.get("hidden_first", raw.get("mtp_hidden_states_first", layout.hidden_first))
    indices = mtp_indices(layout, names)
    if not indices:
        reading.problems.append("there are tensors around an MTP layer, but none of the layer itself")
        return NextNConfig(hidden_first=bool(hidden_first))
    stated = next((raw[key] for key in COUNTS if raw.get(key) is not None), len(indices))
    config = NextNConfig(len(indices), bool(hidden_first), recycles_normed=bool(own.get("recycles_normed", True)))
    if stated != len(indices) or indices != list(range(indices[0], indices[0] + len(indices))):
        reading.problems.append(f"config.json speaks of {stated} MTP layers, the tensors are of layers {indices}")
    if len(indices) > 1 and layout.name == "qwen_mtp":
        reading.problems.append(f"it has {len(indices)} MTP layers, which share one projection: not supported")
    if layout.name == "nextn" and reading.num_layers is not None and indices[:1] != [reading.num_layers]:
        reading.problems.append(
            f"its MTP layer is model.layers.{indices[0]}; expected model.layers.{reading.num_layers}, after the "
            f"{reading.num_layers} layers of the target: it belongs to another target"
        )
    _doubt_sizes(reading, layout, indices)
    order = "[hidden, embedding]" if config.hidden_first else "[embedding, hidden]"
    reading.notes += [
        f"the projection reads {order}",
        f"recycled state: {'after' if config.recycles_normed else 'before'} the out norm",
        "rope: the target's own",
    ]
    return config


def _value_problems(raw: Mapping[str, Any]) -> list[str]:
    """List invalid values of these keys, in the file and in its parts."""
    parts = {"": raw, **{f"{name}.": raw.get(name) for name in ("text_config", "transformer_layer_config")}}
    problems = []
    for at, part in parts.items():
        if isinstance(part, dict):
            problems += value_problems(part, MTP, at)
            own = part.get(OWN_KEY)
            problems += value_problems(own, OWN_MTP, f"{at}{OWN_KEY}.") if isinstance(own, dict) else []
    return problems


def _described(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the part of config.json that describes the target an MTP layer is like."""
    return raw.get("text_config") or raw.get("transformer_layer_config") or raw


def _doubt_sizes(reading: Reading, layout: Layout, indices: list[int]) -> None:
    """Note doubts about sizes: those in config.json only describe the target; the layer is made like the live one's."""
    stated = _described(reading.raw)
    width = (reading.shape("mtp.0.eh_proj.weight") or (None,))[0]
    vocab = (reading.shape("embed_tokens.weight") or reading.shape("lm_head.weight") or (None,))[0]
    depth = indices[0] if layout.name == "nextn" else reading.num_layers
    for key, found in (("hidden_size", width), ("vocab_size", vocab), ("num_hidden_layers", depth)):
        if found is not None:
            reading.compare(key, stated.get(key), found)


def per_expert(name: str, shape: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
    """Return the tensors, one per expert, that transformers fuses into `name`, with their shapes; {} if not fused.

    gate_up_proj [E, 2*I, h] is gate_proj [I, h] above up_proj [I, h] of each expert; down_proj [E, h, I] stacks.
    """
    found = _EXPERTS.match(name)
    if not found:
        return {}
    parts = _FUSED[found[2]]
    num_experts, rows, columns = shape
    part = (rows // len(parts), columns)
    return {f"{found[1]}{e}.{p}.weight": part for e in range(num_experts) for p in parts}


def fuse_experts(name: str, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Fuse all tensors that `per_expert` lists, in its order, into the parameter `name`."""
    found = _EXPERTS.match(name)
    assert found, f"{name} is no fused parameter"
    listed = list(tensors.values())
    step = len(_FUSED[found[2]])
    return torch.stack([torch.cat(listed[i : i + step]) for i in range(0, len(listed), step)])


def split_experts(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return `state` with fused experts split again, under the names that checkpoints have."""
    out: dict[str, Any] = {}
    for name, tensor in state.items():
        parts = per_expert(name, tuple(tensor.shape))
        rows = next(iter(parts.values()))[0] if parts else 0
        pieces = [piece for expert in tensor for piece in expert.split(rows)] if parts else [tensor]
        out.update(zip(parts or [name], pieces, strict=True))
    return out
