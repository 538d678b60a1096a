"""EAGLE-1/2 checkpoints: SafeAILab's layout (arXiv 2401.15077, 2406.16858)."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import torch
from transformers import PreTrainedModel

from specdec.checkpoints.fitting import ANOTHER_TARGET
from specdec.draft.head import DraftHead
from specdec.heads import fresh
from specdec.heads.base import LayerConfig, layer_rope
from specdec.heads.configs import Reading, eagle_config
from specdec.heads.eagle import EagleConfig, EagleHead
from specdec.heads.format import HeadFormat, IsOwn, Training, layer_json
from specdec.heads.layouts import Layout, same
from specdec.targets.shape import TargetShape


class EagleFormat(HeadFormat):
    """EAGLE-1/2 checkpoints."""

    algo = "eagle"
    layouts = (
        Layout(
            name="eagle",
            algo="eagle",
            mark=r"(fc|layers\.\d+)\.",
            prefixes=same("fc.", "layers.", "embed_tokens."),
        ),
    )
    written = ("eagle",)
    # arXiv 2401.15077 trains with both losses.
    training = Training(
        MappingProxyType({"num_steps": 3, "feature_weight": 1.0, "soft_weight": 0.1}),
        frozenset({"intermediate_size"}),
        "EAGLE-1/2 draft head",
        "Official EAGLE layout, for targets of the same hidden size and vocabulary.",
    )

    def fresh(self, model: PreTrainedModel, shape: Any, seed: int, hot_ids: Callable[[int], torch.Tensor]) -> DraftHead:
        return fresh.new_eagle(model, seed, shape.intermediate_size)

    def read_config(self, reading: Reading, layout: Layout, names: Sequence[str]) -> EagleConfig | None:
        return eagle_config(reading)

    def make(self, config: EagleConfig, target: TargetShape) -> DraftHead:
        return EagleHead(config)

    def sizes(self, config: EagleConfig) -> tuple[int, int]:
        return config.layer.hidden_size, config.vocab_size

    def with_own_copies(self, config: EagleConfig, target: TargetShape, is_own: IsOwn) -> EagleConfig:
        return replace(config, own_embedding=is_own("embed_tokens.weight", target.embed_tokens))

    def try_out(self, head: EagleHead) -> list[str]:
        return rope_problems(head.config.layer)

    def why(self, head: DraftHead, name: str, shape: tuple[int, ...] | None) -> str:
        if shape is not None and name.endswith("layers.0.input_layernorm.weight"):
            return "the first layer of EAGLE-1/2 has no input norm"
        return why_of_eagle(head, name, shape, num_parts=2) or super().why(head, name, shape) * (shape is not None)

    def config_json(
        self,
        layout: str,
        head: EagleHead,
        lm_head_from_target: bool,
        verifier: Mapping[str, Any] | None,
        num_layers: int | None,
    ) -> dict[str, Any]:
        """Return an ordinary Llama config, and `bias` of fc."""
        c = head.config
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "num_hidden_layers": c.num_layers,
            **layer_json(c.layer),
            "vocab_size": c.vocab_size,
            "bias": c.fc_bias,
            "qkv_bias": c.layer.qkv_bias,
            "tie_word_embeddings": False,
        }


def rope_problems(c: LayerConfig) -> list[str]:
    """Check that the rope tables of two positions are finite and as wide as a head."""
    cos, sin = layer_rope(c, torch.arange(2), torch.float32)
    if cos.shape[-1] == c.head_dim and bool(torch.isfinite(cos).all() & torch.isfinite(sin).all()):
        return []
    said = f"rope_theta={c.rope_theta:g} and rope_scaling={c.rope_scaling}"
    return [f"{said} give no finite angles for heads of {c.head_dim} elements"]


def why_of_eagle(head: DraftHead, name: str, shape: tuple[int, ...] | None, num_parts: int) -> str:
    """Return causes that EAGLE heads have in common; num_parts: parts, each as wide as the target, that fc reads."""
    if shape is None:
        is_narrow = name == "embed_tokens.weight"
        return "absent embedding: the head's width differs from the target's, so it needs its own" if is_narrow else ""
    if name == "embed_tokens.weight":
        return "the vocabulary or the hidden size of another target"
    if name != "fc.weight" or len(shape) != 2:
        return ""
    num_features, rest = divmod(shape[1], head.target_hidden_size)
    if rest or num_features == num_parts:
        return ANOTHER_TARGET
    return f"it reads {num_features} parts of {head.target_hidden_size}, where config.json and layout mean {num_parts}"
