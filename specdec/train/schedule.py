"""Progress of a run, and the learning rate at that point."""

import math


def progress(*counts: tuple[float, float | None]) -> float:
    """Return the share of the run that is done, 0..1: the largest done/limit of all (done, limit) that have a limit."""
    return min(max(done / limit for done, limit in counts if limit), 1.0)


def learning_rate(peak: float, share: float, warmup: float) -> float:
    """Return the learning rate at `share` of the run: linear warm-up over the share `warmup`, then a cosine to zero."""
    if share < warmup:
        return peak * max(share / warmup, 0.01)
    return peak * 0.5 * (1 + math.cos(math.pi * (share - warmup) / (1 - warmup)))
