"""MTP checkpoints (arXiv 2412.19437): DeepSeek-V3 and GLM-4.5, whose MTP layer follows the target's last; Qwen3-Next
and Qwen3.5; MiMo; vLLM's speculators."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import torch
from transformers import PreTrainedModel

from specdec.draft.head import DraftHead
from specdec.heads import fresh
from specdec.heads.configs import Reading
from specdec.heads.files import HeadFiles
from specdec.heads.format import HeadFormat, IsOwn, Training, Wanted
from specdec.heads.layouts import OWN_KEY, Layout, mtp_indices, same
from specdec.heads.nextn import NextNConfig, NextNHead, full_attention_layer
from specdec.heads.nextn_weights import nextn_config, split_experts
from specdec.targets.shape import TargetShape


def _mtp_layer(at: str) -> tuple[tuple[str, str], ...]:
    """Return the prefixes of the layer `at` in MiMo's names, which speculators took over."""
    return (
        (f"{at}.token_layernorm.", "mtp.{m}.enorm."),
        (f"{at}.hidden_layernorm.", "mtp.{m}.hnorm."),
        (f"{at}.final_layernorm.", "mtp.{m}.norm."),
        (f"{at}.input_proj.", "mtp.{m}.eh_proj."),
        (f"{at}.", "mtp.{m}.layer."),
    )


class NextNFormat(HeadFormat):
    """NextN/MTP checkpoints. Sizes are those of the target, since these layers are made like its own."""

    algo = "nextn"
    layouts = (
        Layout(
            name="speculators_mtp",
            algo="nextn",
            mark=r"mtp_layers\.",
            prefixes=(*_mtp_layer("mtp_layers.{m}"), *same("embed_tokens.", "lm_head.")),
        ),
        Layout(
            name="mimo",
            algo="nextn",
            mark=r"model\.mtp_layers\.",
            prefixes=_mtp_layer("model.mtp_layers.{m}"),
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
            holds_target=True,
        ),
    )
    written = ("nextn",)
    combining = r"mtp\.\d+\.eh_proj"
    # FastMTP weights step j by 0.6**j, normalised.
    training = Training(
        MappingProxyType({"num_steps": 3, "step_decay": 0.6, "normalise_steps": True}),
        frozenset({"copy_layer"}),
        "NextN (MTP) draft head",
        "DeepSeek-V3's names, for targets of the same class and shape.",
    )

    def fresh(self, model: PreTrainedModel, shape: Any, seed: int, hot_ids: Callable[[int], torch.Tensor]) -> DraftHead:
        return fresh.new_nextn(model, seed, shape.copy_layer)

    def read_config(self, reading: Reading, layout: Layout, names: Sequence[str]) -> NextNConfig | None:
        return nextn_config(reading, layout, list(names))

    def make(self, config: NextNConfig, target: TargetShape) -> DraftHead:
        assert target.model is not None, "an MTP layer is made like the live target's: TargetShape.model"
        return NextNHead(target.model, config)

    def first_index(self, layout: Layout, names: Sequence[str]) -> int | None:
        return next(iter(mtp_indices(layout, names)), None)

    def with_own_copies(self, config: NextNConfig, target: TargetShape, is_own: IsOwn) -> NextNConfig:
        own_embedding = is_own("embed_tokens.weight", target.embed_tokens)
        return replace(config, own_embedding=own_embedding, own_head=is_own("lm_head.weight", target.lm_head))

    def leave_out(self, files: HeadFiles, head: NextNHead, wanted: Wanted) -> Wanted:
        shape = (head.vocab_size, head.hidden_size)
        return {**super().leave_out(files, head, wanted), "lm_head.weight": shape}

    def why(self, head: DraftHead, name: str, shape: tuple[int, ...] | None) -> str:
        return "" if name in ("embed_tokens.weight", "lm_head.weight") else "an MTP layer of another family or size"

    def kept_dtypes(self, head: NextNHead, target: TargetShape) -> dict[str, torch.dtype]:
        """Return the dtypes of tensors that transformers keeps in fp32 in the target's own layers."""
        layers = target.model.get_decoder().layers
        weight = target.embed_tokens.weight
        twin = layers[full_attention_layer(head.hf_config)].state_dict()
        kept = {name: t.dtype for name, t in twin.items() if t.dtype != weight.dtype}
        return {f"mtp.{m}.layer.{name}": dtype for m in range(head.num_modules) for name, dtype in kept.items()}

    def finish(self, head: NextNHead, device: torch.device) -> None:
        head.rotary = type(head.rotary)(config=head.hf_config).to(device)

    def to_write(self, head: NextNHead, state: dict[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], int | None]:
        return split_experts(state), head.hf_config.num_hidden_layers

    def config_json(
        self,
        layout: str,
        head: NextNHead,
        lm_head_from_target: bool,
        verifier: Mapping[str, Any] | None,
        num_layers: int | None,
    ) -> dict[str, Any]:
        """Return the target's own config, and our keys where the head is not like DeepSeek-V3's."""
        c, plain = head.config, NextNConfig()
        whole = json.loads(head.hf_config.to_json_string(use_diff=False))
        of_a_file = {"_name_or_path", "_model_name_or_path", "quantization_config", "dtype", "architectures"}
        config = {name: value for name, value in whole.items() if name not in of_a_file}
        keys = ("hidden_first", "recycles_normed")
        own = {key: getattr(c, key) for key in keys if getattr(c, key) != getattr(plain, key)}
        return {**config, "num_nextn_predict_layers": c.num_layers, **({OWN_KEY: own} if own else {})}
