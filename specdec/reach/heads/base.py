"""Base of draft heads: the shape and the modules of a Llama-like layer."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from specdec.backends.base import LayerSpec
from specdec.backends.linear import linear
from specdec.backends.rope import Rope, rope_table, rope_tables
from specdec.core.draft.head import Attend, DraftHead


@dataclass(frozen=True)
class LayerConfig:
    """Shape of a Llama-like draft layer.

    hidden_size h_d: width of the head's states. rope_theta: as in training; official EAGLE-3 heads used 10000 whatever
    their config says. rope_scaling: HF's `rope_parameters` of another type than "default", or None. qkv_bias: q, k and
    v have biases; qk_norm: RMS norms over heads of q and k. window: keys that a query sees, itself included; None: all.
    """

    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    rope_scaling: dict[str, Any] | None = None
    qkv_bias: bool = False
    qk_norm: bool = False
    window: int | None = None

    @property
    def attention(self) -> LayerSpec:
        """The LayerSpec of the layer's attention."""
        heads = (self.num_heads, self.num_kv_heads)
        return LayerSpec(*heads, self.head_dim, self.head_dim, self.head_dim**-0.5, window=self.window)


class LlamaLikeHead(DraftHead):
    """Base of heads with Llama-like layers: `config.num_layers` of the shape `config.layer`; `fc` reads features."""

    config: Any
    fc: nn.Linear

    @property
    def attention_layers(self) -> Sequence[LayerSpec]:
        return [self.config.layer.attention] * self.config.num_layers

    def rope(self, positions: torch.Tensor) -> Rope:
        return layer_rope(self.config.layer, positions, self.weight.dtype)


class HotVocabHead(LlamaLikeHead):
    """Base of heads that score a subset of the target's vocabulary, the hot vocabulary of dv tokens (EAGLE-3).

    d2t [dv] int64: target id = draft id + d2t[draft id]; t2d [V] bool: target ids that the head scores.
    """

    d2t: torch.Tensor
    t2d: torch.Tensor

    def __init__(self, config: Any):
        super().__init__()
        c, size = config, config.layer.hidden_size
        self.config = c
        self.aux_layers = c.aux_layers
        self.hidden_size, self.target_hidden_size, self.vocab_size = size, c.target_hidden_size, c.vocab_size
        self.fc = BatchInvariantLinear(len(c.aux_layers) * c.target_hidden_size, size, bias=False)
        self.register_buffer("d2t", torch.zeros(c.draft_vocab_size, dtype=torch.int64))
        self.register_buffer("t2d", torch.zeros(c.vocab_size, dtype=torch.bool))

    def set_hot_vocab(self, target_ids: torch.Tensor) -> None:
        """Set the hot vocabulary to `target_ids` [dv] int64, distinct; stored in ascending order."""
        ids = target_ids.sort().values.to(self.d2t.device)
        self.d2t.copy_(ids - torch.arange(ids.numel(), device=ids.device))
        self.t2d.zero_()
        self.t2d[ids] = True

    @property
    def hot_ids(self) -> torch.Tensor:
        return self.d2t + torch.arange(self.d2t.numel(), device=self.d2t.device)


class BatchInvariantLinear(nn.Linear):
    """A linear layer outside traced code, computed by `specdec::linear` unless gradients are needed."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map [..., K] to [..., N]."""
        return super().forward(x) if torch.is_grad_enabled() else linear(x, self.weight, self.bias)


class OutputHead(BatchInvariantLinear):
    """An output head, of states [..., h_d] to logits [..., dv]."""


class DraftAttention(nn.Module):
    """Attention of a draft layer, with projections from inputs of `in_width` features."""

    def __init__(self, c: LayerConfig, in_width: int):
        super().__init__()
        self.config = c
        self.q_proj = nn.Linear(in_width, c.num_heads * c.head_dim, bias=c.qkv_bias)
        self.k_proj = nn.Linear(in_width, c.num_kv_heads * c.head_dim, bias=c.qkv_bias)
        self.v_proj = nn.Linear(in_width, c.num_kv_heads * c.head_dim, bias=c.qkv_bias)
        self.o_proj = nn.Linear(c.num_heads * c.head_dim, c.hidden_size, bias=False)
        if c.qk_norm:
            self.q_norm = nn.RMSNorm(c.head_dim, eps=c.rms_norm_eps)
            self.k_norm = nn.RMSNorm(c.head_dim, eps=c.rms_norm_eps)

    def forward(self, x: torch.Tensor, rope: Rope, attend: Attend, layer: int) -> torch.Tensor:
        """x [..., in_width], rope tables [..., head_dim] -> [..., h_d]."""
        c = self.config
        q = self.q_proj(x).unflatten(-1, (c.num_heads, c.head_dim))
        k, v = self.keys_values(x)
        if c.qk_norm:
            q = self.q_norm(q)
        return self.o_proj(attend(q, k, v, rope, layer).flatten(-2))

    def keys_values(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the un-rotated k and v [..., Hkv, head_dim] of x [..., in_width]."""
        c = self.config
        k = self.k_proj(x).unflatten(-1, (c.num_kv_heads, c.head_dim))
        v = self.v_proj(x).unflatten(-1, (c.num_kv_heads, c.head_dim))
        return self.k_norm(k) if c.qk_norm else k, v


class DraftMLP(nn.Module):
    """SwiGLU MLP."""

    def __init__(self, c: LayerConfig):
        super().__init__()
        self.gate_proj = nn.Linear(c.hidden_size, c.intermediate_size, bias=False)
        self.up_proj = nn.Linear(c.hidden_size, c.intermediate_size, bias=False)
        self.down_proj = nn.Linear(c.intermediate_size, c.hidden_size, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., h_d] -> [..., h_d]."""
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class DraftLayer(nn.Module):
    """A Llama decoder layer; without `has_input_norm`, attention reads its input un-normed (EAGLE-1's first layer)."""

    def __init__(self, c: LayerConfig, has_input_norm: bool = True):
        super().__init__()
        self.self_attn = DraftAttention(c, c.hidden_size)
        self.mlp = DraftMLP(c)
        if has_input_norm:
            self.input_layernorm = nn.RMSNorm(c.hidden_size, eps=c.rms_norm_eps)
        self.post_attention_layernorm = nn.RMSNorm(c.hidden_size, eps=c.rms_norm_eps)

    def forward(self, hidden: torch.Tensor, rope: Rope, attend: Attend, layer: int) -> torch.Tensor:
        """hidden [..., h_d] -> [..., h_d]; layer: its number, for `attend`."""
        x = self.input_layernorm(hidden) if hasattr(self, "input_layernorm") else hidden
        hidden = hidden + self.self_attn(x, rope, attend, layer)
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


def layer_rope(c: LayerConfig, positions: torch.Tensor, dtype: torch.dtype) -> Rope:
    """Return rotary tables [..., head_dim] of `c` for positions [...] int64."""
    if c.rope_scaling is None:
        return rope_table(positions, c.head_dim, c.rope_theta, dtype)
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    parameters = {"rope_theta": c.rope_theta, **c.rope_scaling}
    shape = LlamaConfig(hidden_size=c.hidden_size, num_attention_heads=c.num_heads, head_dim=c.head_dim)
    shape.rope_parameters = parameters
    inv_freq, scale = ROPE_INIT_FUNCTIONS[parameters["rope_type"]](shape, positions.device)
    return Rope(*rope_tables.twin(positions, inv_freq, scale, True, dtype))
