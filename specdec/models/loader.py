"""Reads and writes draft checkpoints. Layouts are data; a strict reader says all that is wrong at once.

The official EAGLE-3 layout (SafeAILab/EAGLE): fc, midlayer.*, norm, lm_head, d2t (offsets), t2d (membership). Beyond
it: `lm_head.weight` may be absent where the config says `lm_head_from_target`; its rows are then the target's.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn

from specdec.errors import CheckpointError
from specdec.models.draft_head import LayerConfig
from specdec.models.eagle3 import Eagle3Config, Eagle3Head, default_aux_layers

WEIGHTS = "model.safetensors"
LEGACY_WEIGHTS = "pytorch_model.bin"
OPTIONAL = frozenset({"embed_tokens.weight"})


@dataclass(frozen=True)
class TargetShape:
    """What a head must match: hidden size, vocabulary, layers, and the modules it shares."""

    hidden_size: int
    vocab_size: int
    num_layers: int
    embed_tokens: nn.Module
    lm_head: nn.Module


def resolve(path_or_id: str | Path) -> Path:
    """A local checkpoint folder: `path_or_id` itself, or the snapshot of a Hub repository of that name."""
    path = Path(path_or_id).expanduser()
    if path.is_dir():
        return path
    if path.exists():
        raise CheckpointError(str(path), ["it is a file; expected the folder that holds config.json and the weights"])
    if path.is_absolute() or str(path_or_id).startswith(".") or str(path_or_id).count("/") != 1:
        raise CheckpointError(str(path_or_id), ["no such folder (and not a Hub id of the form owner/name)"])
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(str(path_or_id), allow_patterns=["*.json", "*.safetensors", "*.bin"]))
    except Exception as error:
        raise CheckpointError(str(path_or_id), [f"no such folder, and the Hub did not give it: {error}"]) from error


def detect_algo(path_or_id: str | Path, wanted=None) -> str:
    """Which algorithm a checkpoint folder is for, told from its tensor names."""
    folder = resolve(path_or_id)
    names = set(_read_weights(folder))
    if "d2t" in names or any(n.startswith("midlayer.") for n in names):
        return "eagle3"
    raise CheckpointError(str(folder), [f"unknown layout; it holds {sorted(names)[:6]} …; eagle3 has midlayer.*, fc"])


def load_eagle3(path_or_id: str | Path, target: TargetShape, dtype: torch.dtype, device: torch.device) -> Eagle3Head:
    """Load an EAGLE-3 head for `target`. Raises CheckpointError with every problem found."""
    folder = resolve(path_or_id)
    raw = _read_config(folder)
    weights = _read_weights(folder)
    config = _eagle3_config(folder, raw, target)
    head = Eagle3Head(config)
    wanted = {name: tuple(t.shape) for name, t in head.state_dict().items()}
    if raw.get("lm_head_from_target") and "lm_head.weight" not in weights:
        del wanted["lm_head.weight"]
    if config.draft_vocab_size == config.vocab_size:  # d2t/t2d are identities, often left out or zero
        weights["d2t"] = torch.zeros(config.draft_vocab_size, dtype=torch.int64)
        weights["t2d"] = torch.ones(config.vocab_size, dtype=torch.bool)
    problems = shape_problems(weights, wanted) or vocab_problems(weights["d2t"], weights["t2d"])
    if problems:
        raise CheckpointError(str(folder), problems)
    head.load_state_dict({name: weights[name] for name in wanted}, strict=False)
    head = head.to(device=device, dtype=dtype).eval()
    if "lm_head.weight" not in wanted:
        all_rows = target.lm_head.get_parameter("weight").detach()
        head.lm_head.weight.data.copy_(all_rows[head.hot_ids])
    return head.requires_grad_(False)


def check_head(head: Eagle3Head, target: TargetShape, dtype: torch.dtype, device: torch.device) -> None:
    """Raise CheckpointError if a loaded head does not fit the target it is to be attached to."""
    c, weight = head, head.weight
    facts = {
        "hidden size": (c.target_hidden_size, target.hidden_size),
        "vocabulary": (c.vocab_size, target.vocab_size),
        "dtype": (weight.dtype, dtype),
        "device": (weight.device, device),
    }
    problems = [f"{name} is {has}, the target has {wants}" for name, (has, wants) in facts.items() if has != wants]
    if max(c.aux_layers) >= target.num_layers - 1:
        problems.append(f"aux layers {c.aux_layers} do not fit a target of {target.num_layers} layers")
    if problems:
        raise CheckpointError("Eagle3Head", problems)


def save_eagle3(folder: str | Path, head: Eagle3Head, *, lm_head_from_target: bool, dtype: torch.dtype) -> None:
    """Write `head` in the official layout to `folder` (config.json, model.safetensors)."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    state = {n: t.detach().cpu().contiguous() for n, t in head.state_dict().items()}
    state = {n: t.to(dtype) if t.is_floating_point() else t for n, t in state.items()}
    if lm_head_from_target:
        del state["lm_head.weight"]
    save_file(state, str(folder / WEIGHTS))
    (folder / "config.json").write_text(json.dumps(eagle3_json(head.config, lm_head_from_target), indent=2) + "\n")


