"""Shapes of captured graphs: keys, buckets, and the decision whether a batch can replay one."""

from collections.abc import Sequence
from dataclasses import dataclass

FINE_PREFILL = 256  # tokens
MOST_CAPTURED = 256  # requests; larger batches are captured only if the caller lists them


@dataclass(frozen=True)
class ShapeKey:
    """Key of one captured graph: the runner's name, its bucket `size` in requests or tokens, and its variant."""

    runner: str
    size: int
    variant: str = ""

    def __str__(self) -> str:
        return f"{self.runner} of {self.size}" + (f" ({self.variant})" if self.variant else "")


@dataclass(frozen=True)
class Decision:
    """Answers whether a batch replays a graph; `reason` says why not, in words that counters can group by."""

    ok: bool
    reason: str = ""


def batch_buckets(max_batch: int, wanted: Sequence[int] | None = None) -> tuple[int, ...]:
    """Return the batch sizes (requests) to capture, ascending, none above max_batch.

    wanted: the caller's sizes; those above max_batch become max_batch. None: powers of two and the sizes half-way
    between them, so that at most a third of a replay is padding; the last is max_batch or MOST_CAPTURED, the smaller.
    ValueError for sizes below 1.
    """
    if wanted is not None:
        return clamped(wanted, max_batch)
    clamped([max_batch], max_batch)
    ladder = [size for power in range(MOST_CAPTURED.bit_length()) for size in (1 << power, 3 << power)]
    top = min(max_batch, MOST_CAPTURED)
    return tuple(sorted({n for n in ladder if n < top} | {top}))


def token_buckets(max_tokens: int, wanted: Sequence[int] | None = None) -> tuple[int, ...]:
    """Return the token counts to capture, ascending, up to max_tokens.

    wanted: the caller's sizes; those above max_tokens become max_tokens. None: 1, 2, 4, then steps of 4 or more: four
    per power of two, eight from FINE_PREFILL on, so that a replay of 16 tokens or more pads by at most a quarter, and
    by at most an eighth where the device has more to do than the host. ValueError for sizes below 1.
    """
    if wanted is not None:
        return clamped(wanted, max_tokens)
    clamped([max_tokens], max_tokens)
    sizes, size = {1, 2, max_tokens}, 4
    while size < max_tokens:
        sizes.add(size)
        octave = 1 << (size.bit_length() - 1)
        size += max(4, octave // (8 if octave >= FINE_PREFILL else 4))
    return tuple(sorted(s for s in sizes if s <= max_tokens))


def replayed_sizes(sizes: Sequence[int], device_bound_from: int | None) -> tuple[int, ...]:
    """Return the sizes (tokens, ascending) worth capturing where large batches run eagerly rather than padded.
    device_bound_from: see `check_padding`; kept are the sizes below it, the next one, and the largest, for full chunks.
    None: all sizes."""
    if device_bound_from is None:
        return tuple(sizes)
    num = 1 + sum(size < device_bound_from for size in sizes)
    return (*sizes[:num], *sizes[num:][-1:])


def clamped(wanted: Sequence[int], most: int) -> tuple[int, ...]:
    """Return `wanted` ascending, sizes above `most` as `most`; ValueError for an empty list and for sizes below 1."""
    if not wanted or min(*wanted, most) < 1:
        raise ValueError(f"buckets {wanted!r}, at most {most}: expected sizes of at least 1")
    return tuple(sorted({min(n, most) for n in wanted}))
