"""MTP checkpoints (arXiv 2412.19437): DeepSeek-V3 and GLM-4.5, whose MTP layer follows the target's last; Qwen3-Next
and Qwen3.5; MiMo; vLLM's speculators. Sizes are those of the target, since these layers are made like its own."""

import json
import re
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

import torch

from specdec.reach.heads import fresh
from specdec.reach.heads.configs import OWN_KEY, value_problems
from specdec.reach.heads.files import EMBEDDING, LM_HEAD, HeadFiles, Wanted, shapes_of
from specdec.reach.heads.format import HeadFormat, Layout, Saving, Stored, Tensors, Training, same
from specdec.reach.heads.nextn import NextNConfig, NextNHead, full_attention_layer
from specdec.reach.targets.shape import TargetShape

COUNTS = ("num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_layers")
KEYS = (  # that are read; layers are not described: they are made like the target's
    *("text_config", "transformer_layer_config", "hidden_size", "vocab_size", "num_hidden_layers"),
    *(OWN_KEY, "hidden_first", "recycles_normed", "mtp_hidden_states_first", *COUNTS),
)


def _mimo_layer(at: str) -> tuple[tuple[str, str], ...]:
    """Return the prefixes of the layer `at` in MiMo's names, which speculators took over."""
    names = {
        "token_layernorm": "enorm",
        "hidden_layernorm": "hnorm",
        "final_layernorm": "norm",
        "input_proj": "eh_proj",
    }
    return (
        *((f"{at}.{theirs}.", f"mtp.{{m}}.{ours}.") for theirs, ours in names.items()),
        (f"{at}.", "mtp.{m}.layer."),
    )


LAYOUTS = (
    Layout(
        name="speculators_mtp",
        algo="nextn",
        mark=r"mtp_layers\.",
        prefixes=(*_mimo_layer("mtp_layers.{m}"), *same("embed_tokens.", "lm_head.")),
        module=r"mtp_layers\.(\d{1,6})\.",
    ),
    Layout(
        name="mimo",
        algo="nextn",
        mark=r"model\.mtp_layers\.",
        prefixes=_mimo_layer("model.mtp_layers.{m}"),
        module=r"model\.mtp_layers\.(\d{1,6})\.",
        hidden_first=True,
        holds_target=True,
    ),
    Layout(
        name="qwen_mtp",
        algo="nextn",
        mark=r"mtp\.",
        prefixes=(
            ("mtp.fc.", "mtp.0.eh_proj."),
            ("mtp.pre_fc_norm_embedding.", "mtp.0.enorm."),
            ("mtp.pre_fc_norm_hidden.", "mtp.0.hnorm."),
            ("mtp.norm.", "mtp.0.norm."),
            ("mtp.embed_tokens.", "embed_tokens."),
            ("mtp.lm_head.", "lm_head."),
            ("mtp.layers.0.", "mtp.0.layer."),
        ),
        module=r"mtp\.layers\.(\d{1,6})\.",
        holds_target=True,
    ),
    Layout(
        name="nextn",
        algo="nextn",
        mark=r"model\.layers\.\d{1,6}\.(eh_proj|enorm|hnorm|shared_head)\.",
        prefixes=(
            ("model.layers.{at}.eh_proj.", "mtp.{m}.eh_proj."),
            ("model.layers.{at}.enorm.", "mtp.{m}.enorm."),
            ("model.layers.{at}.hnorm.", "mtp.{m}.hnorm."),
            ("model.layers.{at}.shared_head.norm.", "mtp.{m}.norm."),
            ("model.layers.{at}.shared_head.head.", "lm_head."),
            ("model.layers.{at}.embed_tokens.", "embed_tokens."),
            ("model.layers.{at}.", "mtp.{m}.layer."),
        ),
        module=r"model\.layers\.(\d{1,6})\.(?:eh_proj|enorm|hnorm|shared_head)\.",
        holds_target=True,
    ),
)


def read(files: HeadFiles, target: TargetShape | None) -> Stored | None:
    config = files.parse(_config, target and target.num_layers)
    if config is None or target is None:
        return None
    assert target.model is not None, "an MTP layer is made like the live target's: TargetShape.model"
    own = {"own_embedding": files.is_own(EMBEDDING, target), "own_head": files.is_own(LM_HEAD, target)}
    head = files.make(NextNHead, target.model, NextNConfig(**config, **own))
    made = shapes_of(head)
    parts: dict[str, Wanted] = {name: {} if name in files.found else per_expert(name, s) for name, s in made.items()}
    wanted: Wanted = {n: s for name, shape in made.items() for n, s in (parts[name] or {name: shape}).items()}
    copies: Wanted = dict.fromkeys((EMBEDDING, LM_HEAD), (head.vocab_size, head.hidden_size))
    files.check(wanted, copies, lambda name, _: "" if name in copies else "an MTP layer of another family or size")
    return Stored(head, _tensors(files, parts), _kept_dtypes(head, target))


