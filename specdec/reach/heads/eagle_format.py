"""EAGLE-1/2 checkpoints: SafeAILab's layout (arXiv 2401.15077, 2406.16858). The smallest example of a head format."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Any

from specdec.core.draft.head import DraftHead
from specdec.reach.heads import fresh
from specdec.reach.heads.configs import is_sound, layer_json, read_layer
from specdec.reach.heads.eagle import EagleConfig, EagleHead
from specdec.reach.heads.files import EMBEDDING, HeadFiles, shapes_of
from specdec.reach.heads.format import HeadFormat, Layout, Saving, Stored, Tensors, Training, same
from specdec.reach.targets.shape import TargetShape


def read(
    files: HeadFiles, target: TargetShape | None, head_class: Callable[[EagleConfig], EagleHead] = EagleHead
) -> Stored | None:
    config = files.parse(_config)
    if config is None:
        return None
    shape = (config.vocab_size, config.layer.hidden_size)
    files.check_target(target, shape[1], shape[0])
    head = files.make(head_class, replace(config, own_embedding=files.is_own(EMBEDDING, target)))
    wanted = shapes_of(head)
    files.check(wanted, {EMBEDDING: shape}, partial(_why, head))
    return Stored(head, files.items(list(wanted)))


def _config(files: HeadFiles) -> EagleConfig | None:
    """Read config.json. `bias` of fc defaults to true, as in the official reader; fc.bias must agree."""
    if not is_sound(files, files.raw):
        return None
    has_bias = files.flag("bias", "fc.bias", absent=True)
    layer = read_layer(files, files.raw, "layers.0", bias_key="qkv_bias")
    num_layers = max(1, files.count("layers"))
    files.compare("num_hidden_layers", files.raw.get("num_hidden_layers"), num_layers)
    return EagleConfig(layer, files.raw["vocab_size"], has_bias, num_layers)


def _why(head: DraftHead, name: str, shape: tuple[int, ...] | None) -> str:
    if shape is not None and name.endswith("layers.0.input_layernorm.weight"):
        return "the first layer of EAGLE-1/2 has no input norm"
    return why_of_eagle(head, 2, name, shape)


def why_of_eagle(head: DraftHead, num_parts: int, name: str, shape: tuple[int, ...] | None) -> str:
    """Return causes that EAGLE heads have in common; num_parts: parts, each as wide as the target, that fc reads."""
    if shape is None:
        narrow = "absent embedding: the head's width differs from the target's, so it needs its own"
        return narrow if name == EMBEDDING else ""
    if name == EMBEDDING:
        return "the vocabulary or the hidden size of another target"
    if name == "fc.weight" and len(shape) == 2:
        has, rest = divmod(shape[1], head.target_hidden_size)
        if rest or has == num_parts:
            return "the hidden size of another target"
        return f"it reads {has} parts of {head.target_hidden_size}, where config.json and layout mean {num_parts}"
    return "config.json and weights do not belong together" if name in head.state_dict() else ""


def write(head: EagleHead, saving: Saving) -> tuple[dict[str, Any], Tensors]:
    """Return an ordinary Llama config with `bias` of fc, and the tensors."""
    c = head.config
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "num_hidden_layers": c.num_layers,
        **layer_json(c.layer),
        "vocab_size": c.vocab_size,
        "bias": c.fc_bias,
        "qkv_bias": c.layer.qkv_bias,
        "tie_word_embeddings": False,
    }
    return config, head.state_dict()


EAGLE = HeadFormat(
    algo="eagle",
    layouts=(Layout("eagle", "eagle", mark=r"(fc|layers\.\d+)\.", prefixes=same("fc.", "layers.", "embed_tokens.")),),
    read=read,
    write=write,
    fresh=lambda model, shape, seed, hot_ids: fresh.new_eagle(model, seed, shape.intermediate_size),
    written=lambda head: ("eagle",),
    # arXiv 2401.15077 trains with both losses.
    training=Training(
        MappingProxyType({"num_steps": 3, "feature_weight": 1.0, "soft_weight": 0.1}),
        frozenset({"intermediate_size"}),
        "EAGLE-1/2 draft head",
        "Official EAGLE layout, for targets of the same hidden size and vocabulary.",
    ),
)
