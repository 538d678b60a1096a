"""Searches for the reading under which a head agrees with the target; its name is the defect's."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from specdec.doctor.readings import ALTERNATIVES, Alternative, TargetFacts
from specdec.doctor.rows import Agreement, Observed, Reading, agreement
from specdec.heads.base import DraftHead

LEAST_GAIN = 0.05  # accepted drafts of a chain of two; less is not reported
USEFUL = 0.25  # the same unit: the least score of a draft that is read well
LEAKS = 0.5  # share of rows; a head that is shown the answer repeats it more often


@dataclass(frozen=True)
class Trial:
    """An alternative and the draft's agreement under it."""

    alternative: Alternative
    agreement: Agreement


@torch.no_grad()
def search(
    head: DraftHead, model: PreTrainedModel, texts: Sequence[Observed]
) -> tuple[Agreement, list[Trial], list[Trial]]:
    """Return (agreement as the engine reads it, all trials, repairs: one trial per defect, each on top of the last).

    A trial repairs if clearly more drafts of a chain of two are accepted under it. One that leaks ends the search.
    """
    target, now = TargetFacts.of(model), Reading.of(head)

    def try_all(alternatives: Sequence[Alternative]) -> list[Trial]:
        changed = ((a, a.change(now, target)) for a in alternatives)
        return [Trial(a, agreement(reading, model, texts)) for a, reading in changed if reading is not None]

    base = agreement(now, model, texts)
    trials = try_all(ALTERNATIVES)
    repairs: list[Trial] = []
    found = _best(trials, base)
    while found is not None:
        repairs.append(found)
        if found.alternative.leaks:
            break
        repaired = found.alternative.change(now, target)
        assert repaired is not None, found.alternative.name
        now, used = repaired, {trial.alternative.name for trial in repairs}
        rest = [a for a in ALTERNATIVES if a.name not in used and not a.leaks]
        found = _best(try_all(rest), found.agreement)
    return base, trials, repairs


def unclear(trials: Sequence[Trial], base: Agreement) -> Trial | None:
    """Return the trial that seems to gain most over `base`, though it may be chance: more rows would tell."""
    gaining = [t for t in trials if not t.alternative.leaks and _is_clear(t.agreement, base, num_errors=1.5)]
    return max(gaining, key=lambda t: t.agreement.score, default=None)


def _best(trials: Sequence[Trial], base: Agreement) -> Trial | None:
    """Return the trial that gains most over `base`, and clearly. One that leaks must gain twice what others do and be
    right in most rows, as any head does better when it is shown the answer."""
    clear = [t for t in trials if _is_clear(t.agreement, base)]
    honest = [t for t in clear if not t.alternative.leaks]
    best = max(honest, key=lambda t: t.agreement.score, default=None)
    least = base.score if best is None else 2 * best.agreement.score - base.score
    leaks = [t for t in clear if t.alternative.leaks and t.agreement.first > LEAKS and t.agreement.score > least]
    return max(leaks, key=lambda t: t.agreement.score, default=best)


def _is_clear(found: Agreement, base: Agreement, num_errors: float = 3) -> bool:
    gain, error = found.gain_over(base)
    return found.score > USEFUL and gain > max(LEAST_GAIN, num_errors * error)
