"""Distils a small causal LM with the target's vocabulary, which drafts from tokens alone."""

from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from specdec.reach.heads.fresh import rope_theta
from specdec.tools.train.batches import Batch
from specdec.tools.train.config import HeadShape, TrainConfig
from specdec.tools.train.export import stored
from specdec.tools.train.losses import Goal, OutputHead, imitation_loss
from specdec.tools.train.objectives import Objective, Outcome, refuse

MLP_WIDTH = 512  # if none is asked for
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
    """Make a Llama in fp32 on the target's device, with tied embeddings projected from the target's output head.

    counts [V] int64: how often the target emits each token; frequent tokens shape the projection most.
    """
    text, head = model.config.get_text_config(), model.get_output_embeddings().weight
    if shape.hidden_size % shape.num_heads:
        raise ValueError(f"hidden_size={shape.hidden_size}: expected a multiple of num_heads={shape.num_heads}")
    config = LlamaConfig(
        vocab_size=head.shape[0],
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size or MLP_WIDTH,
        num_hidden_layers=shape.num_layers,
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
            out.weight.mul_((2 * shape.num_layers) ** -0.5)
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
        raise ValueError(f"hidden_size={size}: the target's embeddings are {rows.shape[1]} wide; take that or less")
    weights = (counts.float() + SMOOTHING).unsqueeze(1)
    weights = weights / weights.sum()
    centred = rows - (weights * rows).sum(0)
    directions = torch.linalg.eigh((centred * weights).T @ centred).eigenvectors[:, -size:]
    projected = centred @ directions
    return projected / (projected.square().sum(-1) * weights.squeeze(1)).sum().sqrt()
