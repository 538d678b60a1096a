"""The EAGLE-3 draft head (arXiv 2503.01840) with parameter names of the official layout, and its later variants.

The flags are those of EAGLE-3.1 (arXiv 2605.09992) and of the speculators format; all off is the official arithmetic.
"""

from dataclasses import dataclass

import torch
from torch import nn

from specdec.backends.rope import Rope
from specdec.core.draft.head import Attend, RecyclingHead
from specdec.reach.heads.base import DraftAttention, DraftLayer, DraftMLP, HotVocabHead, LayerConfig, OutputHead


@dataclass(frozen=True)
class Eagle3Config:
    """Shape of an EAGLE-3 head. aux_layers: indices of target layers whose OUTPUT it reads, ascending.

    layer: shape of its layers; the attention of the first reads 2*h_d features, further ones (num_layers) are plain
    decoder layers. target_hidden_size h: width of the target's hidden states. vocab_size V: the target's;
    draft_vocab_size dv: the hot vocabulary that the head scores. norm_before_residual: the residual stream starts at
    the normed feature. norm_before_fc: one norm over the concatenated features, 3h wide; fc_norm: one for each.
    recycles_normed: a step feeds back the state after the out norm (speculators' norm_output). own_embedding: the head
    has its own input embedding [V, h_d], not the target's.
    """

    layer: LayerConfig
    target_hidden_size: int
    vocab_size: int
    draft_vocab_size: int
    aux_layers: tuple[int, ...]
    num_layers: int = 1
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    recycles_normed: bool = False
    own_embedding: bool = False


def default_aux_layers(num_layers: int) -> tuple[int, int, int]:
    """Return EAGLE-3's low, middle and high target layers, 1, n//2-1 and n-4 of n, whose outputs the head reads.
    ValueError for a target with too few layers."""
    low, mid, high = 1, num_layers // 2 - 1, num_layers - 4
    if not 0 <= low < mid < high:
        raise ValueError(f"a target of {num_layers} layers has no layers {low, mid, high}; name three in aux_layers")
    return low, mid, high


class Eagle3Layer(nn.Module):
    """First decoder layer of an EAGLE-3 head; its attention reads [normed embedding, normed feature]."""

    def __init__(self, c: LayerConfig, norm_before_residual: bool):
        super().__init__()
        self.norm_before_residual = norm_before_residual
        self.self_attn = DraftAttention(c, 2 * c.hidden_size)
        self.mlp = DraftMLP(c)
        self.input_layernorm = nn.RMSNorm(c.hidden_size, eps=c.rms_norm_eps)
        self.hidden_norm = nn.RMSNorm(c.hidden_size, eps=c.rms_norm_eps)
        self.post_attention_layernorm = nn.RMSNorm(c.hidden_size, eps=c.rms_norm_eps)

    def forward(self, embeds: torch.Tensor, hidden: torch.Tensor, rope: Rope, attend: Attend) -> torch.Tensor:
        normed = self.hidden_norm(hidden)
        residual = normed if self.norm_before_residual else hidden
        x = torch.cat([self.input_layernorm(embeds), normed], -1)
        hidden = residual + self.self_attn(x, rope, attend, 0)
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


class Eagle3Head(HotVocabHead, RecyclingHead):
    """An EAGLE-3 head; uses the target's embedding, neither saved nor trained, unless it has its own."""

    algo = "eagle3"

    def __init__(self, config: Eagle3Config):
        super().__init__(config)
        c, size, eps = config, config.layer.hidden_size, config.layer.rms_norm_eps
        self.recycles_normed = c.recycles_normed
        self.midlayer = Eagle3Layer(c.layer, c.norm_before_residual)
        if c.num_layers > 1:
            self.additional_layers = nn.ModuleList([DraftLayer(c.layer) for _ in range(c.num_layers - 1)])
        if c.norm_before_fc:
            self.input_norm = nn.RMSNorm(len(c.aux_layers) * c.target_hidden_size, eps=eps)
        if c.fc_norm:
            self.fc_norm = nn.ModuleList([nn.RMSNorm(c.target_hidden_size, eps=eps) for _ in c.aux_layers])
        self.norm = nn.RMSNorm(size, eps=eps)
        self.lm_head = OutputHead(size, c.draft_vocab_size, bias=False)
        self.embed_tokens = nn.Embedding(c.vocab_size, size) if c.own_embedding else None

    def fuse(self, features: torch.Tensor) -> torch.Tensor:
        """Fuse target features [..., num_aux*h] of the aux layers, low to high, into the feature g [..., h_d]."""
        if self.config.norm_before_fc:
            features = self.input_norm(features)
        if self.config.fc_norm:
            parts = features.chunk(len(self.fc_norm), -1)
            features = torch.cat([norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)], -1)
        return self.fc(features)

    def out_norm(self, module: int = 0) -> nn.Module:
        return self.norm

    def run_layers(
        self, embeds: torch.Tensor, hidden: torch.Tensor, rope: Rope, attend: Attend, module: int = 0
    ) -> torch.Tensor:
        state = self.midlayer(embeds, hidden, rope, attend)
        for i in range(1, self.config.num_layers):
            state = self.additional_layers[i - 1](state, rope, attend, i)
        return state
