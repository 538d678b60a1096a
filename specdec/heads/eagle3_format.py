"""EAGLE-3 checkpoints: SafeAILab's layout (arXiv 2503.01840), which SpecForge and SGLang write too, and vLLM's."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import torch
from transformers import PreTrainedModel

from specdec.checkpoints.fitting import full_vocab_ids, full_vocab_problems, vocab_problems
from specdec.draft.head import DraftHead
from specdec.heads import fresh
from specdec.heads.configs import Reading, eagle3_config, speculators_config
from specdec.heads.eagle3 import Eagle3Config, Eagle3Head, default_aux_layers
from specdec.heads.eagle_format import rope_problems, why_of_eagle
from specdec.heads.files import HeadFiles
from specdec.heads.format import HeadFormat, IsOwn, Training, Wanted, layer_json
from specdec.heads.layouts import AUX_IDS, AUX_LAYERS, Layout, same
from specdec.targets.shape import TargetShape

MAX_EXTRA_LAYERS = 16  # beyond the first
_EAGLE3_SHARED = same("fc.", "fc_norm.", "input_norm.", "norm.", "lm_head.", "embed_tokens.", "d2t", "t2d")


class Eagle3Format(HeadFormat):
    """EAGLE-3 checkpoints. `lm_head.weight` may be absent where config.json says `lm_head_from_target`."""

    algo = "eagle3"
    features = "aux"
    layouts = (
        Layout(
            name="eagle3",
            algo="eagle3",
            mark=r"midlayer\.",
            prefixes=(*same("midlayer.", "additional_layers."), *_EAGLE3_SHARED),
        ),
        Layout(
            name="speculators",
            algo="eagle3",
            mark=r"layers\.0\.hidden_norm\.|d2t$",
            prefixes=(
                ("layers.0.", "midlayer."),
                *((f"layers.{i + 1}.", f"additional_layers.{i}.") for i in range(MAX_EXTRA_LAYERS)),
                *_EAGLE3_SHARED,
            ),
        ),
    )
    written = ("eagle3", "speculators")
    shares_lm_head_rows = True
    combining = r"midlayer\.self_attn\.[qkv]_proj"
    training = Training(
        MappingProxyType({}),
        frozenset({"intermediate_size", "draft_vocab_size", "aux_layers"}),
        "EAGLE-3 draft head",
        "Official EAGLE-3 layout, for targets of the same hidden size, vocabulary and layers.",
    )

    def fresh(self, model: PreTrainedModel, shape: Any, seed: int, hot_ids: Callable[[int], torch.Tensor]) -> DraftHead:
        config = fresh.eagle3_config(model, shape.draft_vocab_size, shape.aux_layers, shape.intermediate_size)
        return fresh.new_eagle3(model, config, hot_ids(config.draft_vocab_size), seed)

    def read_config(self, reading: Reading, layout: Layout, names: Sequence[str]) -> Eagle3Config | None:
        return (speculators_config if layout.name == "speculators" else eagle3_config)(reading)

    def make(self, config: Eagle3Config, target: TargetShape) -> DraftHead:
        return Eagle3Head(config)

    def sizes(self, config: Eagle3Config) -> tuple[int, int]:
        return config.target_hidden_size, config.vocab_size

    def with_own_copies(self, config: Eagle3Config, target: TargetShape, is_own: IsOwn) -> Eagle3Config:
        is_narrow = config.layer.hidden_size != target.hidden_size
        return replace(config, own_embedding=is_narrow or is_own("embed_tokens.weight", target.embed_tokens))

    def try_out(self, head: Eagle3Head) -> list[str]:
        return rope_problems(head.config.layer)

    def leave_out(self, files: HeadFiles, head: Eagle3Head, wanted: Wanted) -> Wanted:
        optional = super().leave_out(files, head, wanted)
        if files.raw.get("lm_head_from_target"):
            optional["lm_head.weight"] = wanted.pop("lm_head.weight")
        if _scores_all(head):  # the maps are identities, often left out or zero
            optional.update({name: wanted.pop(name) for name in ("d2t", "t2d")})
        return optional

    def value_problems(self, files: HeadFiles, head: Eagle3Head, wanted: Wanted) -> list[str]:
        if _scores_all(head):
            maps = _stored_maps(files, head)
            return full_vocab_problems(maps.get("d2t"), maps.get("t2d"))
        names = [name for name in ("d2t", "t2d") if files.found.get(name, (None,))[0] == wanted[name]]
        return vocab_problems(**files.read(names)) if len(names) == 2 else []

    def why(self, head: DraftHead, name: str, shape: tuple[int, ...] | None) -> str:
        cause = why_of_eagle(head, name, shape, num_parts=len(head.aux_layers))
        if cause or shape is None:
            return cause
        if name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight")) and name.startswith("midlayer"):
            return "the first layer of EAGLE-3 reads [embedding, feature], twice the head's width"
        if name == "lm_head.weight" or name in ("d2t", "t2d"):
            return "draft_vocab_size or vocab_size in config.json is not what the head was trained with"
        return super().why(head, name, shape)

    def complete(
        self,
        files: HeadFiles,
        head: Eagle3Head,
        state: dict[str, torch.Tensor],
        target: TargetShape,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """Add maps that are identities, and rows of the target's output head."""
        if "lm_head.weight" in files.found:
            state["lm_head.weight"] = files.read(["lm_head.weight"])["lm_head.weight"].to(device, dtype, copy=True)
        if _scores_all(head):
            d2t = _stored_maps(files, head).get("d2t")
            if d2t is not None and "lm_head.weight" in state:  # rows go in target order: hot ids are ascending
                state["lm_head.weight"] = state["lm_head.weight"][full_vocab_ids(d2t).argsort().to(device)]
            state["d2t"] = torch.zeros(head.config.draft_vocab_size, dtype=torch.int64, device=device)
            state["t2d"] = torch.ones(head.config.vocab_size, dtype=torch.bool, device=device)
        if "lm_head.weight" not in state:
            rows = target.lm_head_rows()
            hot = state["d2t"] + torch.arange(state["d2t"].numel(), device=device)
            state["lm_head.weight"] = rows[hot.to(rows.device)].to(device=device, dtype=dtype)

    def default_layout(self, head: Eagle3Head) -> str:
        return "speculators" if inexpressible(head.config) else "eagle3"

    def config_json(
        self,
        layout: str,
        head: Eagle3Head,
        lm_head_from_target: bool,
        verifier: Mapping[str, Any] | None,
        num_layers: int | None,
    ) -> dict[str, Any]:
        if layout == "eagle3":
            written = eagle3_json(head.config, lm_head_from_target)
        else:
            ours = {"lm_head_from_target": True} if lm_head_from_target else {}
            written = {**speculators_json(head.config), **ours, "speculators_config": proposal_json(verifier)}
        _without_default_ids(written, head.config, num_layers)
        return written


