"""The EAGLE-3 draft head (arXiv 2503.01840), one decoder layer with parameter names of the official layout.

Row i sees the embedding of token i+1 beside the fused target feature of token i. The head knows neither pool nor
tree: attention is a callable that the draft worker or the trainer hands in, so both run the very same arithmetic.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from specdec.backends import LayerSpec
from specdec.backends.rope import Rope, rope_table

# attend(q, k, v, rope): q and k come un-rotated, so that a backend can rotate them where it stores them.
Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, Rope], torch.Tensor]


@dataclass(frozen=True)
class Eagle3Config:
    """Shape of a head. `aux_layers` are indices of target layers whose OUTPUT is taken, low to high.

    hidden_size h_d: width of the head; target_hidden_size h: width of the target's hidden states.
    vocab_size V: the target's; draft_vocab_size dv: the hot vocabulary the head scores.
    rope_theta must be the trainer's: official heads used 10000 whatever their config says.
    """

    hidden_size: int
    target_hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    draft_vocab_size: int
    aux_layers: tuple[int, int, int]
    rms_norm_eps: float = 1e-5
    rope_theta: float = 10000.0

    @property
    def layer(self) -> LayerSpec:
        """The one attention layer, as backends see it."""
        return LayerSpec(self.num_heads, self.num_kv_heads, self.head_dim, self.head_dim, self.head_dim**-0.5)


def default_aux_layers(num_layers: int) -> tuple[int, int, int]:
    """The paper's low, middle and high layer for a target of `num_layers`: outputs of layers 1, n//2-1 and n-4."""
    low, mid, high = 1, num_layers // 2 - 1, num_layers - 4
    if not 0 <= low < mid < high:
        raise ValueError(f"a target of {num_layers} layers has no aux layers {low, mid, high}; name three yourself")
    return low, mid, high


class Eagle3Attention(nn.Module):
    """Projections of the head's attention; its input is [embedding, feature], 2*h_d wide."""

    def __init__(self, c: Eagle3Config):
        super().__init__()
        self.config = c
        self.q_proj = nn.Linear(2 * c.hidden_size, c.num_heads * c.head_dim, bias=False)
        self.k_proj = nn.Linear(2 * c.hidden_size, c.num_kv_heads * c.head_dim, bias=False)
        self.v_proj = nn.Linear(2 * c.hidden_size, c.num_kv_heads * c.head_dim, bias=False)
        self.o_proj = nn.Linear(c.num_heads * c.head_dim, c.hidden_size, bias=False)

    def forward(self, x: torch.Tensor, rope: Rope, attend: Attend) -> torch.Tensor:
        """x [..., 2*h_d], rope tables [..., head_dim] -> [..., h_d]."""
        c = self.config
        q = self.q_proj(x).unflatten(-1, (c.num_heads, c.head_dim))
        k = self.k_proj(x).unflatten(-1, (c.num_kv_heads, c.head_dim))
        v = self.v_proj(x).unflatten(-1, (c.num_kv_heads, c.head_dim))
        return self.o_proj(attend(q, k, v, rope).flatten(-2))


class Eagle3MLP(nn.Module):
    """SwiGLU."""

    def __init__(self, c: Eagle3Config):
        super().__init__()
        self.gate_proj = nn.Linear(c.hidden_size, c.intermediate_size, bias=False)
        self.up_proj = nn.Linear(c.hidden_size, c.intermediate_size, bias=False)
        self.down_proj = nn.Linear(c.intermediate_size, c.hidden_size, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Eagle3Layer(nn.Module):
    """The one decoder layer; the residual stream starts at the un-normed feature."""

    def __init__(self, c: Eagle3Config):
        super().__init__()
        self.self_attn = Eagle3Attention(c)
        self.mlp = Eagle3MLP(c)
        self.input_layernorm = nn.RMSNorm(c.hidden_size, eps=c.rms_norm_eps)
        self.hidden_norm = nn.RMSNorm(c.hidden_size, eps=c.rms_norm_eps)
        self.post_attention_layernorm = nn.RMSNorm(c.hidden_size, eps=c.rms_norm_eps)

    def forward(self, embeds: torch.Tensor, hidden: torch.Tensor, rope: Rope, attend: Attend) -> torch.Tensor:
        x = torch.cat([self.input_layernorm(embeds), self.hidden_norm(hidden)], -1)
        hidden = hidden + self.self_attn(x, rope, attend)
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


class Eagle3Head(nn.Module):
    """The head. `embed_tokens` belongs to the target and is handed in by the loader, never saved or trained.

    d2t [dv] int64: target id = draft id + d2t[draft id]; t2d [V] bool: target ids the head can score.
    """

    d2t: torch.Tensor
    t2d: torch.Tensor

    def __init__(self, config: Eagle3Config):
        super().__init__()
        c = config
        self.config = c
        self.fc = nn.Linear(len(c.aux_layers) * c.target_hidden_size, c.hidden_size, bias=False)
        self.midlayer = Eagle3Layer(c)
        self.norm = nn.RMSNorm(c.hidden_size, eps=c.rms_norm_eps)
        self.lm_head = nn.Linear(c.hidden_size, c.draft_vocab_size, bias=False)
        self.register_buffer("d2t", torch.zeros(c.draft_vocab_size, dtype=torch.int64))
        self.register_buffer("t2d", torch.zeros(c.vocab_size, dtype=torch.bool))

    def set_hot_vocab(self, target_ids: torch.Tensor) -> None:
        """Score exactly `target_ids` [dv] int64, distinct; they are stored ascending."""
        ids = target_ids.sort().values.to(self.d2t.device)
        self.d2t.copy_(ids - torch.arange(ids.numel(), device=ids.device))
        self.t2d.zero_()
        self.t2d[ids] = True

    @property
    def hot_ids(self) -> torch.Tensor:
        """[dv] int64: target id of every draft id."""
        return self.d2t + torch.arange(self.d2t.numel(), device=self.d2t.device)

    def fuse(self, aux: torch.Tensor) -> torch.Tensor:
        """Target features [..., 3*h] of the aux layers, low to high, to the feature g [..., h_d]."""
        return self.fc(aux)

    def rope(self, positions: torch.Tensor) -> Rope:
        """Rotary tables [..., head_dim] for positions [...] int64, in the head's dtype."""
        return rope_table(positions, self.config.head_dim, self.config.rope_theta, self.fc.weight.dtype)

    def forward(self, embeds: torch.Tensor, hidden: torch.Tensor, rope: Rope, attend: Attend) -> torch.Tensor:
        """embeds, hidden [..., h_d] and rope tables [..., head_dim]: the recycled (pre-norm) state [..., h_d]."""
        return self.midlayer(embeds, hidden, rope, attend)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Recycled state [..., h_d] to draft-vocabulary logits [..., dv]."""
        return self.lm_head(self.norm(hidden))
