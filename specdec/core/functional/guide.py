"""A grammar's advice to a draft before it begins: the tokens that it forces, and what may follow them.

A draft that takes it proposes nothing else there, and is fed what is forced. Whatever it draws, it draws from the law
of the logits that this returns, so the target's acceptance stays exact.
"""

from typing import NamedTuple

import torch
from torch import Tensor

FORBIDDEN = -3e4  # a logit that float16 holds, too; nodes that a tree has to spare may still hold such tokens


class Guide(NamedTuple):
    """forced [bs, S] int64: tokens of the first draft steps, -1 past the last. masks [bs, W] int32: bits of what may
    follow them, as in `sampling.constrain`."""

    forced: Tensor
    masks: Tensor


def guided(logits: Tensor, guide: Guide, step: int, names: Tensor) -> Tensor:
    """Return the logits [bs, n, dv] of draft step `step`, with `FORBIDDEN` in place of those that the grammar forbids.

    names [dv] int64: the token id of each index. Steps past what is known, and rows of which no token is allowed, stay
    as they are.
    """
    token = guide.forced[:, step : step + 1]
    bits = guide.masks[:, names // 32] >> (names % 32).int() & 1
    is_next = (guide.forced >= 0).sum(1, keepdim=True) == step
    allowed = torch.where(token >= 0, names == token, (bits != 0) | ~is_next)
    allowed = allowed | ~allowed.any(1, keepdim=True)
    return logits.masked_fill(~allowed.unsqueeze(1), FORBIDDEN)