def _stored_maps(files: HeadFiles, head: Eagle3Head) -> dict[str, torch.Tensor]:
    """Read d2t and t2d, those that are stored in their shapes."""
    sizes = {"d2t": head.config.draft_vocab_size, "t2d": head.config.vocab_size}
    return files.read([name for name, size in sizes.items() if files.found.get(name, (None,))[0] == (size,)])


def _scores_all(head: Eagle3Head) -> bool:
    return head.config.draft_vocab_size == head.config.vocab_size


def inexpressible(c: Eagle3Config) -> list[str]:
    """List what the official EAGLE-3 layout cannot express of a head."""
    flags = {
        "norm_before_residual": c.norm_before_residual,
        "norm_before_fc": c.norm_before_fc,
        "norm_output (recycles_normed)": c.recycles_normed,
        "sliding_window": c.layer.window is not None,
        "q_norm and k_norm (qwen3)": c.layer.qk_norm,
        f"{c.num_layers} layers": c.num_layers > 1,
    }
    return [name for name, is_set in flags.items() if is_set]


def eagle3_json(c: Eagle3Config, lm_head_from_target: bool) -> dict[str, Any]:
    """Make config.json of the official EAGLE-3 layout, like SpecForge's. ValueError names what it cannot express."""
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
    layer = {
        "model_type": "qwen3" if c.layer.qk_norm else "llama",
        "num_hidden_layers": c.num_layers,
        **layer_json(c.layer),
        "attention_bias": c.layer.qkv_bias,
        "vocab_size": c.vocab_size,
        "tie_word_embeddings": False,
    }
    if c.layer.window is not None:
        kinds = ["sliding_attention"] * c.num_layers
        layer.update(sliding_window=c.layer.window, use_sliding_window=True, layer_types=kinds)
    return {
        "architectures": ["Eagle3DraftModel"],
        "speculators_model_type": "eagle3",
        "transformer_layer_config": layer,
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


def _without_default_ids(config: dict[str, Any], c: Eagle3Config, num_layers: int | None) -> None:
    """Drop aux ids that are the paper's layers of a target of `num_layers`, every reader's default: SGLang counts given
    ids differently from vLLM."""
    if num_layers is not None and num_layers > 7 and c.aux_layers == default_aux_layers(num_layers):
        config.get("eagle_config", config).pop(AUX_IDS)