def eagle3_json(c: Eagle3Config, lm_head_from_target: bool) -> dict[str, Any]:
    """`config.json` of an exported head. Aux ids count the residual stream after k layers: output of layer k-1."""
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "num_hidden_layers": 1,
        "hidden_size": c.layer.hidden_size,
        "target_hidden_size": c.target_hidden_size,
        "intermediate_size": c.layer.intermediate_size,
        "num_attention_heads": c.layer.num_heads,
        "num_key_value_heads": c.layer.num_kv_heads,
        "head_dim": c.layer.head_dim,
        "hidden_act": "silu",
        "vocab_size": c.vocab_size,
        "draft_vocab_size": c.draft_vocab_size,
        "rms_norm_eps": c.layer.rms_norm_eps,
        "rope_theta": c.layer.rope_theta,
        "tie_word_embeddings": False,
        "lm_head_from_target": lm_head_from_target,
        "eagle_config": {
            "eagle_aux_hidden_state_layer_ids": [i + 1 for i in c.aux_layers],
            "use_aux_hidden_state": True,
        },
    }


def shape_problems(weights: dict[str, torch.Tensor], wanted: dict[str, tuple[int, ...]]) -> list[str]:
    """Missing, unexpected and misshapen tensors, in words."""
    problems = [f"missing tensor {n} of shape {s}" for n, s in wanted.items() if n not in weights]
    problems += [f"unexpected tensor {n}" for n in weights if n not in wanted and n not in OPTIONAL]
    for name, shape in wanted.items():
        if name in weights and tuple(weights[name].shape) != shape:
            problems.append(f"{name} has shape {tuple(weights[name].shape)}, expected {shape} for this target")
    return problems


def vocab_problems(d2t: torch.Tensor, t2d: torch.Tensor) -> list[str]:
    """Whether d2t holds offsets into t2d's members; absolute ids are the commonest porting mistake."""
    ids = d2t + torch.arange(d2t.numel())
    if t2d.sum() != d2t.numel():
        return [f"t2d marks {int(t2d.sum())} target tokens, d2t has {d2t.numel()} draft tokens"]
    if ids.min() >= 0 and ids.max() < t2d.numel() and bool(t2d[ids].all()) and bool((ids.diff() > 0).all()):
        return []
    if d2t.min() >= 0 and d2t.max() < t2d.numel() and bool(t2d[d2t].all()):
        return ["d2t holds absolute target ids; expected offsets (target id = draft id + d2t[draft id])"]
    return ["d2t does not map the draft vocabulary onto the tokens that t2d marks"]


def _eagle3_config(folder: Path, raw: dict[str, Any], target: TargetShape) -> Eagle3Config:
    keys = ("hidden_size", "intermediate_size", "num_attention_heads", "vocab_size", "draft_vocab_size")
    problems = [f"config.json lacks {key!r}" for key in keys if key not in raw]
    if problems:
        raise CheckpointError(str(folder), problems)
    hidden = raw["hidden_size"]
    target_hidden = raw.get("target_hidden_size", hidden)
    if target_hidden != target.hidden_size:
        problems.append(f"made for hidden size {target_hidden}, the target has {target.hidden_size}")
    if raw["vocab_size"] != target.vocab_size:
        problems.append(f"made for a vocabulary of {raw['vocab_size']}, the target has {target.vocab_size}")
    if hidden != target.hidden_size:
        problems.append(f"head width {hidden} differs from the target's {target.hidden_size}; not supported yet")
    aux = _aux_layers(raw, target.num_layers, problems)
    if problems:
        raise CheckpointError(str(folder), problems)
    layer = LayerConfig(
        hidden_size=hidden,
        intermediate_size=raw["intermediate_size"],
        num_heads=raw["num_attention_heads"],
        num_kv_heads=raw.get("num_key_value_heads", raw["num_attention_heads"]),
        head_dim=raw.get("head_dim") or hidden // raw["num_attention_heads"],
        rms_norm_eps=raw.get("rms_norm_eps", 1e-6),
        rope_theta=float(raw.get("rope_theta") or raw.get("rope_parameters", {}).get("rope_theta", 10000.0)),
    )
    return Eagle3Config(
        layer=layer,
        target_hidden_size=target_hidden,
        vocab_size=raw["vocab_size"],
        draft_vocab_size=raw["draft_vocab_size"],
        aux_layers=aux,
    )


def _aux_layers(raw: dict[str, Any], num_layers: int, problems: list[str]) -> tuple[int, int, int]:
    """Indices of the layers whose output is taken; the file counts from the embedding (id k = output of layer k-1)."""
    eagle = raw.get("eagle_config") or {}
    ids = eagle.get("eagle_aux_hidden_state_layer_ids") or raw.get("eagle_aux_hidden_state_layer_ids")
    layers = tuple(i - 1 for i in ids) if ids else default_aux_layers(num_layers)
    if len(layers) != 3 or not all(0 <= i < num_layers - 1 for i in layers):
        problems.append(f"aux layer ids {ids} do not fit {num_layers} layers (three of 1..{num_layers - 1})")
        return (0, 0, 0)
    return layers


def _read_config(folder: Path) -> dict[str, Any]:
    path = folder / "config.json"
    if not path.is_file():
        raise CheckpointError(str(folder), ["there is no config.json"])
    try:
        return json.loads(path.read_text())
    except json.JSONDecodeError as error:
        raise CheckpointError(str(folder), [f"config.json is not JSON: {error}"]) from error


def _read_weights(folder: Path) -> dict[str, torch.Tensor]:
    try:
        if (folder / WEIGHTS).is_file():
            return load_file(str(folder / WEIGHTS))
        if (folder / LEGACY_WEIGHTS).is_file():
            return torch.load(folder / LEGACY_WEIGHTS, map_location="cpu", weights_only=True)
    except (SafetensorError, RuntimeError, EOFError, OSError, ValueError) as error:
        raise CheckpointError(str(folder), [f"the weights are truncated or not a checkpoint: {error}"]) from error
    raise CheckpointError(str(folder), [f"there is neither {WEIGHTS} nor {LEGACY_WEIGHTS}"])


def load_head(path_or_id, target, dtype, device, algo=None):
    return load_eagle3(path_or_id, target, dtype, device)
