"""Simulated rounds of greedy decoding on known text: the acceptance a draft would reach there, before it is served.

A chain may start after every token, but a round starts only where the previous one ended, which is usually after a
rejected draft. So rates over all starts flatter a draft; these are those of an engine on the same text.
"""

from collections.abc import Iterable

import torch

from specdec.metrics import AcceptanceStats
from specdec.train.batches import Batch
from specdec.train.losses import Goal
from specdec.train.tally import accepted_prefixes


def play_rounds(batches: Iterable[tuple[Batch, Goal, list[torch.Tensor]]]) -> AcceptanceStats:
    """Return acceptance over all sequences of `batches` (batch, goal, drafted [N] per step), trimmed at their ends."""
    total = AcceptanceStats()
    for batch, goal, drafted in batches:
        correct = torch.stack([d == goal.best for d in drafted])
        lengths = accepted_prefixes(batch, correct).sum(0).tolist()
        owners = (batch.starts // batch.length).tolist()
        start = 0
        while start < len(owners):  # starts of one sequence lie side by side
            end = start + 1
            while end < len(owners) and owners[end] == owners[start]:
                end += 1
            _play(lengths[start:end], total)
            start = end
    return total


def _play(lengths: list[int], total: AcceptanceStats) -> None:
    """Add the rounds of one sequence to `total`; lengths[i] drafts are right if a round starts at its i-th place."""
    place = 0
    while place < len(lengths):
        emitted = min(lengths[place] + 1, len(lengths) - place)
        total.add(emitted)
        place += emitted
