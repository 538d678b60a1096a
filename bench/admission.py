"""Tries to attach a tiny random model of every causal-LM and image-text type of transformers.

    python bench/admission.py                          # one line a type, then one JSON object
    python bench/admission.py --types llama llama4     # only these
    python bench/admission.py --table docs/models.md   # writes the table

Configs are the types' defaults with small sizes. A type that cannot be built with them is counted
apart: nothing is known about it. Needs a CPU and minutes.
"""

import argparse
import json
import logging
import textwrap
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

import specdec
from specdec.core.errors import AttachError
from specdec.reach.targets.hf import HFTarget

NUM_LAYERS = 4
MOST_PARAMETERS = 40_000_000
# Sizes by their names in configs; a config takes those that it has.
SIZES: dict[str, Any] = {
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input"), 160),
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "embed_dim", "embedding_size", "emb_dim"), 64),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "d_ff", "n_inner", "encoder_ffn_dim", "decoder_ffn_dim"), 96),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "intermediate_size_mlp"), 48),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers"), NUM_LAYERS),
    **dict.fromkeys(("encoder_layers", "decoder_layers", "num_encoder_layers", "num_decoder_layers", "depth"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads"), 4),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "max_sequence_length"), 512),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_k", "num_experts_per_token", "moe_topk"), 2),
    **dict.fromkeys(("n_group", "topk_group", "n_shared_experts", "num_shared_experts"), 1),
    **dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id"), 1),
    "num_key_value_heads": 2,
    "head_dim": 16,
    "sliding_window": 8,
    "hidden_size_per_layer_input": 16,
    "first_k_dense_replace": 1,
    "q_lora_rank": 24,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "rotary_dim": 16,
    "attention_chunk_size": 8,
    "mamba_d_ssm": 128,
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_d_state": 16,
    "mamba_n_groups": 1,
    "mamba_chunk_size": 8,
    "is_decoder": True,
}
_RECURRENT = {"layer_types": ["conv", "full_attention"] * 2}
_ROPE = {"rope_type": "default", "rope_theta": 1e4}
_INDEXED = {
    "indexer_n_heads": 2,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 16,
    "indexer_budget": 8,
    "indexer_compress_ratio": 4,
}
OWN: dict[str, dict[str, Any]] = {  # settings that a type's config needs, besides sizes, for all of its kinds of layers
    "gpt_neo": {"attention_types": [[["global", "local"], 2]], "window_size": 8},
    "lfm2": _RECURRENT,
    "lfm2_moe": _RECURRENT,
    "gemma3n_text": {"layer_types": ["sliding_attention", "full_attention"] * 2, "num_kv_shared_layers": 2},
    "cohere_compass_text": {"rope_parameters": {"full_attention": _ROPE, "sliding_attention": _ROPE}},
    "qwen4_exp_text": _INDEXED,
    "dbrx": {
        "attn_config": {"rope_theta": 1e4, "kv_n_heads": 2, "clip_qkv": 8.0},
        "ffn_config": {"hidden_size": 64, "ffn_hidden_size": 96},
    },
    "longcat_flash": {"num_layers": 2, "expert_ffn_hidden_size": 48, "zero_expert_num": 2, "num_key_value_heads": 4},
    "mamba2": {"num_heads": 8, "n_groups": 1},
    "xmod": {"languages": ["en_XX"], "default_language": "en_XX"},
    "zamba": {"layers_block_type": ["mamba", "hybrid"] * 2, "attention_head_dim": 32},
    "zaya": {"num_experts_per_tok": 1},
    "zamba2": {"layers_block_type": ["mamba", "hybrid"] * 2},
}
LIMITS = {
    "moshi": "transformers gives another text with its cache than without; the engine gives the latter",
    "qwen3_vl_moe": "transformers gives another text with its cache than without; the engine gives the latter",
    "llama4_text": "transformers gives another text with left padding than without; the engine gives the latter",
}
PARTS = ("text_config", "vision_config", "audio_config", "decoder", "encoder", "llm_config")


