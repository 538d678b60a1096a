"""Lower bounds on times, from the bytes and products needed: of named shapes on an H200, and of live models.

Of experts, a forward reads those that its tokens choose, in expectation under uniform random choice; states of
recurrent layers are read once and written once per round.
"""

import re
import statistics
import time
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

from specdec.backends.recurrent.state_pool import StatePool
from specdec.core.draft.head import DraftHead
from specdec.reach.heads.block import BlockHead
from specdec.reach.heads.eagle3 import Eagle3Head
from specdec.reach.heads.nextn import NextNHead
from specdec.reach.parallel.mixer_ranks import form_of
from specdec.reach.targets.assistant import unscored_bytes
from specdec.reach.targets.weight_bytes import ExpertBytes, VerifyCost, expert_weights, num_bytes, read_bytes
from specdec.tools.measure.shapes import SHAPES, block_head_config, block_layers, head_config, recurrent_layers

COPIED = {"cuda": 2**30}  # bytes, more than any cache holds; elsewhere 2**27
COPY_BYTES_PER_MS = 4.24e9  # of an H200, read and written bytes counted
FLOPS_PER_MS = 0.79e12  # dense bf16 products of an H200, as measured for 2048 rows


@dataclass(frozen=True)
class NumWeights:
    """Parameters of a forward's matmuls, on one rank. dense: those that every token uses, the output head included."""

    dense: int
    head: int
    experts: ExpertBytes | None

    def read(self, num_tokens: float = 1) -> float:
        """Return the number of parameters that a forward of `num_tokens` tokens reads."""
        if self.experts is None:
            return self.dense
        return self.dense + self.experts.num_weights * self.experts.distinct(num_tokens) / self.experts.num_experts


