"""Lower bounds on times of the named shapes on an H200: the slower of reading what must be read and of multiplying.

Of experts, a forward reads those that its tokens choose, in expectation under uniform random choice; states of
recurrent layers are read once and written once a round. ranks: H200s that share the target; each has all of the draft.
What they tell each other takes no time here.
"""

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM

from specdec.backends.state_pool import StatePool
from specdec.heads.base import LayerConfig
from specdec.heads.nextn import NextNHead
from specdec.measure.sizes import SHAPES, recurrent_layers
from specdec.targets.weight_bytes import ExpertWeights, expert_weights

COPY_BYTES_PER_MS = 4.24e9  # of an H200, read and written bytes counted
FLOPS_PER_MS = 0.79e12  # dense bf16 products of an H200, as measured for 2048 rows


@dataclass(frozen=True)
class Weights:
    """Parameters of the products of a forward. dense: those that every token meets, the output head among them."""

    dense: int
    head: int
    experts: ExpertWeights | None

    @property
    def active(self) -> int:
        """What one token meets."""
        found = self.experts
        return self.dense + (0 if found is None else found.num_weights * found.per_token // found.num_experts)

    def read(self, num_tokens: float) -> float:
        """What a forward of so many tokens reads."""
        if self.experts is None:
            return self.dense
        return self.dense + self.experts.num_weights * self.experts.distinct(num_tokens) / self.experts.num_experts


def target_weights(shape: str) -> int:
    """Parameters of the products of a forward that one token meets: layers and output head."""
    return _weights(shape).active


def round_floor_ms(
    shape: str, steps: int, ranks: int = 1, tokens: int = 1, batch: int = 1, algo: str = "eagle3"
) -> float:
    """Bytes that must be read, over the copy rate: the target's weights once and the draft's once a pass.

    tokens: of the verify forward; batch: of a draft pass, both together for all requests. algo: eagle3 or nextn.
    """
    weights = _weights(shape).read(tokens) / ranks + _draft_weights(shape, steps, batch, algo)
    return round(2 * weights / COPY_BYTES_PER_MS, 3)


def token_floor_ms(
    shape: str,
    steps: int,
    width: int,
    batch: int,
    context: float,
    tau: float,
    ranks: int = 1,
    algo: str = "eagle3",
) -> float:
    """ms a token of the slower of reading, weights, states and the KV of the mean context, and multiplying `width`
    rows."""
    reading = round_floor_ms(shape, steps, ranks, batch * width, batch, algo)
    reading += batch * context * kv_bytes(shape, algo) / ranks / COPY_BYTES_PER_MS
    reading += 2 * batch * state_bytes(shape) / COPY_BYTES_PER_MS
    products = 2 * target_weights(shape) / ranks * batch * width / FLOPS_PER_MS
    return round(max(reading, products) / tau, 4)


def first_floor_ms(shape: str, batch: int, tokens: int, ranks: int = 1) -> float:
    """ms to the first token of the slower of reading the weights once and multiplying, attention too.

    Llama shapes multiply every row by the output head here, as their published floors do; others only the last one.
    """
    layers, num_heads, _, head_dim = attention_sizes(shape)
    weights = _weights(shape)
    attention = 2 * layers * num_heads * head_dim * tokens**2  # q·k and p·v of the causal half
    rows = tokens if SHAPES[shape].is_dense else 1
    products = 2 * ((weights.active - weights.head) * tokens + weights.head * rows)
    reading = 2 * weights.read(batch * tokens) / COPY_BYTES_PER_MS
    return round(max(reading, batch * (products + attention) / FLOPS_PER_MS) / ranks, 3)


def kv_bytes(shape: str, algo: str = "eagle3") -> int:
    """Bytes of one token in bfloat16: keys and values of the target's layers and of one draft layer."""
    layers, _, num_kv_heads, head_dim = attention_sizes(shape)
    draft = _draft_layer(shape)
    own = draft.num_kv_heads * draft.head_dim if algo == "eagle3" else num_kv_heads * head_dim
    return 2 * 2 * (layers * num_kv_heads * head_dim + own)


def state_bytes(shape: str) -> int:
    """Bytes of the states of one request: of the target's recurrent layers, convolutions in bfloat16, scans in fp32."""
    return StatePool.bytes_for(recurrent_layers(shape), 1, 0, torch.bfloat16)


def row_bytes(shape: str, max_tail: int) -> int:
    """Bytes that a state pool keeps of one request: states, and tails of so many nodes."""
    return StatePool.bytes_for(recurrent_layers(shape), 1, max_tail, torch.bfloat16)


def attention_sizes(shape: str) -> tuple[int, int, int, int]:
    """Layers of attention, heads, KV heads and the width of a head; zeros if the shape has no attention."""
    c = SHAPES[shape].make_config()
    layers = c.num_hidden_layers - sum(kind == "linear_attention" for kind in getattr(c, "layer_types", None) or ())
    if not layers:
        return 0, 0, 0, 0
    heads = c.num_attention_heads
    return layers, heads, c.num_key_value_heads, getattr(c, "head_dim", None) or c.hidden_size // heads


def _draft_weights(shape: str, steps: int, tokens: int, algo: str) -> float:
    """Parameters that S passes of `tokens` rows read, S-1 drafts and an extend, and what is read once a round."""
    if algo == "nextn":
        return steps * _nextn_weights(shape).read(tokens)
    layer, h = _draft_layer(shape), SHAPES[shape].make_config().hidden_size
    q, kv = layer.num_heads * layer.head_dim, layer.num_kv_heads * layer.head_dim
    attention = 2 * h * (q + 2 * kv) + q * h  # q, k, v see two widths
    head = attention + 3 * h * layer.intermediate_size + SHAPES[shape].draft_vocab * h
    features = 3 * h * h if steps else 0
    return steps * head + features


def _draft_layer(shape: str) -> LayerConfig:
    return SHAPES[shape].layer_of_draft(SHAPES[shape].make_config())


@cache
def _weights(shape: str) -> Weights:
    """Count a model of `shape` that has no storage."""
    model = _without_storage(shape)
    head = model.get_output_embeddings().weight
    return _counted(model, model.config, head.numel(), {model.get_input_embeddings().weight, head})


@cache
def _nextn_weights(shape: str) -> Weights:
    """Count a NextN layer of a model of `shape`, with the target's output head."""
    model = _without_storage(shape)
    with torch.device("meta"):
        layer = NextNHead(model)
    return _counted(layer, model.config, model.get_output_embeddings().weight.numel(), set())


def _without_storage(shape: str) -> Any:
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(SHAPES[shape].make_config(), dtype=torch.bfloat16)


def _counted(module: nn.Module, config: Any, head: int, apart: set[nn.Parameter]) -> Weights:
    """Count the matrices of `module` but `apart`, and an output head of so many parameters."""
    total = sum(p.numel() for p in module.parameters() if p.dim() > 1 and p not in apart)
    experts = expert_weights(module, config)
    return Weights(total + head - (0 if experts is None else experts.num_weights), head, experts)
