"""The EAGLE-1/2 draft head (arXiv 2401.15077, 2406.16858): one decoder layer over [embedding, feature] through fc.

Its raw output IS the predicted feature: it goes into the target's own output head and back in as the next feature.
Parameter names are those of the official layout, which has neither an input norm in its first layer nor an out norm.
"""

from dataclasses import dataclass

import torch
from torch import nn

from specdec.backends.rope import Rope
from specdec.core.draft.head import Attend, RecyclingHead
from specdec.reach.heads.base import DraftLayer, LayerConfig, LlamaLikeHead
from specdec.reach.targets.shape import LAST


@dataclass(frozen=True)
class EagleConfig:
    """Shape of an EAGLE-1/2 head: its layer (h_d = h) and the target's vocabulary V.

    fc_bias: fc has a bias (Llama-2 heads). own_embedding: the head has its own embedding [V, h], not the target's.
    """

    layer: LayerConfig
    vocab_size: int
    fc_bias: bool = True
    num_layers: int = 1
    own_embedding: bool = False


class EagleHead(LlamaLikeHead, RecyclingHead):
    """An EAGLE-1/2 head; uses the target's output head, and its embedding unless it has its own."""

    algo = "eagle"
    aux_layers = (LAST,)
    recycles_normed = False

    def __init__(self, config: EagleConfig):
        super().__init__()
        c = config.layer
        self.config = config
        self.hidden_size = self.target_hidden_size = c.hidden_size
        self.vocab_size = config.vocab_size
        self.fc = nn.Linear(2 * c.hidden_size, c.hidden_size, bias=config.fc_bias)
        self.layers = nn.ModuleList([DraftLayer(c, has_input_norm=i > 0) for i in range(config.num_layers)])
        self.embed_tokens = nn.Embedding(config.vocab_size, c.hidden_size) if config.own_embedding else None
        self.lm_head = None

    def out_norm(self, module: int = 0) -> nn.Module:
        return nn.Identity()

    def run_layers(
        self, embeds: torch.Tensor, hidden: torch.Tensor, rope: Rope, attend: Attend, module: int = 0
    ) -> torch.Tensor:
        state = self.fc(torch.cat([embeds, hidden], -1))
        for i, layer in enumerate(self.layers):
            state = layer(state, rope, attend, i)
        return state
