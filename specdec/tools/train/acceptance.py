"""Acceptance of a draft on known text: over all chain starts, and over rounds simulated as an engine runs them.

A chain may start after every token, but a round starts only where the previous one ended, which is usually after a
rejected draft. So rates over all starts flatter a draft; those of simulated rounds are an engine's on the same text.
"""

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from operator import itemgetter
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from specdec.core.draft.head import DraftHead
from specdec.core.metrics import AcceptanceStats
from specdec.tools.train.batches import Batch, Batches
from specdec.tools.train.config import recipe
from specdec.tools.train.data import Corpus
from specdec.tools.train.objectives import HeadObjective, Objective, Outcome
from specdec.tools.train.standalone import StandaloneObjective

TOKENS_PER_BATCH = 8192


class Tally:
    """Losses and acceptance over batches, kept on the device in fp64 until `read`, so that adding costs no sync."""

    def __init__(self, num_steps: int, device: torch.device):
        # by step: losses summed over batches, rows where the draft's argmax is the target's, chains right up to here
        self._steps = torch.zeros(3, num_steps, dtype=torch.float64, device=device)
        # batches, rows, rows whose target argmax is in the hot vocabulary, chain starts
        self._counts = torch.zeros(4, dtype=torch.float64, device=device)

    def add(self, batch: Batch, outcome: Outcome) -> None:
        right, losses = outcome.right, torch.stack(outcome.losses).detach()
        self._steps += torch.stack([losses, right.sum(1), accepted_prefixes(batch, right).sum(1)])
        sizes = [1, batch.rows.numel(), 0, batch.starts.numel()]
        self._counts += torch.tensor(sizes, dtype=torch.float64).to(self._counts.device, non_blocking=True)
        self._counts[2] += outcome.goal.is_trained.sum()

    def read(self) -> dict[str, Any]:
        """Return the rates, on the host (one sync).

        acc: share of rows right at each step, given true tokens before them; a target argmax outside the hot vocabulary
        is a miss. accept_at: a_j of `metrics`, with all chain starts weighted equally. tau = 1 + Σ a_j.
        """
        num_batches, num_rows, num_trained, num_starts = self._counts.clamp(min=1).tolist()
        loss, right, accepted = self._steps.tolist()
        accept_at = [n / num_starts for n in accepted]
        return {
            "loss": [total / num_batches for total in loss],
            "acc": [n / num_rows for n in right],
            "accept_at": accept_at,
            "tau": 1.0 + sum(accept_at),
            "argmax_coverage": num_trained / num_rows,
            "rows": int(self._counts[1]),
        }


def accepted_prefixes(batch: Batch, right: torch.Tensor) -> torch.Tensor:
    """Return which chain prefixes are accepted, [S, num_starts] bool: [j, i] if tokens 0..j from starts[i] are right.

    right: [S, N] bool, at batch.rows. Chains are trimmed: tokens past the last generated one count as rejected.
    """
    steps = right.shape[0]
    size = batch.tokens.shape[0] * batch.length + steps
    at = torch.zeros(steps, size, dtype=torch.bool, device=right.device)
    at[:, batch.rows] = right
    # Column i imitates row i+1+j at step j. Past a sequence's end lie rows below num_steps of the next one: never set.
    chain = torch.stack([at[j, batch.starts + 1 + j] for j in range(steps)])
    return chain.long().cumprod(0).bool()


@torch.no_grad()
def outcomes(objective: Objective, batches: Batches) -> Iterator[tuple[Batch, Outcome]]:
    """Yield every batch with its Outcome, without noise or gradients."""
    for indices in batches.plan(None):
        batch = batches.build(indices)
        yield batch, objective.forward(batch, None)


def play_rounds(batches: Iterable[tuple[Batch, Outcome]]) -> AcceptanceStats:
    """Return acceptance of greedy rounds over all sequences of `batches`, trimmed at their ends."""
    total = AcceptanceStats()
    for batch, outcome in batches:
        lengths = accepted_prefixes(batch, outcome.right).sum(0).tolist()
        owners = (batch.starts // batch.length).tolist()
        for _, sequence in groupby(zip(owners, lengths, strict=True), key=itemgetter(0)):
            ahead = [length for _, length in sequence]  # correct drafts if a round starts at that place
            place = 0
            while place < len(ahead):
                emitted = min(ahead[place] + 1, len(ahead) - place)
                total.add([emitted])
                place += emitted
    return total


def predict(
    model: PreTrainedModel, draft: nn.Module, text: Sequence[tuple[Sequence[int], Sequence[int]]], num_steps: int
) -> AcceptanceStats:
    """Simulate greedy chain rounds of `num_steps` on `text`, pairs of prompt ids and the target's greedy answer ids.

    draft: a loaded head or standalone model, in the target's dtype; it is not changed. Returns the rounds' counts.
    """
    frozen = {name: p.requires_grad for name, p in draft.named_parameters()}
    settings = {"num_steps": num_steps, "max_steps": 1, "compile": False}
    objective: Objective
    try:
        if isinstance(draft, DraftHead):
            config = recipe(draft.algo, **settings, feature_weight=0.0, soft_weight=1.0)
            objective = HeadObjective(model, draft, config)
        else:
            assert isinstance(draft, PreTrainedModel)
            objective = StandaloneObjective(model, draft, recipe("standalone", **settings))
        corpus = Corpus.of([(list(prompt), list(answer)) for prompt, answer in text])
        longest = int(corpus.lengths.max())
        batches = Batches(corpus, num_steps, max(TOKENS_PER_BATCH, longest + 16), longest, objective.device)
        return play_rounds(outcomes(objective, batches))
    finally:
        for name, p in draft.named_parameters():
            p.requires_grad_(frozen[name])
