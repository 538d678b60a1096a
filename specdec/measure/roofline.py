"""Lower bounds on times, by what must be read or multiplied: of named shapes on an H200, and of live models.

Of experts, a forward reads those that its tokens choose, in expectation under uniform random choice; states of
recurrent layers are read once and written once a round. ranks: H200s that share the target; floors are those of one,
which reads its part of the weights, K/V and states that are cut, and all of what is not, such as routers and the draft.
What ranks tell each other takes no time here.
"""

import re
import statistics
import time
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from specdec.backends.state_pool import StatePool
from specdec.draft.head import DraftHead
from specdec.heads.base import LayerConfig
from specdec.heads.nextn import NextNHead
from specdec.measure.sizes import SHAPES, recurrent_layers
from specdec.targets.mixer_ranks import form_of
from specdec.targets.weight_bytes import ExpertWeights, VerifyCost, expert_weights, num_bytes, read_bytes

COPIED = {"cuda": 2**30}  # bytes, more than any cache holds; elsewhere 2**27
COPY_BYTES_PER_MS = 4.24e9  # of an H200, read and written bytes counted
FLOPS_PER_MS = 0.79e12  # dense bf16 products of an H200, as measured for 2048 rows


@dataclass(frozen=True)
class Weights:
    """Parameters of the products of a forward, on one rank. dense: those that every token meets, the output head among
    them."""

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


def target_weights(shape: str, ranks: int = 1) -> int:
    """Parameters of the products of a forward that one token meets on a rank: layers and output head."""
    return _weights(shape, ranks).active


def round_floor_ms(
    shape: str,
    steps: int,
    ranks: int = 1,
    tokens: int = 1,
    batch: int = 1,
    algo: str = "eagle3",
    vocab: int | None = None,
) -> float:
    """Bytes that must be read, over the copy rate: the target's weights once and the draft's once a pass.

    tokens: of the verify forward; batch: of a draft pass, both together for all requests. algo: eagle3 or nextn.
    vocab: rows of the draft's output head, if `EngineConfig.draft_vocab` makes it narrow.
    """
    weights = _weights(shape, ranks).read(tokens) + _draft_weights(shape, steps, batch, algo, ranks, vocab)
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
    vocab: int | None = None,
) -> float:
    """ms a token of the slower of reading, weights, states and the KV of the mean context, and multiplying `width`
    rows."""
    reading = round_floor_ms(shape, steps, ranks, batch * width, batch, algo, vocab)
    reading += batch * context * kv_bytes(shape, algo, ranks) / COPY_BYTES_PER_MS
    reading += 2 * batch * state_bytes(shape, ranks) / COPY_BYTES_PER_MS
    products = 2 * target_weights(shape, ranks) * batch * width / FLOPS_PER_MS
    return round(max(reading, products) / tau, 4)


def first_floor_ms(shape: str, batch: int, tokens: int, ranks: int = 1) -> float:
    """ms to the first token of the slower of reading the weights once and multiplying, attention too.

    Llama shapes multiply every row by the output head here, as their published floors do; others only the last one.
    """
    layers, num_heads, _, head_dim = attention_sizes(shape)
    weights = _weights(shape, ranks)
    attention = 2 * layers * num_heads * head_dim * tokens**2 / ranks  # q·k and p·v of the causal half
    rows = tokens if SHAPES[shape].is_dense else 1
    products = 2 * ((weights.active - weights.head) * tokens + weights.head * rows)
    reading = 2 * weights.read(batch * tokens) / COPY_BYTES_PER_MS
    return round(max(reading, batch * (products + attention) / FLOPS_PER_MS), 3)


