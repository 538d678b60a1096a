"""Results of a launch for the host: one line of int64 per request, packed on the device and unpacked here.

A line holds W tokens, of which the first accept_len count, accept_len, and two flags. New columns go after them.
"""

from typing import NamedTuple

import torch
from torch import Tensor

NUM_FLAGS = 3  # accept_len, invalid, finished


class Emitted(NamedTuple):
    """Tokens one request emitted; is_invalid: its logits were not finite; is_finished: it will emit no more."""

    tokens: list[int]
    is_invalid: bool
    is_finished: bool


def pack(tokens: Tensor, accept_lens: Tensor, invalid: Tensor, finished: Tensor) -> Tensor:
    """Pack tokens [n, W] int64, accept_lens [n], invalid and finished [n] bool into lines [n, W+3]."""
    return torch.cat([tokens, torch.stack((accept_lens, invalid.long(), finished.long()), 1)], 1)


def unpack(line: list[int]) -> Emitted:
    """Unpack the line of one request, on the host."""
    accept_len, invalid, finished = line[-NUM_FLAGS:]
    return Emitted(line[:accept_len], bool(invalid), bool(finished))


def first_tokens(packed: Tensor) -> Tensor:
    """Return the first token [n] of each of the lines [n, W+3]; -1 for a request that emitted none."""
    return packed[:, 0]
