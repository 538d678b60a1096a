"""The interface of a draft head to its callers: the draft workers and the trainer.

A row of a head takes the embedding of token p+1 and a feature of token p, and gives the state that is scored for token
p+2 and fed back in place of a feature. The head knows neither KV pool nor tree: attention is a callable that the worker
or the trainer passes in, so both run the very same arithmetic.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from specdec.backends import LayerSpec
from specdec.backends.rope import Rope, rope_table

# attend(q, k, v, rope, layer): q [..., Hq, d], k and v [..., Hkv, d] to [..., Hq, d]; q and k come un-rotated with rope
# tables, so that a backend can rotate them where it stores them, or rotated with None. layer: index in the head.
Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, Rope | None, int], torch.Tensor]


@dataclass(frozen=True)
class LayerConfig:
    """Shape of a Llama-like draft layer.

    hidden_size h_d: width of the head's states. rope_theta must be the trainer's: official EAGLE-3 heads used 10000
    whatever their config says. rope_scaling: HF's `rope_parameters` of another type than "default", or None.
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
        """Attention spec of one layer, for backends."""
        heads = (self.num_heads, self.num_kv_heads)
        return LayerSpec(*heads, self.head_dim, self.head_dim, self.head_dim**-0.5, window=self.window)


class DraftHead(nn.Module, ABC):
    """A head of the EAGLE family. `embed_tokens` and `lm_head` are None where it shares the target's.

    algo: its row in `specdec.draft.algorithms`. aux_layers: target layers whose OUTPUT it reads, low to high, or
    (LAST,). recycles_normed: whether a step feeds back the state after the out norm. vocab_size V: the target's.
    num_modules: heads of several MTP layers run module min(j, num_modules-1) at draft step j, on states of the previous
    module; each has an attention layer of its own.
    """

    algo: str
    aux_layers: tuple[int, ...]
    num_modules: int = 1
    hidden_size: int
    target_hidden_size: int
    vocab_size: int
    recycles_normed: bool
    embed_tokens: nn.Embedding | None
    lm_head: nn.Linear | None

    @property
    @abstractmethod
    def attention_layers(self) -> Sequence[LayerSpec]:
        """Attention specs of all layers, in call order."""

    @property
    def sinks(self) -> Sequence[torch.Tensor | None]:
        """Attention sinks [Hq] of every layer, or None."""
        return [None] * len(self.attention_layers)

    @property
    def hot_ids(self) -> torch.Tensor:
        """[dv] int64, ascending: target ids of the tokens that the head scores; by default the whole vocabulary."""
        return torch.arange(self.vocab_size, device=self.weight.device)

    @property
    @abstractmethod
    def weight(self) -> torch.Tensor:
        """One of its weights, which gives dtype and device."""

    @abstractmethod
    def rope(self, positions: torch.Tensor) -> Rope:
        """Return rotary tables [..., R] for positions [...] int64, in the head's dtype."""

    def fuse(self, features: torch.Tensor) -> torch.Tensor:
        """Map the target's features [..., num_aux*h] to the input [..., h_d] that takes a state's place."""
        return features

    def forward(
        self, embeds: torch.Tensor, hidden: torch.Tensor, rope: Rope, attend: Attend, module: int = 0
    ) -> torch.Tensor:
        """Return the recycled state [..., h_d].

        embeds [..., h_d]: of token p+1. hidden [..., h_d]: feature or state at p.
        """
        out = self.run_layers(embeds, hidden, rope, attend, module)
        return self.out_norm(module)(out) if self.recycles_normed else out

    @abstractmethod
    def run_layers(
        self, embeds: torch.Tensor, hidden: torch.Tensor, rope: Rope, attend: Attend, module: int
    ) -> torch.Tensor:
        """Run `forward` up to the out norm."""

    @abstractmethod
    def out_norm(self, module: int = 0) -> nn.Module:
        """Return the norm before the output head."""

    def normed(self, state: torch.Tensor, module: int = 0) -> torch.Tensor:
        """Return the output head's input, from a recycled state [..., h_d]."""
        return state if self.recycles_normed else self.out_norm(module)(state)

    def logits(
        self,
        state: torch.Tensor,
        target_head: Callable[[torch.Tensor], torch.Tensor] | None = None,
        module: int = 0,
    ) -> torch.Tensor:
        """Map a recycled state [N, h_d] to logits [N, dv], with its own output head or else `target_head`."""
        return self.project(self.normed(state, module), target_head)

    def project(
        self, normed: torch.Tensor, target_head: Callable[[torch.Tensor], torch.Tensor] | None = None
    ) -> torch.Tensor:
        """Map the output head's input [N, h_d] to logits [N, dv]; see `logits`."""
        score: Callable[[torch.Tensor], torch.Tensor] | None = self.lm_head or target_head
        assert score is not None, f"a head of {self.algo!r} without an output head needs the target's"
        return score(normed)


class LlamaLikeHead(DraftHead):
    """A head whose `fc` reads features and whose `config` has one `layer` shape for all its `num_layers`."""

    config: Any
    fc: nn.Linear

    @property
    def attention_layers(self) -> Sequence[LayerSpec]:
        return [self.config.layer.attention] * self.config.num_layers

    @property
    def weight(self) -> torch.Tensor:
        return self.fc.weight

    def rope(self, positions: torch.Tensor) -> Rope:
        return layer_rope(self.config.layer, positions, self.weight.dtype)


class DraftAttention(nn.Module):
    """Projections of a draft layer's attention over inputs `in_width` wide."""

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
        k = self.k_proj(x).unflatten(-1, (c.num_kv_heads, c.head_dim))
        v = self.v_proj(x).unflatten(-1, (c.num_kv_heads, c.head_dim))
        if c.qk_norm:
            q, k = self.q_norm(q), self.k_norm(k)
        return self.o_proj(attend(q, k, v, rope, layer).flatten(-2))


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
    angles = positions.unsqueeze(-1).float() * inv_freq.float()
    angles = torch.cat([angles, angles], -1)
    return Rope((angles.cos() * scale).to(dtype), (angles.sin() * scale).to(dtype))
