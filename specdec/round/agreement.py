"""What the ranks of a tensor-parallel engine play together: rank 0's tree, and its verdict, in the round's own graph.

Ranks compute the same from equal sums, but nothing proves that every product of a replicated draft picks one algorithm
on all of them. With one broadcast each, only K/V can differ between ranks, in the last bits.
"""

from collections.abc import Callable
from typing import Any, TypeVar

import torch

from specdec.backends.comm import broadcast

Fields = TypeVar("Fields", bound=tuple[torch.Tensor, ...])


def agreed(group: str, fields: Fields) -> Fields:
    """Return rank 0's `fields`, a NamedTuple of tensors [n, ...], int64 or bool; group: "" for a single process."""
    if not group:
        return fields
    num = fields[0].shape[0]
    flat = [field.reshape(num, -1).long() for field in fields]
    told = broadcast(torch.cat(flat, 1), group).split([part.shape[1] for part in flat], 1)
    make: Callable[..., Any] = type(fields)._make  # type: ignore[attr-defined]
    return make(part.reshape(own.shape).to(own.dtype).contiguous() for part, own in zip(told, fields, strict=True))