class Verdict(NamedTuple):
    """Outcome of one type: "admitted", "refused" or "not built", and why."""

    model_type: str
    outcome: str
    why: str


def main() -> None:
    """Try all types and print, or write, their outcomes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--types", nargs="+", metavar="TYPE", help="only these; default: all of transformers")
    parser.add_argument("--table", type=Path, metavar="FILE", help="write a page with the table as markdown")
    args = parser.parse_args()
    logging.getLogger("transformers").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    verdicts = []
    types = args.types or [*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES]
    images = []
    for model_type in sorted(set(types)):
        if model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
            verdicts.append(examine(model_type))
            print(*verdicts[-1], sep="  ", flush=True)
        if model_type in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES:
            images.append(examine_images(model_type))
            print(*images[-1], sep="  ", flush=True)
    if args.table is not None:
        args.table.write_text(page(verdicts) + image_page(images), encoding="utf-8")
    counts = [Counter(v.outcome for v in some) for some in (verdicts, images)]
    print(
        json.dumps({"transformers": transformers.__version__, "types": len(verdicts), **counts[0], "images": counts[1]})
    )


def examine(model_type: str) -> Verdict:
    """Build a tiny model of the type and try to admit it."""
    if model_type.endswith("_assistant"):
        return Verdict(model_type, "not built", "a [draft](drafts.md) and no target")
    try:
        model = tiny(model_type)
    except Exception as error:  # any error of a config with these sizes
        return Verdict(model_type, "not built", _first_line(error))
    try:
        HFTarget(model).detach()
    except AttachError as error:
        return Verdict(model_type, "refused", "; ".join(map(_first_line, error.reasons)))
    return Verdict(model_type, "admitted", _limit_of(model))


def examine_images(model_type: str) -> Verdict:
    """Build a tiny model of an image-text type, try to admit it, and compare its text of a prompt with an image."""
    from tests.image_models import greedy, image_model, image_prompt

    try:
        model = image_model(model_type)
    except Exception as error:
        return Verdict(model_type, "not built", _first_line(error))
    try:
        engine = specdec.attach(model, max_batch=2, max_seq_len=256, algo="lookup", num_steps=3)
    except AttachError as error:
        return Verdict(model_type, "refused", "; ".join(map(_first_line, error.reasons)))
    with engine:
        try:
            prompt = image_prompt(model, 0)
            expected = greedy(model, prompt)
        except Exception:  # its images have another format
            return Verdict(model_type, "admitted", "")
        try:
            tokens = engine.generate(prompt, max_new_tokens=8, ignore_eos=True, do_sample=False).tokens
        except ValueError as error:
            return Verdict(model_type, "admitted", f"of images: {_first_line(error)}")
    outcome = "reads images" if tokens == expected else "admitted" if model_type in LIMITS else "another text"
    return Verdict(model_type, outcome, LIMITS.get(model_type, ""))


def _limit_of(model: PreTrainedModel) -> str:
    """Return what users must know of an admitted model's `generate`; "" if nothing."""
    if getattr(model.generation_config, "forced_eos_token_id", None) is not None:
        return "generate() refuses its forced_eos_token_id: set model.generation_config.forced_eos_token_id = None"
    return LIMITS.get(model.config.model_type, "")


def tiny(model_type: str) -> PreTrainedModel:
    """Return a random model of the type in fp32, in eval mode, its weights scaled so that all layers count."""
    kind = CONFIG_MAPPING[model_type]
    config = small(kind)
    torch.manual_seed(0)
    with torch.device("meta"):
        check_size(AutoModelForCausalLM.from_config(config))
    model: PreTrainedModel = AutoModelForCausalLM.from_config(small(kind), dtype=torch.float32)
    for parameter in model.parameters():
        if parameter.dim() >= 2:
            parameter.data.normal_(0, 0.6 / parameter.shape[-1] ** 0.5)
    return model.eval()