@dataclass(frozen=True)
class ShapeFloors:
    """Floors of a named shape in bfloat16 with random weights and a draft, of `draft_bytes` a weight.

    ranks: H200s that share the target; floors are those of one, which reads its part of sharded weights, K/V and
    states, and all of the others, such as routers and the draft. Communication takes no time here. algo: eagle3, nextn,
    block or block:N. vocab: rows of the draft's output head, if `EngineConfig.draft_vocab` makes it narrow.
    """

    shape: str
    ranks: int = 1
    algo: str = "eagle3"
    vocab: int | None = None
    draft_bytes: int = 2

    def round_ms(self, steps: int, tokens: int = 1, batch: int = 1) -> float:
        """Return the bytes that must be read over the copy rate: the target's weights once, and the draft's once per
        pass.

        tokens: of the verify forward; batch: of a draft pass, both together for all requests.
        """
        num_bytes = 2 * self.target.read(tokens) + self.draft_bytes * self._draft_weights(steps, batch)
        return round(num_bytes / COPY_BYTES_PER_MS, 3)

    def token_ms(self, steps: int, width: int, batch: int, context: float, tau: float) -> float:
        """Return ms per token: the slower of reading (weights, states, KV of the mean context) and multiplying `width`
        rows."""
        kept = batch * (context * self.kv_bytes + 2 * self.state_bytes)
        reading = self.round_ms(steps, batch * width, batch) + kept / COPY_BYTES_PER_MS
        products = 2 * self.target.read() * batch * width / FLOPS_PER_MS
        return round(max(reading, products) / tau, 4)

    def first_ms(self, batch: int, tokens: int) -> float:
        """Return ms to the first token: the slower of reading the weights once and multiplying, attention included.

        Llama shapes multiply every row by the output head here, as in their published floors; others only the last one.
        """
        layers, num_heads, _, head_dim = self._attention
        attention = 2 * layers * num_heads * head_dim * tokens**2 / self.ranks  # q·k and p·v of the causal half
        rows = tokens if SHAPES[self.shape].config is LlamaConfig else 1
        products = 2 * ((self.target.read() - self.target.head) * tokens + self.target.head * rows)
        reading = 2 * self.target.read(batch * tokens) / COPY_BYTES_PER_MS
        return round(max(reading, batch * (products + attention) / FLOPS_PER_MS), 3)

    @cached_property
    def target(self) -> NumWeights:
        """A rank's part of the target."""
        model = _without_storage(self.shape)
        head = model.get_output_embeddings().weight
        matrices = {p for p in model.parameters() if p.dim() > 1} - {model.get_input_embeddings().weight, head}
        experts = expert_weights(model, model.config)
        if experts is not None:
            experts = replace(experts, num_weights=experts.num_weights // self.ranks)
        cut = matrices & _cut(model, self.ranks)
        parts = sum(p.numel() for p in (*cut, head)) // self.ranks
        whole = sum(p.numel() for p in matrices - cut)
        return NumWeights(whole + parts - (experts.num_weights if experts else 0), head.numel() // self.ranks, experts)

    @cached_property
    def kv_bytes(self) -> int:
        """Bytes of one token: keys and values of a rank's heads in the target's layers, and of all heads in one draft
        layer."""
        layers, _, num_kv_heads, head_dim = self._attention
        draft = SHAPES[self.shape].layer_of_draft(SHAPES[self.shape].make_config())
        own = draft.num_kv_heads * draft.head_dim if self.algo == "eagle3" else num_kv_heads * head_dim
        own *= block_layers(self.algo) or 1
        return 2 * 2 * (layers * num_kv_heads * head_dim // self.ranks + own)

    @cached_property
    def state_bytes(self) -> int:
        """Bytes of a rank's states of one request: convolutions in bfloat16, scans in fp32."""
        total = StatePool.bytes_for(recurrent_layers(self.shape), 1, 0, torch.bfloat16)
        is_cut = total > 0 and any(form_of(m, self.ranks) for m in _without_storage(self.shape).modules())
        return total // self.ranks if is_cut else total

    @cached_property
    def _attention(self) -> tuple[int, int, int, int]:
        """Layers of attention, heads, KV heads and the width of a head; zeros if the shape has no attention."""
        c = SHAPES[self.shape].make_config()
        layers = c.num_hidden_layers - sum(kind == "linear_attention" for kind in getattr(c, "layer_types", None) or ())
        if not layers:
            return 0, 0, 0, 0
        heads = c.num_attention_heads
        return layers, heads, c.num_key_value_heads, getattr(c, "head_dim", None) or c.hidden_size // heads

    def _draft_weights(self, steps: int, tokens: int) -> float:
        """Return the parameters that S passes of `tokens` rows read, S-1 drafts and an extend, and those read once per
        round: EAGLE-3's projection of features. A NextN layer scores by a rank's rows of the target's output head; a
        narrow output head belongs to the draft and is whole on each rank."""
        if not steps:
            return 0
        model, once = _without_storage(self.shape), 0
        with torch.device("meta"):
            if num_layers := block_layers(self.algo):  # a whole block in one pass
                block = BlockHead(block_head_config(self.shape, model, num_layers))
                return sum(m.weight.numel() for m in block.modules() if isinstance(m, nn.Linear))
            if self.algo == "nextn":
                draft: nn.Module = NextNHead(model)
                head = model.get_output_embeddings().weight.numel() // self.ranks
            else:
                config = head_config(self.shape, model.config)
                config = replace(config, draft_vocab_size=min(config.draft_vocab_size, self.vocab or config.vocab_size))
                draft, head = Eagle3Head(config), 0  # its own is among its parameters
                once = len(config.aux_layers) * config.target_hidden_size * config.layer.hidden_size
        if head and self.vocab is not None:
            head = self.vocab * model.config.hidden_size
        experts = expert_weights(draft, model.config)
        own = sum(p.numel() for p in draft.parameters() if p.dim() > 1) - (experts.num_weights if experts else 0)
        return steps * NumWeights(own - once + head, head, experts).read(tokens) + once


@cache
def _without_storage(shape: str) -> Any:
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(SHAPES[shape].make_config(), dtype=torch.bfloat16)


def _cut(model: Any, ranks: int) -> set[nn.Parameter]:
    """Return the parameters that are sharded: those that transformers' plan names, directly or by module, and those of
    recurrent layers that ranks share by heads."""
    plan = model.tp_plan
    cut = {p for mixer in model.modules() if form_of(mixer, ranks) for p in mixer.parameters()}
    for name, parameter in model.named_parameters():
        pattern = re.sub(r"\.\d+\.", ".*.", name)
        if pattern in plan or pattern.rpartition(".")[0] in plan:
            cut.add(parameter)
    return cut


@dataclass(frozen=True)
class Floor:
    """Lower bounds on the time of a plain step and of a round of S draft passes: every weight read once per pass.

    Left out: attention, its cache, and compute. target_bytes: of a step of one token, draft_bytes: of a draft pass,
    both with the routed experts of one token. verify: the bytes of a verify with routed experts; without, it reads as
    much as a step.
    """

    target_bytes: int
    draft_bytes: int
    num_steps: int
    gb_s: float  # 1e9 bytes per second
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
    if isinstance(draft, DraftHead):
        shared = 0 if draft.lm_head is not None else num_bytes(model.get_output_embeddings())
        own = read_bytes(draft, draft.embed_tokens, None) + shared
        own -= _unused_bytes(draft, getattr(draft, "hf_config", None))
    else:
        own = _step_bytes(draft) - unscored_bytes(draft)
    return Floor(_step_bytes(model), own, num_steps, gb_s, verify)


def _step_bytes(model: PreTrainedModel) -> int:
    everything = read_bytes(model, model.get_input_embeddings(), model.get_output_embeddings())
    return everything - _unused_bytes(model, model.config)


def _unused_bytes(module: nn.Module, config: Any) -> int:
    """Bytes of the routed experts that one token does not use."""
    experts = None if config is None else expert_weights(module, config.get_text_config())
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
    """Wait until a device of that kind has finished its work."""
    if device == "cuda":
        torch.cuda.synchronize()
