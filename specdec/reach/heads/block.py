"""Block draft heads: DFlash (arXiv 2602.06036), its causal form JetSpec (2606.18394) and DSpark (2607.05147).

Every layer attends to keys and values projected from the target's fused features, and to those of the block's own rows.
Parameter names are those of the z-lab layout.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn

from specdec.backends.rope import Rope
from specdec.core.draft.head import Attend, BlockDraftHead
from specdec.reach.heads.base import DraftLayer, HotVocabHead, LayerConfig, OutputHead


@dataclass(frozen=True)
class BlockConfig:
    """Shape of a block head. aux_layers: indices of target layers whose OUTPUT it reads, ascending.

    layer: the shape of each of `num_layers`. target_hidden_size h, vocab_size V: the target's; draft_vocab_size dv:
    tokens that the head scores. block_size, mask_token_id, causal, predicts_next: see `BlockDraftHead`.
    has_mask_embedding: masked rows have an embedding of their own. markov_rank r, markov_gated: see `MarkovHead`; rank
    0: no Markov term. own_embedding [V, h_d], own_head [dv, h_d]: whether the head has its own, or uses the target's.
    """

    layer: LayerConfig
    target_hidden_size: int
    vocab_size: int
    draft_vocab_size: int
    aux_layers: tuple[int, ...]
    block_size: int
    mask_token_id: int
    num_layers: int = 1
    causal: bool = False
    predicts_next: bool = False
    has_mask_embedding: bool = False
    markov_rank: int = 0
    markov_gated: bool = False
    own_embedding: bool = False
    own_head: bool = False


class MarkovHead(nn.Module):
    """Markov term of DSpark (section 3): adds to the logits the bias W2 W1[x] of the previous token x. Gated: W2
    (sigmoid(W [state, W1[x]]) * W1[x])."""

    def __init__(self, c: BlockConfig):
        super().__init__()
        self.markov_w1 = nn.Embedding(c.vocab_size, c.markov_rank)
        self.markov_w2 = OutputHead(c.markov_rank, c.draft_vocab_size, bias=False)
        if c.markov_gated:
            self.gate_proj = nn.Linear(c.layer.hidden_size + c.markov_rank, c.markov_rank)

    def after(self, tokens: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        vectors = self.markov_w1(tokens)
        if hasattr(self, "gate_proj"):
            vectors = torch.sigmoid(self.gate_proj(torch.cat([states, vectors], -1))) * vectors
        return vectors

    def rows(self, places: torch.Tensor) -> torch.Tensor:
        return self.markov_w2.weight[places]

    def bias(self, vectors: torch.Tensor) -> torch.Tensor:
        return self.markov_w2(vectors)


class BlockHead(HotVocabHead, BlockDraftHead):
    """A block draft head; uses the target's embedding and output head unless it has its own."""

    algo = "block"

    def __init__(self, config: BlockConfig):
        super().__init__(config)
        c, size, eps = config, config.layer.hidden_size, config.layer.rms_norm_eps
        self.block_size, self.mask_token_id = c.block_size, c.mask_token_id
        self.causal, self.predicts_next = c.causal, c.predicts_next
        self.hidden_norm = nn.RMSNorm(size, eps=eps)
        self.layers = nn.ModuleList([DraftLayer(c.layer) for _ in range(c.num_layers)])
        self.norm = nn.RMSNorm(size, eps=eps)
        self.mask_embedding = nn.Parameter(torch.zeros(size)) if c.has_mask_embedding else None
        self.markov_head = MarkovHead(c) if c.markov_rank else None
        self.embed_tokens = nn.Embedding(c.vocab_size, size) if c.own_embedding else None
        self.lm_head = OutputHead(size, c.draft_vocab_size, bias=False) if c.own_head else None

    @property
    def markov(self) -> MarkovHead | None:
        return self.markov_head

    def fuse(self, features: torch.Tensor) -> torch.Tensor:
        """Fuse target features [..., num_aux*h] of the aux layers, low to high, into [..., h_d]."""
        return self.hidden_norm(self.fc(features))

    def keys_values(self, fused: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for layer in self.layers:
            assert isinstance(layer, DraftLayer)
            yield layer.self_attn.keys_values(fused)

    def forward(self, embeds: torch.Tensor, rope: Rope, attend: Attend) -> torch.Tensor:
        state = embeds
        for i, layer in enumerate(self.layers):
            state = layer(state, rope, attend, i)
        return state

    def normed(self, state: torch.Tensor, module: int = 0) -> torch.Tensor:
        return self.norm(state)
