"""Agreement of drafts with the target on its own text, one row per token: how often both predict the same next token.

Everything is teacher-forced, so a few forwards give hundreds of rows. The engine is not used: this measures only the
draft and how it is read.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn
from transformers import PreTrainedModel

from specdec.core.draft.head import BlockDraftHead, DraftHead
from specdec.reach.targets.shape import LAST, decoder_of
from specdec.tools.train.objectives import draft_states

NORMED = -1  # as a source of features: the last hidden state after the final norm
NUM_STEPS = 2  # draft steps compared: the second is the first to read a recycled state


@dataclass(frozen=True)
class Observed:
    """A text of the target, and the target's states for it.

    ids [T] int64: prompt and greedy answer; num_prompt: tokens of the prompt. best [T] int64: the target's argmax after
    each token. stream: [T, h] after k layers, un-normed, k = 0 (embeddings) to n; None where it is not available.
    normed [T, h]: the last one after the final norm.
    """

    ids: torch.Tensor
    num_prompt: int
    best: torch.Tensor
    stream: tuple[torch.Tensor | None, ...]
    normed: torch.Tensor

    def features(self, sources: Sequence[int]) -> torch.Tensor:
        """Return [T, num_sources*h]: the stream after k layers for each source k, or the normed state for NORMED."""
        parts = [self.normed if k == NORMED else self.stream[k] for k in sources]
        assert all(part is not None for part in parts), f"sources {tuple(sources)} cannot be read from this target"
        return torch.cat([part for part in parts if part is not None], -1)


@dataclass(frozen=True)
class Reading:
    """A way to read a head. Row i predicts token i+2 from token i+1+token_offset and feature i+feature_offset.

    sources: k for the residual stream after k layers of the target (the output of layer k-1), or NORMED.
    """

    head: DraftHead
    sources: tuple[int, ...]
    token_offset: int = 0
    feature_offset: int = 0

    @classmethod
    def of(cls, head: DraftHead) -> "Reading":
        """Return the reading that the engine uses."""
        return cls(head, tuple(NORMED if i == LAST else i + 1 for i in head.aux_layers))


@dataclass(frozen=True, eq=False)
class Agreement:
    """Rows where the draft's argmax is the target's. right [NUM_STEPS, num_rows] bool: step 2 follows a true token."""

    right: torch.Tensor

    @property
    def num_rows(self) -> int:
        return self.right.shape[1]

    @property
    def rates(self) -> list[float]:
        """Shares of rows that are right at step 1 and at step 2, for reports."""
        return [round(float(rate), 4) for rate in self.right.float().mean(1)]

    @property
    def first(self) -> float:
        """Share of rows that are right at step 1."""
        return float(self.right[0].float().mean())

    @property
    def score(self) -> float:
        """Mean number of accepted drafts of a chain of two, over rows."""
        return float(self._accepted.mean())

    def gain_over(self, other: "Agreement") -> tuple[float, float]:
        """Return (the gain in score over `other`, of the same rows; its standard error)."""
        gains = self._accepted - other._accepted
        return float(gains.mean()), float(gains.std() / self.num_rows**0.5)

    @property
    def _accepted(self) -> torch.Tensor:
        return self.right.cumprod(0).sum(0).float()


@torch.no_grad()
def observe(model: PreTrainedModel, prompt: Sequence[int], answer: Sequence[int]) -> Observed:
    """Run the target once over a prompt and its own answer."""
    ids = torch.tensor([[*prompt, *answer]], device=model.device)
    seen: list[torch.Tensor] = []
    norm = final_norm(model) or nn.Identity()
    with norm.register_forward_pre_hook(lambda _, args: seen.append(args[0].detach())):
        out = model(input_ids=ids, use_cache=False, output_hidden_states=True)
    stream = (*(h[0] for h in out.hidden_states[:-1]), seen[-1][0] if seen else None)
    return Observed(ids[0], len(prompt), out.logits[0].argmax(-1), stream, out.hidden_states[-1][0])


def final_norm(model: PreTrainedModel) -> nn.Module | None:
    """Return the target's norm after its last layer, None if it is not found by its name."""
    norm = getattr(decoder_of(model), "norm", None)
    return norm if isinstance(norm, nn.Module) else None


@torch.no_grad()
def agreement(reading: Reading, model: PreTrainedModel, texts: Sequence[Observed]) -> Agreement:
    """Compare the head under `reading` with the target on its answers in `texts`."""
    head, score, right = reading.head, model.get_output_embeddings(), []
    for text in texts:
        length = len(text.ids) - NUM_STEPS - 1  # columns; one less, since tokens may be read one ahead
        first = max(text.num_prompt - 1, 0)
        if length <= first:
            continue
        tokens = _moved(text.ids, reading.token_offset).unsqueeze(0)
        features = _moved(text.features(reading.sources), reading.feature_offset)[:length].unsqueeze(0)
        states = draft_states(head, model.get_input_embeddings(), tokens, features, NUM_STEPS)
        logits = []
        for j, state in enumerate(states):
            normed = head.normed(state[0, first:], min(j, head.num_modules - 1))
            logits.append(head.project(normed, score))
            if isinstance(head, BlockDraftHead) and head.markov is not None:
                before = head.markov.after(tokens[0, first + 1 + j : length + 1 + j], normed)
                logits[-1] = logits[-1] + head.markov.bias(before)
        drafted = torch.stack([head.hot_ids[row.argmax(-1)] for row in logits])
        wanted = torch.stack([text.best[first + 1 + j : length + 1 + j] for j in range(NUM_STEPS)])
        right.append(drafted == wanted)
    return _joined(right)


@torch.no_grad()
def model_agreement(draft: PreTrainedModel, texts: Sequence[Observed]) -> Agreement:
    """Compare a standalone model with the target in the same way; its steps are all equal."""
    right = []
    for text in texts:
        best = draft(input_ids=text.ids.unsqueeze(0), use_cache=False).logits[0].argmax(-1)
        right.append((best == text.best)[text.num_prompt : -1].expand(NUM_STEPS, -1))
    return _joined(right)


def commonest(texts: Sequence[Observed]) -> float:
    """Return the share of the most frequent token in the target's answers: the score of a draft that always proposes
    it."""
    tokens = [t for text in texts for t in text.best[text.num_prompt :].tolist()]
    return max(Counter(tokens).values()) / len(tokens) if tokens else 0.0


def coverage(hot_ids: torch.Tensor, texts: Sequence[Observed]) -> float:
    """Return the share of the target's answer tokens that a draft scoring only `hot_ids` can emit at all."""
    said = torch.cat([text.best[text.num_prompt :] for text in texts])
    return float(torch.isin(said, hot_ids).float().mean())


def _moved(rows: torch.Tensor, offset: int) -> torch.Tensor:
    """Shift `rows` so that row i is their row i+offset, the ends repeated."""
    index = torch.arange(rows.shape[0], device=rows.device) + offset
    return rows[index.clamp(0, rows.shape[0] - 1)]


def _joined(right: list[torch.Tensor]) -> Agreement:
    """Concatenate the [NUM_STEPS, rows] bool of each text."""
    if sum(part.shape[1] for part in right) < 2:
        raise ValueError("the target's answers are too short to look at; give other prompts or raise max_new_tokens")
    return Agreement(torch.cat(right, 1))
