"""How far a run is, and the learning rate there."""

import math


def progress(*counts: tuple[float, float | None]) -> float:
    """Share of the run that is done, 0..1: the largest of the shares done/limit of every (done, limit) with a limit."""
    return min(max(done / limit for done, limit in counts if limit), 1.0)


def learning_rate(peak: float, share: float, warmup: float) -> float:
    """Linear warm-up over the share `warmup` of the run, then a cosine to zero at its end."""
    if share < warmup:
        return peak * max(share / warmup, 0.01)
    return peak * 0.5 * (1 + math.cos(math.pi * (share - warmup) / (1 - warmup)))