def kv_bytes(shape: str, algo: str = "eagle3", ranks: int = 1) -> int:
    """Bytes of one token in bfloat16: keys and values of a rank's heads of the target's layers, and of one draft layer,
    whose heads each rank has all of."""
    layers, _, num_kv_heads, head_dim = attention_sizes(shape)
    draft = _draft_layer(shape)
    own = draft.num_kv_heads * draft.head_dim if algo == "eagle3" else num_kv_heads * head_dim
    return 2 * 2 * (layers * num_kv_heads * head_dim // ranks + own)


def state_bytes(shape: str, ranks: int = 1) -> int:
    """Bytes of a rank's states of one request: of the target's recurrent layers, convolutions in bfloat16, scans in
    fp32."""
    return row_bytes(shape, 0, ranks)


def row_bytes(shape: str, max_tail: int, ranks: int = 1) -> int:
    """Bytes that a rank's state pool keeps of one request: states, and tails of so many nodes."""
    num_bytes = StatePool.bytes_for(recurrent_layers(shape), 1, max_tail, torch.bfloat16)
    return num_bytes // ranks if _shared_mixers(_without_storage(shape), ranks) else num_bytes


def attention_sizes(shape: str) -> tuple[int, int, int, int]:
    """Layers of attention, heads, KV heads and the width of a head; zeros if the shape has no attention."""
    c = SHAPES[shape].make_config()
    layers = c.num_hidden_layers - sum(kind == "linear_attention" for kind in getattr(c, "layer_types", None) or ())
    if not layers:
        return 0, 0, 0, 0
    heads = c.num_attention_heads
    return layers, heads, c.num_key_value_heads, getattr(c, "head_dim", None) or c.hidden_size // heads


def _draft_weights(shape: str, steps: int, tokens: int, algo: str, ranks: int, vocab: int | None) -> float:
    """Parameters that S passes of `tokens` rows read, S-1 drafts and an extend, and what is read once a round.

    A narrow output head is a draft's own, whole on each rank.
    """
    layer, h = _draft_layer(shape), SHAPES[shape].make_config().hidden_size
    if algo == "nextn":
        found = _nextn_weights(shape, ranks)
        return steps * (found.read(tokens) - (0 if vocab is None else found.head - vocab * h))
    scored = min(SHAPES[shape].draft_vocab, vocab or SHAPES[shape].draft_vocab)
    q, kv = layer.num_heads * layer.head_dim, layer.num_kv_heads * layer.head_dim
    attention = 2 * h * (q + 2 * kv) + q * h  # q, k, v see two widths
    head = attention + 3 * h * layer.intermediate_size + scored * h
    features = 3 * h * h if steps else 0
    return steps * head + features


def _draft_layer(shape: str) -> LayerConfig:
    return SHAPES[shape].layer_of_draft(SHAPES[shape].make_config())


@cache
def _weights(shape: str, ranks: int) -> Weights:
    """Count a rank's part of a model of `shape` that has no storage."""
    model = _without_storage(shape)
    head = model.get_output_embeddings().weight
    apart = {model.get_input_embeddings().weight, head}
    matrices = {p for p in model.parameters() if p.dim() > 1 and p not in apart}
    experts = expert_weights(model, model.config)
    cut = matrices & _cut(model, ranks)
    whole = sum(p.numel() for p in matrices - cut)
    parts = sum(p.numel() for p in cut) + head.numel() - (0 if experts is None else experts.num_weights)
    return Weights(whole + parts // ranks, head.numel() // ranks, experts and _share(experts, ranks))


def _share(experts: ExpertWeights, ranks: int) -> ExpertWeights:
    """Return what a rank has of `experts`: a part of each one."""
    return replace(experts, num_bytes=experts.num_bytes // ranks, num_weights=experts.num_weights // ranks)


@cache
def _nextn_weights(shape: str, ranks: int) -> Weights:
    """Count a NextN layer of a model of `shape`, which each rank has all of, with its rows of the target's output
    head."""
    model = _without_storage(shape)
    with torch.device("meta"):
        layer = NextNHead(model)
    head = model.get_output_embeddings().weight.numel() // ranks
    experts = expert_weights(layer, model.config)
    total = sum(p.numel() for p in layer.parameters() if p.dim() > 1)
    return Weights(total + head - (0 if experts is None else experts.num_weights), head, experts)


@cache
def _without_storage(shape: str) -> Any:
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(SHAPES[shape].make_config(), dtype=torch.bfloat16)


def _cut(model: Any, ranks: int) -> set[nn.Parameter]:
    """Return the parameters that a rank has a part of: those that transformers' plan names, themselves or their
    modules, and those of recurrent layers that ranks share by heads."""
    plan, cut = model.tp_plan, {p for mixer in _shared_mixers(model, ranks) for p in mixer.parameters()}
    for name, parameter in model.named_parameters():
        pattern = re.sub(r"\.\d+\.", ".*.", name)
        if pattern in plan or pattern.rpartition(".")[0] in plan:
            cut.add(parameter)
    return cut


def _shared_mixers(model: nn.Module, ranks: int) -> list[nn.Module]:
    """List the recurrent layers of `model` that so many ranks share by heads."""
    return [module for module in model.modules() if form_of(module, ranks)]


@dataclass(frozen=True)
class Floor:
    """Lower bounds on the time of a plain step and of a round of S draft passes: every weight read once per pass.

    Left out: attention, its cache, and compute. target_bytes: of a step of one token, draft_bytes: of a draft pass, of
    routed experts those that one token uses. verify: what a verify reads where experts are routed; elsewhere it reads
    what a step does.
    """

    target_bytes: int
    draft_bytes: int
    num_steps: int
    gb_s: float  # 1e9 bytes a second
    verify: VerifyCost | None = None

    @property
    def plain_ms(self) -> float:
        """Milliseconds of one token without a draft."""
        return self.target_bytes / self.gb_s / 1e6

    @property
    def round_ms(self) -> float:
        """Milliseconds of one verify and S passes of the draft."""
        return self.plain_ms * self.break_even

    @property
    def break_even(self) -> float:
        """Tau at which a round is as fast as plain decoding."""
        verify = 1.0 if self.verify is None else self.verify.ratio
        return verify + self.num_steps * self.draft_bytes / self.target_bytes


def floor(model: PreTrainedModel, draft: Any, num_steps: int, gb_s: float, verify: VerifyCost | None = None) -> Floor:
    """Compute the Floor from the weights of target and draft; a head without its own output head reads the target's."""
    head = model.get_output_embeddings()
    target_bytes = read_bytes(model, model.get_input_embeddings(), head) - _unused_bytes(model, model.config)
    if isinstance(draft, DraftHead):
        shared = 0 if draft.lm_head is not None else num_bytes(head)
        own = (
            read_bytes(draft, draft.embed_tokens, None)
            + shared
            - _unused_bytes(draft, getattr(draft, "hf_config", None))
        )
    else:
        own = read_bytes(draft, draft.get_input_embeddings(), draft.get_output_embeddings())
        own -= _unused_bytes(draft, draft.config)
    return Floor(target_bytes, own, num_steps, gb_s, verify)


def _unused_bytes(module: nn.Module, config: Any) -> int:
    """Bytes of the routed experts that one token does not use."""
    text = config.get_text_config() if config is not None else None
    experts = expert_weights(module, text)
    return 0 if experts is None else experts.num_bytes - round(experts.read_bytes(experts.per_token))


def measure_bandwidth(device: torch.device) -> float:
    """Measure the GB/s of a copy on `device`, read and write counted: the median of five."""
    source = torch.empty(COPIED.get(device.type, 2**27), dtype=torch.uint8, device=device)
    target, seconds = torch.empty_like(source), []
    for _ in range(6):
        wait(device.type)
        start = time.perf_counter()
        target.copy_(source)
        wait(device.type)
        seconds.append(time.perf_counter() - start)
    return 2 * source.numel() / statistics.median(seconds[1:]) / 1e9


def wait(device: str) -> None:
    """Wait until a device of that kind has done all its work."""
    if device == "cuda":
        torch.cuda.synchronize()
