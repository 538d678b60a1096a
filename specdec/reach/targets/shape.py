"""Facts of the target that a draft head must match."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from specdec.backends.comm import Communicator

VARYING = ("dynamic", "longrope")  # types of ropes whose frequencies depend on the longest sequence of a batch
LAST = -1  # as an aux layer: the target's last hidden state, after its final norm


@dataclass(frozen=True)
class TargetShape:
    """Hidden size, vocabulary, layers, modules a head shares, and the live HF model, whose layer class MTP uses.

    comm: of a sharded target, whose ranks hold parts of these modules: their weights are parts, their forwards whole.
    """

    hidden_size: int
    vocab_size: int
    num_layers: int
    embed_tokens: nn.Module
    lm_head: nn.Module
    model: Any = None
    comm: Communicator | None = None

    def lm_head_rows(self) -> torch.Tensor:
        """Return the rows of the output head [V, h]; see `rows_of`."""
        return self.rows_of(self.lm_head)

    def rows_of(self, module: nn.Module) -> torch.Tensor:
        """Return the rows [V, h] of the output head or the embedding; if each rank holds some of them, all ranks must
        call this."""
        weight = module.get_parameter("weight").detach()
        if self.comm is None or weight.shape[0] == self.vocab_size:
            return weight
        return self.comm.all_gather(weight.t()).t()

    @classmethod
    def of(cls, model: PreTrainedModel) -> "TargetShape":
        """Return the shape of a model, from its config and modules."""
        config = model.config.get_text_config()
        return cls(
            hidden_size=config.hidden_size,
            vocab_size=vocab_size_of(model),
            num_layers=config.num_hidden_layers,
            embed_tokens=model.get_input_embeddings(),
            lm_head=model.get_output_embeddings(),
            model=model,
        )


def rope_limit(config: Any) -> tuple[int, str] | None:
    """Return the number of positions for which the frequencies of a text config's ropes are constant, and the type of
    the rope that ends first; None if all are constant."""
    parameters = getattr(config, "rope_parameters", None) or {}
    limits = []
    for own in [parameters, *parameters.values()]:
        kind = own.get("rope_type") if isinstance(own, dict) else None
        if kind in VARYING:
            trained = own.get("original_max_position_embeddings") if kind == "longrope" else None
            limits.append((int(trained or config.max_position_embeddings), str(kind)))
    return min(limits, default=None)


def position_limit(config: Any) -> tuple[int | None, str]:
    """Return the number of positions of a text config's model, None if unknown, and the reason if it is below the
    config's."""
    own, rope = getattr(config, "max_position_embeddings", None), rope_limit(config)
    picked = getattr(config, "index_topk", None) if hasattr(config, "index_n_heads") else None  # see `Attention`
    limits = []
    if rope is not None:
        limits.append((rope[0], f"beyond, rope type {rope[1]!r} rotates all tokens by other frequencies"))
    if picked:
        limits.append((picked, f"beyond, layers attend to index_topk={picked} tokens that an indexer picks"))
    if own is not None:
        limits.append((own, ""))
    return min(limits, key=lambda limit: limit[0], default=(None, ""))


def eos_ids_of(model: Any) -> list[int]:
    """Return the ids that end a text by the model's own generation_config; [] if it has none."""
    ids = getattr(model.generation_config, "eos_token_id", None)
    return [] if ids is None else [ids] if isinstance(ids, int) else list(ids)


def decoder_of(model: PreTrainedModel) -> Any:
    """Return the module whose output is a model's last hidden states; Llama 4's `get_decoder` returns the causal LM."""
    decoder = model.get_decoder()
    return decoder if decoder is not model else decoder.model


def vocab_size_of(model: PreTrainedModel) -> int:
    """Return how many tokens a model scores, also if its head's plain forward covers only a rank's part of the rows."""
    head = model.get_output_embeddings()
    rows = int(head.weight.shape[0])
    return int(getattr(head, "out_features", rows)) if "forward" in vars(head) else rows
