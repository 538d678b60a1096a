"""What a draft head must match of its target."""

from dataclasses import dataclass
from typing import Any

from torch import nn

LAST = -1  # as an aux layer: the target's last hidden state, after its final norm


@dataclass(frozen=True)
class TargetShape:
    """Hidden size, vocabulary, layers, the modules a head shares, and the live HF model, which MTP layers are like."""

    hidden_size: int
    vocab_size: int
    num_layers: int
    embed_tokens: nn.Module
    lm_head: nn.Module
    model: Any = None
