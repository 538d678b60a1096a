"""Distils a small causal LM with the target's vocabulary, which drafts from tokens alone, and writes it: as a quantised
GGUF file or as transformers does, with a note that names the target's tokenizer.

The tokenizer, megabytes in a GGUF file, is the target's and left out. GGUF's block quantisation is implemented in
torch, too, so that a student trains on the weights that will be stored; the gguf package packs them, and tests compare
both.
"""

import copy
from collections.abc import Mapping
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from specdec.reach.checkpoints.folders import json_text
from specdec.reach.checkpoints.replacing import CHECKPOINT, replacing, write_text
from specdec.reach.heads.custom_generate import write_custom_generate
from specdec.reach.heads.fresh import rope_theta
from specdec.reach.targets.standalone import NOTE
from specdec.tools.train.batches import Batch
from specdec.tools.train.config import HeadShape, TrainConfig
from specdec.tools.train.losses import Goal, OutputHead, imitation_loss
from specdec.tools.train.objectives import Objective, Outcome, refuse

FILE = "draft.gguf"
BLOCK = 32  # values that share a scale
EMBED_TYPES: Mapping[str, int] = MappingProxyType({"Q4_0": 2, "Q5_0": 8, "Q8_0": 7})  # name to ggml's llama_ftype
LAYER_TYPE = "Q8_0"
_HALF_RANGE = {"Q4_0": 8, "Q5_0": 16}  # the value of largest magnitude becomes the lowest level


def write_gguf(folder: Path, student: PreTrainedModel, embed_type: str) -> None:
    """Write `student`, a Llama with tied embeddings, to folder/draft.gguf; `from_pretrained(folder, gguf_file=...)`
    reads it. embed_type: GGUF type of the embedding; see `stored_type`. ValueError as `check_gguf`."""
    if find_spec("gguf") is None:
        raise ValueError("writing GGUF needs its package: pip install gguf accelerate; or export safetensors")
    gguf: Any = import_module("gguf")
    c = student.config
    check_gguf(c, embed_type)
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
    """Write `student` by `save_pretrained`, in `dtype`."""
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


def check_gguf(config: Any, embed_type: str) -> None:
    """Raise ValueError for a Llama's config whose sizes do not fit the blocks, or that `write_gguf` would not keep."""
    check_blocks(config.hidden_size, config.intermediate_size, embed_type)
    has = {**config.to_dict(), "rope_type": config.rope_parameters["rope_type"]}
    for name, kept in (
        ("rope_type", "default"),
        ("hidden_act", "silu"),
        ("attention_bias", False),
        ("mlp_bias", False),
    ):
        if has[name] != kept:
            raise ValueError(
                f"{name}={has[name]!r}: expected {kept!r}, the only value written to GGUF; save safetensors "
                "(--file-format safetensors)"
            )


def _inverse(scale: torch.Tensor) -> torch.Tensor:
    return torch.where(scale == 0, 0.0, 1 / scale)


NUM_LAYERS, MLP_WIDTH = 4, 512  # defaults
SMOOTHING = 1.0  # added to every token's count in the embedding's PCA, so that unseen tokens have some weight


