"""Cost of a round against a plain step: from the bytes that must be read, and measured through the engine."""

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from specdec.api import Engine, attach
from specdec.heads.base import DraftHead
from specdec.metrics import AcceptanceStats
from specdec.outputs import RequestOutput
from specdec.targets.weight_bytes import VerifyCost, expert_weights, num_bytes, read_bytes

COPY_BYTES = {"cuda": 2**30}  # larger than any cache; elsewhere 2**27


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


@dataclass(frozen=True)
class Run:
    """Results of one engine over all prompts, one at a time. step_ms: median over prompts of a plain step, or of a
    round with a draft, without prefills."""

    outputs: list[RequestOutput]
    acceptance: AcceptanceStats
    step_ms: float
    facts: dict[str, Any]

    @property
    def tokens(self) -> list[list[int]]:
        """Emitted ids of every prompt."""
        return [r.tokens for r in self.outputs]


def run(
    model: PreTrainedModel, draft: Any, prompts: Sequence[Sequence[int]], max_new_tokens: int, num_steps: int
) -> Run:
    """Decode greedily at batch 1, after a warm-up; draft None is plain decoding."""
    longest = max(map(len, prompts)) + max_new_tokens
    settings: dict[str, Any] = {"max_batch": 1, "max_seq_len": longest, "graph_sampling": "greedy"}
    settings["compile"] = False  # several engines, a few texts each
    if draft is not None:
        settings["num_steps"] = num_steps
    engine: Engine = attach(model, draft, **settings)
    try:
        engine.generate([list(prompts[0])], max_new_tokens=min(4, max_new_tokens))
        out = engine.generate([list(p) for p in prompts], max_new_tokens=max_new_tokens)
        facts = engine.report().draft
    finally:
        engine.detach()
    paces = [(r.time_s - r.first_token_s) / r.acceptance.num_rounds for r in out.requests if r.acceptance.num_rounds]
    if not paces:
        raise ValueError("the target's answers are one token each: give other prompts or raise max_new_tokens")
    return Run(out.requests, out.stats.acceptance, 1e3 * statistics.median(paces), facts)


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
    source = torch.empty(COPY_BYTES.get(device.type, 2**27), dtype=torch.uint8, device=device)
    target, seconds = torch.empty_like(source), []
    for _ in range(6):
        _wait(device)
        start = time.perf_counter()
        target.copy_(source)
        _wait(device)
        seconds.append(time.perf_counter() - start)
    return 2 * source.numel() / statistics.median(seconds[1:]) / 1e9


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
