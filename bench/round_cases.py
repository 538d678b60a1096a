"""Cases of the benches that step the core: ways to speculate, and the target and head that they are timed on."""

from dataclasses import dataclass
from typing import Any

import torch

from specdec.functional.sampling import SamplingParams
from specdec.measure.roofline import round_floor_ms
from specdec.measure.shapes import acceptance_rates, make_head, make_target
from specdec.targets.pretrained import load_pretrained

PROMPT = 128  # tokens
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPE = torch.bfloat16 if DEVICE == "cuda" else torch.float32
CONFIGS = ((0, 1, 1), (3, 1, 4), (5, 1, 6), (5, 8, 32))  # num_steps, topk, num_draft_tokens

LAWS = {
    "greedy": SamplingParams(),
    "sampled": SamplingParams(temperature=1.0),
    "filtered": SamplingParams(temperature=1.0, top_k=50, top_p=0.9),
}


@dataclass(frozen=True)
class Case:
    """One way to speculate at one batch size."""

    shape: str
    batch: int
    steps: int = 0
    topk: int = 1
    width: int = 1
    kind: str = "greedy"

    @property
    def law(self) -> SamplingParams:
        """How every request samples."""
        return LAWS[self.kind]

    @property
    def row(self) -> dict[str, Any]:
        """The keys every result row of this case has."""
        return {
            "shape": self.shape,
            "batch": self.batch,
            "steps": self.steps,
            "topk": self.topk,
            "draft_tokens": self.width,
            "tokens": PROMPT,
            "sampling": self.kind,
        }

    @property
    def floor_ms(self) -> float:
        """Lower bound on a round of an H200."""
        return round_floor_ms(self.shape, self.steps)

    @property
    def settings(self) -> dict[str, Any]:
        """For `attach`, beside the modes compared."""
        shared = {"max_seq_len": 2048, "prefill_graph": "off", "graph_sampling": self.kind}
        if not self.steps:
            return dict(shared)
        draft = {"num_steps": self.steps, "topk": self.topk, "num_draft_tokens": self.width}
        return {**shared, **draft, "synthetic_acceptance": acceptance_rates(self.steps)}


def target_and_head(shape: str, target: str | None, draft: str | None) -> tuple[Any, Any]:
    """The real target and draft of those names, or those of `shape` with random weights."""
    model = make_target(shape, DEVICE) if target is None else load_pretrained(target, dtype=DTYPE, device=DEVICE)[0]
    return model, draft or make_head(shape, model)
