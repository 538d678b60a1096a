"""Break-even of drafting on a CPU: the cost of a round in plain steps, from timed forwards of the target.

A GPU reads the weights whatever the number of rows, so rounds are cheap there. A CPU is bound by compute, and some of
its matmuls of a few rows cost more than they should.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, cached_property

import torch
from transformers import PreTrainedModel

from specdec.core.draft.head import DraftHead
from specdec.reach.targets.few_rows import FewRows
from specdec.tools.measure.roofline import floor

REPEATS = 3
DEPTHS = (1, 2, 3)  # S to consider
MARGIN = 1.05  # by how much drafting must be faster than plain decoding
BATCHES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)


def expected_tau(steps: int) -> float:
    """Return the tau that a usable draft is assumed to have: that of the shipped EAGLE-3 head on the demo's prompts."""
    return 1 + sum(0.7 * 0.65**j for j in range(steps))


@dataclass(frozen=True)
class BreakEven:
    """Costs of rounds relative to plain steps.

    seconds: returns those of a target forward by its tokens; draft_share: bytes of a draft pass over those of a plain
    step.
    """

    seconds: Callable[[int], float]
    draft_share: float

    def cost(self, steps: int, batch: int) -> float:
        """Return the plain steps that a round of S = `steps` costs at `batch` requests."""
        plain = self.seconds(batch)
        verify = max(plain, self.seconds(batch * (steps + 1)))  # a busy host may time fewer rows as slower
        draft = self.draft_share * ((steps - 1) * plain + verify)  # S - 1 drafts, and an extend of S + 1 rows
        return (verify + draft) / plain

    def speed(self, steps: int, batch: int) -> float:
        """Return tokens/s with drafts over those without, at the expected tau."""
        return expected_tau(steps) / self.cost(steps, batch)

    def best_steps(self, batch: int) -> int:
        """Return the fastest S at `batch` requests; 0 where plain decoding is faster."""
        steps = max(DEPTHS, key=lambda s: self.speed(s, batch))
        return steps if self.speed(steps, batch) >= MARGIN else 0

    @cached_property
    def most_requests(self) -> int:
        """The largest batch of BATCHES up to which drafting pays off; 0 if it never does."""
        most = 0
        for batch in BATCHES:
            if not self.best_steps(batch):
                break
            most = batch
        return most


def cpu_break_even(model: PreTrainedModel, draft: DraftHead | PreTrainedModel | None) -> BreakEven:
    """Return the break-even of a target on a CPU and its draft; None: one without weights. Forwards run on demand."""
    share = 0.0
    if draft is not None:
        bound = floor(model, draft, 1, 1.0)
        share = bound.draft_bytes / bound.target_bytes
    rows = FewRows([model])
    return BreakEven(cache(lambda num: _forward_seconds(model, rows, num)), share)


@torch.inference_mode()
def _forward_seconds(model: PreTrainedModel, rows: FewRows, num_tokens: int) -> float:
    """Return the least seconds of a forward of `num_tokens` tokens, with logits for all."""
    ids = torch.arange(num_tokens, device=model.device)[None] % model.get_input_embeddings().weight.shape[0]
    seconds = []
    with rows.active():
        for _ in range(REPEATS):
            start = time.perf_counter()
            model(input_ids=ids, use_cache=False)
            seconds.append(time.perf_counter() - start)
    return min(seconds)
