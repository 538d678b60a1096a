"""Cost of a plain step and of a round, measured through the engine."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedModel

from specdec.api import Engine, attach
from specdec.metrics import AcceptanceStats
from specdec.outputs import RequestOutput


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
