"""Acceptance of a draft on given text, computed with the trainer's arithmetic: the measure that training reports."""

from collections.abc import Iterator, Sequence

import torch
from torch import nn
from transformers import PreTrainedModel

from specdec.draft.head import DraftHead
from specdec.metrics import AcceptanceStats
from specdec.train.batches import Batch, Batches
from specdec.train.config import recipe
from specdec.train.data import Corpus
from specdec.train.losses import Goal
from specdec.train.objectives import HeadObjective, Objective
from specdec.train.rounds import play_rounds
from specdec.train.standalone import StandaloneObjective

TOKENS_PER_BATCH = 8192


@torch.no_grad()
def predict(
    model: PreTrainedModel, draft: nn.Module, text: Sequence[tuple[Sequence[int], Sequence[int]]], num_steps: int
) -> AcceptanceStats:
    """Simulate rounds of greedy chains of `num_steps` on `text`, pairs of prompt and the target's greedy answer.

    draft: a loaded head or standalone model, in the target's dtype; it is left unchanged.
    """
    frozen = {name: p.requires_grad for name, p in draft.named_parameters()}
    try:
        objective = _objective(model, draft, num_steps)
        corpus = Corpus.of([(list(prompt), list(answer)) for prompt, answer in text])
        longest = int(corpus.lengths.max())
        batches = Batches(corpus, num_steps, max(TOKENS_PER_BATCH, longest + 16), longest, objective.device)
        return play_rounds(_outcomes(objective, batches))
    finally:
        for name, p in draft.named_parameters():
            p.requires_grad_(frozen[name])


def _objective(model: PreTrainedModel, draft: nn.Module, num_steps: int) -> Objective:
    if isinstance(draft, DraftHead):
        plain = {"num_steps": num_steps, "max_steps": 1, "feature_weight": 0.0, "soft_weight": 1.0, "compile": False}
        return HeadObjective(model, draft, recipe(draft.algo, **plain))
    assert isinstance(draft, PreTrainedModel)
    return StandaloneObjective(model, draft, recipe("standalone", num_steps=num_steps, max_steps=1, compile=False))


def _outcomes(objective: Objective, batches: Batches) -> Iterator[tuple[Batch, Goal, list[torch.Tensor]]]:
    for indices in batches.plan(None):
        batch = batches.build(indices)
        outcome = objective.forward(batch, None)
        yield batch, outcome.goal, outcome.drafted