def _tensors(files: HeadFiles, parts: Mapping[str, Wanted]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the head's tensors. parts: of each tensor that is stored per expert, the stored ones; {} for the others."""
    for name, own in parts.items():
        yield name, fuse_experts(name, files.read(list(own))) if own else files.read([name])[name]


def _kept_dtypes(head: NextNHead, target: TargetShape) -> dict[str, torch.dtype]:
    """Return the dtypes of tensors that transformers keeps in fp32 in the target's own layers."""
    layers = target.model.get_decoder().layers
    weight = target.embed_tokens.weight
    twin = layers[full_attention_layer(head.hf_config)].state_dict()
    kept = {name: t.dtype for name, t in twin.items() if t.dtype != weight.dtype}
    return {f"mtp.{m}.layer.{name}": dtype for m in range(head.num_modules) for name, dtype in kept.items()}


def _config(files: HeadFiles, num_layers: int | None) -> dict[str, Any] | None:
    """Read fields of NextNConfig, for a target of `num_layers`. `mtp_hidden_states_first` is transformers' own key."""
    files.problems += value_problems(files.raw, keys=KEYS)
    if files.problems:
        return None
    raw, layout, indices = files.raw.get("text_config") or files.raw, files.layout, list(files.modules)
    own = raw.get(OWN_KEY) or {}
    hidden_first = bool(own.get("hidden_first", raw.get("mtp_hidden_states_first", layout.hidden_first)))
    if not indices:
        files.problems.append("there are tensors around an MTP layer, but none of the layer itself")
        return {"hidden_first": hidden_first}
    stated = next((raw[key] for key in COUNTS if raw.get(key) is not None), len(indices))
    if stated != len(indices) or indices != list(range(indices[0], indices[0] + len(indices))):
        files.problems.append(f"config.json has {stated} MTP layers, the tensors are of layers {indices}")
    if len(indices) > 1 and layout.name == "qwen_mtp":
        files.problems.append(f"it has {len(indices)} MTP layers, which share one projection: not supported")
    if layout.name == "nextn" and num_layers is not None and indices[0] != num_layers:
        files.problems.append(
            f"its MTP layer is model.layers.{indices[0]}; expected model.layers.{num_layers}, after the "
            f"{num_layers} layers of the target: it belongs to another target"
        )
    # Sizes in config.json only describe the target; the layer is made like the live one's.
    described = files.raw.get("text_config") or files.raw.get("transformer_layer_config") or files.raw
    width, vocab = files.shape("mtp.0.eh_proj.weight"), files.shape(EMBEDDING) or files.shape(LM_HEAD)
    depth = (indices[0] if layout.name == "nextn" else num_layers,)
    for key, found in (("hidden_size", width), ("vocab_size", vocab), ("num_hidden_layers", depth)):
        if found and found[0] is not None:
            files.compare(key, described.get(key), found[0])
    recycles_normed = bool(own.get("recycles_normed", True))
    files.notes += [
        f"the projection reads {'[hidden, embedding]' if hidden_first else '[embedding, hidden]'}",
        f"recycled state: {'after' if recycles_normed else 'before'} the out norm",
        "rope: the target's own",
    ]
    return {"num_layers": len(indices), "hidden_first": hidden_first, "recycles_normed": recycles_normed}


_FUSED = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
_EXPERTS = re.compile(r"(.*\.experts\.)(gate_up_proj|down_proj)$")


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
    listed = list(tensors.values())
    step = len(_FUSED[name.rpartition(".")[2]])
    return torch.stack([torch.cat(listed[i : i + step]) for i in range(0, len(listed), step)])


def split_experts(state: Mapping[str, torch.Tensor]) -> Tensors:
    """Return `state` with fused experts split again, under the names that checkpoints have."""
    out: Tensors = {}
    for name, tensor in state.items():
        parts = per_expert(name, tuple(tensor.shape))
        rows = next(iter(parts.values()))[0] if parts else 0
        pieces = [piece for expert in tensor for piece in expert.split(rows)] if parts else [tensor]
        out.update(zip(parts or [name], pieces, strict=True))
    return out


def write(head: NextNHead, saving: Saving) -> tuple[dict[str, Any], Tensors]:
    """Return the target's own config, with our keys where the head is not like DeepSeek-V3's, and the tensors."""
    c, plain = head.config, NextNConfig()
    whole = json.loads(head.hf_config.to_json_string(use_diff=False))
    of_a_file = {"_name_or_path", "_model_name_or_path", "quantization_config", "dtype", "architectures"}
    config = {name: value for name, value in whole.items() if name not in of_a_file}
    keys = ("hidden_first", "recycles_normed")
    own = {key: getattr(c, key) for key in keys if getattr(c, key) != getattr(plain, key)}
    config |= {"num_nextn_predict_layers": c.num_layers, **({OWN_KEY: own} if own else {})}
    return config, split_experts(head.state_dict())


NEXTN = HeadFormat(
    algo="nextn",
    layouts=LAYOUTS,
    read=read,
    write=write,
    fresh=lambda model, shape, seed, hot_ids: fresh.new_nextn(model, seed, shape.copy_layer),
    written=lambda head: ("nextn",),
    # FastMTP weights step j by 0.6**j, normalised.
    training=Training(
        MappingProxyType({"num_steps": 3, "step_decay": 0.6, "normalise_steps": True}),
        frozenset({"copy_layer"}),
        "NextN (MTP) draft head",
        "DeepSeek-V3's names, for targets of the same class and shape.",
    ),
    combining=r"mtp\.\d+\.eh_proj",
)
