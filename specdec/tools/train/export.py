"""Writes a distilled LM as a quantised GGUF file or as transformers does, and a note on whose vocabulary it uses.

The tokenizer, megabytes in a GGUF file, is the target's and left out. GGUF's block quantisation is here in torch, too,
so that a student trains on the weights that will be stored; the gguf package packs them, and tests compare both.
"""

import copy
from collections.abc import Mapping
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from transformers import PreTrainedModel

from specdec.reach.checkpoints.folders import json_text
from specdec.reach.checkpoints.replacing import CHECKPOINT, replacing, write_text
from specdec.reach.heads.custom_generate import write_custom_generate
from specdec.reach.targets.standalone import NOTE

FILE = "draft.gguf"
BLOCK = 32  # values that share a scale
EMBED_TYPES: Mapping[str, int] = MappingProxyType({"Q4_0": 2, "Q5_0": 8, "Q8_0": 7})  # name to ggml's llama_ftype
LAYER_TYPE = "Q8_0"
_HALF_RANGE = {"Q4_0": 8, "Q5_0": 16}  # the value of largest magnitude becomes the lowest level


def write_gguf(folder: Path, student: PreTrainedModel, embed_type: str) -> None:
    """Write `student`, a Llama with tied embeddings, to folder/draft.gguf; `from_pretrained(folder, gguf_file=...)`
    reads it. embed_type: GGUF type of the embedding; see `stored_type`."""
    if find_spec("gguf") is None:
        raise ValueError("writing GGUF needs its package: pip install gguf accelerate; or export safetensors")
    gguf: Any = import_module("gguf")
    c = student.config
    check_blocks(c.hidden_size, c.intermediate_size, embed_type)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, c.num_hidden_layers)
    with replacing(folder, CHECKPOINT) as partial:
        writer = gguf.GGUFWriter(partial / FILE, "llama")
        writer.add_vocab_size(c.vocab_size)
        writer.add_context_length(c.max_position_embeddings)
        writer.add_embedding_length(c.hidden_size)
        writer.add_block_count(c.num_hidden_layers)
        writer.add_feed_forward_length(c.intermediate_size)
        writer.add_head_count(c.num_attention_heads)
        writer.add_head_count_kv(c.num_key_value_heads)
        writer.add_rope_dimension_count(c.head_dim)
        writer.add_rope_freq_base(c.rope_parameters["rope_theta"])
        writer.add_layer_norm_rms_eps(c.rms_norm_eps)
        writer.add_file_type(EMBED_TYPES[embed_type])
        for name, weight in student.named_parameters():
            rows = _interleaved(weight.detach(), name, c).cpu().numpy()
            kind = gguf.GGMLQuantizationType[stored_type(name, weight, embed_type)]
            writer.add_tensor(names.get_name(name, (".weight",)), gguf.quants.quantize(rows, kind), raw_dtype=kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()


def write_safetensors(folder: Path, student: PreTrainedModel, dtype: torch.dtype) -> None:
    """Write `student` as transformers does, in `dtype`."""
    with replacing(folder, CHECKPOINT) as partial:
        copy.deepcopy(student).to(dtype).save_pretrained(partial)


def write_note(folder: Path, target: str, vocab_size: int, fingerprint: str) -> None:
    """Write the note that names the draft's target; fingerprint: `tokenizer_fingerprint` of the target's tokenizer."""
    note = {"algo": "standalone", "target": target, "vocab_size": vocab_size, "tokenizer_sha256": fingerprint}
    write_text(folder / NOTE, json_text(note))
    write_custom_generate(folder)


def _interleaved(weight: torch.Tensor, name: str, config: Any) -> torch.Tensor:
    """Reorder rows of q and k for ggml's rope: rotated pairs are adjacent, where HF keeps two halves of a head."""
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    count = next((n for key, n in heads.items() if key in name), None)
    if count is None:
        return weight
    return weight.view(count, 2, -1, weight.shape[1]).transpose(1, 2).reshape(weight.shape)


def stored_type(name: str, weight: torch.Tensor, embed_type: str) -> str:
    """Return the GGUF type of a weight by its HF name: the embedding as `embed_type`, matrices Q8_0, norms F32."""
    if weight.dim() == 1:
        return "F32"
    return embed_type if "embed_tokens" in name else LAYER_TYPE


def stored(name: str, weight: torch.Tensor, embed_type: str) -> torch.Tensor:
    """Return a weight [..., multiple of 32] fp32, by its HF name, as it reads back from a GGUF file."""
    return rounded(weight, stored_type(name, weight, embed_type))


def rounded(weight: torch.Tensor, kind: str) -> torch.Tensor:
    """Return `weight` [..., multiple of 32] fp32 as it reads back after being stored as `kind`."""
    if kind == "F32":
        return weight
    blocks = weight.reshape(-1, BLOCK)
    if kind == "Q8_0":
        scale = blocks.abs().amax(-1, keepdim=True) / 127
        steps = blocks * _inverse(scale)
        levels = (steps.abs() + 0.5).floor() * steps.sign()
    else:
        half = _HALF_RANGE[kind]
        largest = blocks.gather(-1, blocks.abs().argmax(-1, keepdim=True))
        scale = largest / -half
        levels = (blocks * _inverse(scale) + (half + 0.5)).trunc().clamp(0, 2 * half - 1) - half
    return (levels * scale.half().float()).view(weight.shape)


def check_blocks(hidden_size: int, intermediate_size: int, embed_type: str) -> None:
    """Raise ValueError for an unknown `embed_type`, or sizes that do not fit the blocks."""
    if embed_type not in EMBED_TYPES:
        raise ValueError(f"embed_type={embed_type!r}: expected one of {sorted(EMBED_TYPES)}")
    for name, size in (("hidden_size", hidden_size), ("intermediate_size", intermediate_size)):
        if size % BLOCK:
            raise ValueError(f"{name}={size}: GGUF's blocks take multiples of {BLOCK}; round it, or save safetensors")


def _inverse(scale: torch.Tensor) -> torch.Tensor:
    return torch.where(scale == 0, 0.0, 1 / scale)
