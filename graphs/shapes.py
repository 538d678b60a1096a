"""Shapes that graphs are captured in: keys, buckets, and the answer to whether a batch can replay one."""

from collections.abc import Sequence
from dataclasses import dataclass

MOST_CAPTURED = 256  # requests; larger batches are captured where the caller lists them


@dataclass(frozen=True)
class ShapeKey:
    """One captured graph: `num_reqs` requests of `runner`; `variant` names what else changes the work."""

    runner: str
    num_reqs: int
    variant: str = ""

    def __str__(self) -> str:
        return f"{self.runner} of {self.num_reqs}" + (f" ({self.variant})" if self.variant else "")


@dataclass(frozen=True)
class Decision:
    """Whether a batch replays; `reason` says why not, in words that do not depend on the batch's numbers."""

    ok: bool
    reason: str = ""


def batch_buckets(max_batch: int, wanted: Sequence[int] | None = None) -> tuple[int, ...]:
    """Batch sizes (requests) to capture, ascending, none above max_batch.

    wanted: the caller's sizes, those above max_batch become max_batch; None: powers of two and the sizes half-way
    between them, so that at most a third of a replay is padding, up to MOST_CAPTURED; the last is max_batch.
    ValueError for an empty list and for sizes below 1.
    """
    if wanted is not None:
        if not wanted or any(not isinstance(n, int) or isinstance(n, bool) or n < 1 for n in wanted):
            raise ValueError(
                f"graph_batches={wanted!r}: expected batch sizes of at least 1, or None for the usual ones"
            )
        return tuple(sorted({min(n, max_batch) for n in wanted}))
    ladder = [size for power in range(MOST_CAPTURED.bit_length()) for size in (1 << power, 3 << power)]
    top = min(max_batch, MOST_CAPTURED)
    return tuple(sorted({n for n in ladder if n < top} | {top}))


def bucket_for(num_reqs: int, buckets: Sequence[int]) -> int | None:
    """The smallest of `buckets` (ascending) that holds `num_reqs`; None if none does."""
    return next((b for b in buckets if b >= num_reqs), None)
