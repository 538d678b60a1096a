"""The target as a teacher: one frozen forward gives the features a head reads and the logits it imitates."""

from collections.abc import Sequence

import torch
from torch import nn
from transformers import PreTrainedModel

from specdec.models.loader import TargetShape
from specdec.train.batches import Batch
from specdec.train.losses import Goal, goal_of


class Teacher:
    """A live target that is only read. aux_layers: indices of the layers whose output is taken, low to high."""

    def __init__(self, model: PreTrainedModel, aux_layers: Sequence[int]):
        last = target_shape(model).num_layers - 1
        if list(aux_layers) != sorted(set(aux_layers)) or not all(0 <= i < last for i in aux_layers):
            raise ValueError(
                f"aux_layers={tuple(aux_layers)}: expected ascending layers of 0..{last - 1} (the last layer's output "
                "is normed by transformers)"
            )
        self.model = model
        self.aux_layers = list(aux_layers)

    @property
    def embed_tokens(self) -> nn.Module:
        """The input embedding, shared with the head."""
        return self.model.get_input_embeddings()

    @property
    def weight(self) -> torch.Tensor:
        """The embedding weight, which says device and dtype."""
        weight = self.embed_tokens.weight
        assert isinstance(weight, torch.Tensor)
        return weight

    @torch.no_grad()
    def read(self, batch: Batch, hot_ids: torch.Tensor, chunk_rows: int) -> tuple[torch.Tensor, Goal]:
        """(aux [B, T, 3*h], the Goal at batch.rows [N])."""
        out = self.model(
            input_ids=batch.tokens[:, : batch.length],
            use_cache=False,
            output_hidden_states=self.aux_layers,
            logits_to_keep=batch.length - batch.first_row,
        )
        aux = torch.cat([out.hidden_states[i] for i in self.aux_layers], -1)
        width = out.logits.shape[1]
        rows = batch.rows // batch.length * width + batch.rows % batch.length - batch.first_row
        return aux, goal_of(out.logits.flatten(0, 1), rows, hot_ids, chunk_rows)


def target_shape(model: PreTrainedModel) -> TargetShape:
    """What a head must match, read off a model that is not attached."""
    config = model.config.get_text_config()
    return TargetShape(
        hidden_size=config.hidden_size,
        vocab_size=model.get_output_embeddings().weight.shape[0],
        num_layers=config.num_hidden_layers,
        embed_tokens=model.get_input_embeddings(),
        lm_head=model.get_output_embeddings(),
        model=model,
    )