def check_size(model: PreTrainedModel) -> None:
    """Raise ValueError for a model that is too large to try."""
    size = sum(p.numel() for p in model.parameters())
    if size > MOST_PARAMETERS:
        raise ValueError(f"its smallest config has {size} parameters")


def small(kind: type[PreTrainedConfig]) -> PreTrainedConfig:
    """Return a config of `kind` with small sizes, in its parts too."""
    default = kind()
    values = default.to_dict()
    values |= {name: values.get(own) for name, own in default.attribute_map.items()}
    sizes = {name: size for name, size in SIZES.items() if name in values and isinstance(values[name], int | None)}
    if "num_key_value_heads" in sizes and values.get("num_attention_heads") == values["num_key_value_heads"]:
        sizes["num_key_value_heads"] = 4
    parts = {name: small(type(getattr(default, name))) for name in PARTS if _is_config(getattr(default, name, None))}
    return kind(**{**sizes, **OWN.get(default.model_type, {}), **parts})


def _is_config(value: Any) -> bool:
    return isinstance(value, PreTrainedConfig)


def _first_line(error: object) -> str:
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[0][:300]


def page(verdicts: list[Verdict]) -> str:
    """Return the page with counts and a row for each type."""
    return "\n".join(_lines(verdicts)) + "\n"


def image_page(verdicts: list[Verdict]) -> str:
    """Return the part of the page about image-text types."""
    counts = Counter(v.outcome for v in verdicts)
    summary = (
        f"Of the {len(verdicts)} image-text types, {len(verdicts) - counts['refused'] - counts['not built']} attach, "
        f"{counts['refused']} are refused, and {counts['not built']} could not be built. Of those that attach, "
        f"{counts['reads images']} were given a prompt with an image: with a draft their text is that of `generate`. "
        "Images of the others come in other forms, or are refused by name when a prompt has some."
    )
    lines = ["", "## Image-text types", *textwrap.wrap(summary, 120)]
    titles = (("reads images", "### Read images"), ("admitted", "### Attach"), ("another text", "### Differ"))
    for outcome, title in titles:
        names = ", ".join(v.model_type for v in verdicts if v.outcome == outcome)
        lines += ["", title, *textwrap.wrap(names, 120, break_on_hyphens=False)] if names else []
    notes = ("reads images", "admitted"), ("refused",), ("not built",)
    for outcomes, title in zip(notes, ("### With notes", "### Refused", "### Not built"), strict=True):
        rows = list(_by_reason(v for v in verdicts if v.outcome in outcomes and v.why))
        lines += ["", title, "| types | why |", "|---|---|", *rows] if rows else []
    return "\n".join(lines) + "\n"


def _lines(verdicts: list[Verdict]) -> Iterator[str]:
    counts = Counter(v.outcome for v in verdicts)
    yield "# Models"
    yield ""
    summary = (
        f"Of the {len(verdicts)} causal-LM types of transformers {transformers.__version__}, {counts['admitted']} "
        f"attach, {counts['refused']} are refused, and {counts['not built']} could not be built with small sizes. Each "
        "was tried as a tiny random model: `python bench/admission.py --table docs/models.md` writes this page."
    )
    yield from textwrap.wrap(summary, 120)
    yield ""
    yield "## Admitted"
    names = ", ".join(v.model_type for v in verdicts if v.outcome == "admitted")
    yield from textwrap.wrap(names, 120, break_on_hyphens=False)
    for outcome, title in (("admitted", "### With notes"), ("refused", "## Refused"), ("not built", "## Not built")):
        yield ""
        yield title
        yield "| types | why |"
        yield "|---|---|"
        yield from _by_reason(v for v in verdicts if v.outcome == outcome and v.why)


def _by_reason(verdicts: Iterable[Verdict]) -> Iterator[str]:
    """Yield a table row for each reason, with all its types."""
    types: dict[str, list[str]] = {}
    for v in verdicts:
        types.setdefault(v.why.replace("|", "/"), []).append(v.model_type)
    yield from (f"| {', '.join(names)} | {why} |" for why, names in types.items())


if __name__ == "__main__":
    main()