class StandaloneObjective(Objective):
    """Soft cross-entropy against the target's full distribution, at the answer's rows and, weighted, at the prompt's.

    Given true tokens, a standalone draft is equally good at every draft step; so each step's rates are of the same
    rows. embed_type: GGUF type that the embedding will be stored as, or None. If given, the working copy holds weights
    as stored, whose gradients go to the exact ones ("straight through"), and held-out rates are those of the file.
    """

    def __init__(
        self, model: PreTrainedModel, student: PreTrainedModel, config: TrainConfig, embed_type: str | None = None
    ):
        for name in ("feature_weight", "feature_noise", "train_lm_head"):
            refuse(config, "standalone", name, "it has no features, and its output head is its embedding")
        if config.soft_weight != 1:
            reason = "the soft cross-entropy is its only loss; change lk_weight or lr"
            raise ValueError(f"soft_weight={config.soft_weight} for 'standalone': expected 1.0, {reason}")
        student.requires_grad_(True)
        self.embed_type = embed_type
        rounding = None if embed_type is None else partial(stored, embed_type=embed_type)
        super().__init__(model, student, config, (), rounding)

    def forward(self, batch: Batch, random: torch.Generator | None) -> Outcome:
        c, num_rows = self.config, batch.rows.numel()
        rows, weights = self._weighted_rows(batch)
        hidden = self.teacher.read(batch).hidden.flatten(0, 1).index_select(0, rows)
        goal = self.teacher.goal(hidden, None, self.math)
        student: Any = self.optimizer.working
        out = student.get_decoder()(input_ids=batch.tokens[:, : batch.length], use_cache=False)
        states = out.last_hidden_state.flatten(0, 1).index_select(0, rows)
        head = OutputHead(student.get_output_embeddings().weight)
        loss, best = imitation_loss(self.math, states, head, goal, weights, c.lk_weight)
        at_answers = Goal(goal.logits[:num_rows], goal.lse[:num_rows], goal.best[:num_rows])
        return Outcome(loss, at_answers, [loss] * c.num_steps, [best[:num_rows]] * c.num_steps)

    @property
    def shape(self) -> dict[str, Any]:
        stored = {"algo": "standalone", "embed_type": self.embed_type}
        return {**stored, **{n: list(p.shape) for n, p in self.optimizer.module.named_parameters()}}

    def _weighted_rows(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (rows [N] int64, the answer's first, weights [N] fp32 of sum 1)."""
        rows, weight = batch.rows, self.config.prompt_weight
        weights = torch.ones(rows.numel(), device=rows.device)
        if weight:
            rows = torch.cat([rows, batch.prompt_rows])
            weights = torch.cat([weights, weights.new_full((batch.prompt_rows.numel(),), weight)])
        return rows, weights / weights.sum().clamp(min=1e-6)


@torch.no_grad()
def new_student(model: PreTrainedModel, shape: HeadShape, counts: torch.Tensor, seed: int) -> LlamaForCausalLM:
    """Make a small Llama in fp32 on the target's device, with tied embeddings projected from the target's output head.

    counts [V] int64: how often the target emits each token, the weights of `project`. ValueError for sizes that do not
    fit each other.
    """
    text, head = model.config.get_text_config(), model.get_output_embeddings().weight
    if shape.hidden_size % (2 * shape.num_heads):  # ropes rotate pairs
        raise ValueError(f"hidden_size={shape.hidden_size}: expected a multiple of twice num_heads={shape.num_heads}")
    if shape.num_heads % shape.num_kv_heads:
        raise ValueError(f"num_kv_heads={shape.num_kv_heads}: expected a divisor of num_heads={shape.num_heads}")
    config = LlamaConfig(
        vocab_size=head.shape[0],
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size or MLP_WIDTH,
        num_hidden_layers=shape.num_layers or NUM_LAYERS,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_kv_heads,
        max_position_embeddings=text.max_position_embeddings,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": rope_theta(text)},
        tie_word_embeddings=True,
        bos_token_id=text.bos_token_id,
        eos_token_id=text.eos_token_id,
    )
    student = LlamaForCausalLM(config).float()
    random = torch.Generator().manual_seed(seed)
    for module in student.model.layers.modules():
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=module.in_features**-0.5, generator=random)
    for layer in student.model.layers:
        for out in (layer.self_attn.o_proj, layer.mlp.down_proj):
            out.weight.mul_((2 * config.num_hidden_layers) ** -0.5)
    student.get_input_embeddings().weight.copy_(project(head.float(), counts.to(head.device), shape.hidden_size))
    return student.to(head.device)


def plain_llama(model: PreTrainedModel) -> LlamaForCausalLM:
    """Copy `model` in fp32 without quantization_config: transformers does not save a model loaded from GGUF."""
    if not isinstance(model, LlamaForCausalLM) or not model.config.tie_word_embeddings:
        raise ValueError(f"init is a {type(model).__name__}: expected a Llama with tied embeddings, as `fit` writes it")
    config = {name: value for name, value in model.config.to_dict().items() if name != "quantization_config"}
    copied = LlamaForCausalLM(LlamaConfig(**config)).to(model.device, torch.float32)
    copied.load_state_dict(model.state_dict())
    return copied


def project(rows: torch.Tensor, counts: torch.Tensor, size: int) -> torch.Tensor:
    """Project rows [V, h] on `size` principal directions, weighted by counts [V], scaled to unit mean square length.

    A constant added to all rows of an output head leaves the softmax unchanged, so the weighted mean is subtracted.
    """
    if size > rows.shape[1]:
        raise ValueError(f"hidden_size={size}: the target's embeddings are {rows.shape[1]} wide; use that or less")
    weights = (counts.float() + SMOOTHING).unsqueeze(1)
    weights = weights / weights.sum()
    centred = rows - (weights * rows).sum(0)
    directions = torch.linalg.eigh((centred * weights).T @ centred).eigenvectors[:, -size:]
    projected = centred @ directions
    return projected / (projected.square().sum(-1) * weights.squeeze(1)).sum().sqrt()
