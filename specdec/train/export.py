"""Writes a distilled LM as a quantised GGUF file or as transformers does, and a note on whose vocabulary it uses.

The tokenizer, megabytes in a GGUF file, is the target's and left out.
"""

import copy
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from specdec.checkpoints.folders import json_text
from specdec.checkpoints.replacing import CHECKPOINT, replacing, write_text
from specdec.heads.custom_generate import write_custom_generate
from specdec.targets.standalone import NOTE
from specdec.train.rounding import EMBED_TYPES, check_blocks, stored_type

FILE = "draft.gguf"


def write_gguf(folder: Path, student: PreTrainedModel, embed_type: str) -> None:
    """Write `student`, a Llama with tied embeddings, to folder/draft.gguf; `from_pretrained(folder, gguf_file=...)`
    reads it. embed_type: GGUF type of the embedding; see `rounding.stored_type`."""
    gguf = _gguf()
    c = student.config
    check_blocks(c.hidden_size, c.intermediate_size, embed_type)
    with replacing(folder, CHECKPOINT) as partial:
        _write(gguf, partial / FILE, student, embed_type)


def _write(gguf: Any, path: Path, student: PreTrainedModel, embed_type: str) -> None:
    c = student.config
    writer = gguf.GGUFWriter(path, "llama")
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
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, c.num_hidden_layers)
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


def _gguf() -> Any:
    if find_spec("gguf") is None:
        raise ValueError("writing GGUF needs its package: pip install gguf accelerate; or export safetensors")
    import gguf

    return gguf
