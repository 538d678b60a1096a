"""Reads LoRA adapters (arXiv 2106.09685) as PEFT saves them: the matrices and scale of each linear layer.

Features other than low-rank products of linear layers (DoRA, biases, embeddings, whole modules) are refused by name.
"""

import math
import re
from collections.abc import Iterator, Mapping
from enum import Enum
from pathlib import Path
from typing import Any, NamedTuple

import torch

from specdec.core.errors import CheckpointError
from specdec.reach.checkpoints.folders import read_json
from specdec.reach.checkpoints.tensors import TensorFiles

CONFIG = "adapter_config.json"
FILES = ("adapter_model.safetensors", "adapter_model.bin")
KEY = re.compile(r"(?:base_model\.model\.)?(.+)\.lora_([AB])(?:\.\w+)?\.weight")
# Settings of a LoraConfig that add more than low-rank products to linear layers.
MORE = (
    *("use_dora", "use_qalora", "lora_bias", "modules_to_save", "trainable_token_indices", "target_parameters"),
    *("layer_replication", "alora_invocation_tokens"),
)
# Prefixes of `init_lora_weights` with which PEFT changes the model's own weights when it loads an adapter.
CHANGE_BASE = ("pissa", "olora", "corda", "loftq")
CURE = "merge it into a copy of the model (merge_and_unload), and attach to that"


class LowRank(NamedTuple):
    """LoRA product that an adapter adds to a linear layer: scale * x @ a.T @ b.T, with a [r, K] and b [N, r]."""

    a: torch.Tensor
    b: torch.Tensor
    scale: float


def config_reasons(config: Mapping[str, Any]) -> Iterator[str]:
    """Yield the unsupported features that `config`, an adapter_config.json, asks for."""
    kind = config.get("peft_type")
    kind = kind.value if isinstance(kind, Enum) else kind
    if kind != "LORA":
        yield f"peft_type={kind!r}: expected LORA; {CURE}"
    more = [f"{name}={config[name]!r}" for name in MORE if config.get(name)]
    if (bias := config.get("bias")) not in ("none", None):
        more.append(f"bias={bias!r}")
    if more:
        yield f"{', '.join(more)}: expected low-rank products beside linear layers alone; {CURE}"


def read_lora(path_or_id: str | Path) -> dict[str, LowRank]:
    """Read the adapter in a folder or Hub repository: a LowRank for each linear layer, by its name in the model.

    CheckpointError lists every problem, unsupported features included.
    """
    files = TensorFiles.at(path_or_id, FILES)
    config = read_json(files.folder, CONFIG)
    problems = list(config_reasons(config))
    if str(init := config.get("init_lora_weights")).lower().startswith(CHANGE_BASE):
        problems.append(
            f"init_lora_weights={init!r}: its matrices fit weights that PEFT changes when it loads them; save it with "
            f"path_initial_model_for_weight_conversion, or {CURE}"
        )
    found: dict[str, dict[str, torch.Tensor]] = {}
    for key, tensor in files.read(files.files).items():
        match = KEY.fullmatch(key)
        if match is None or tensor.dim() != 2:
            problems.append(f"{key} {list(tensor.shape)}: expected lora_A and lora_B matrices of linear layers; {CURE}")
        else:
            found.setdefault(match[1], {})[match[2]] = tensor
    whole = {name: (pair["A"], pair["B"]) for name, pair in found.items() if len(pair) == 2}
    problems += [f"{name} has lora_{next(iter(found[name]))} alone" for name in found.keys() - whole.keys()]
    odd = {name: pair for name, pair in whole.items() if not 0 < len(pair[0]) == pair[1].shape[1]}
    problems += [f"{name}: lora_A {[*a.shape]}, but lora_B {[*b.shape]}" for name, (a, b) in odd.items()]
    broken = [name for name, pair in whole.items() if not all(t.float().isfinite().all() for t in pair)]
    problems += [f"{name}: its matrices are not finite" for name in broken]
    if not (whole or problems):
        problems.append("it has no matrices")
    scales: dict[str, float] = {}
    try:
        scales = {name: _scale(config, name, len(a)) for name, (a, _) in whole.items() if name not in odd}
    except (AttributeError, TypeError, ValueError, re.error) as error:
        given = ", ".join(f"{name}={config.get(name)!r}" for name in ("lora_alpha", "alpha_pattern"))
        problems.append(f"{given}: expected a number, and numbers by regular expressions of names: {error}")
    if problems:
        raise CheckpointError(str(path_or_id), problems)
    return {name: LowRank(a, b, scales[name]) for name, (a, b) in whole.items()}


def _scale(config: Mapping[str, Any], name: str, rank: int) -> float:
    """Return alpha / r, or alpha / sqrt(r) of rsLoRA; alpha_pattern has regular expressions for ends of names."""
    patterns = config.get("alpha_pattern") or {}
    alpha = next((v for p, v in patterns.items() if re.match(rf"(.*\.)?({p})$", name)), config.get("lora_alpha", 8))
    if not math.isfinite(alpha):
        raise ValueError(f"{alpha} is not finite")
    return alpha / (rank**0.5 if config.get("use_rslora") else rank)
