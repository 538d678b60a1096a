"""What a launch tells the host of each request: one line of int64, packed on the device and unpacked here.

A line holds W tokens, of which accept_len count, accept_len, and two flags. More columns go behind them.
"""

from typing import NamedTuple

import torch
from torch import Tensor

NUM_FLAGS = 3  # accept_len, invalid, finished


class Emitted(NamedTuple):
    """What one request emitted; is_invalid: its logits were not finite; is_finished: it will emit no more."""

    tokens: list[int]
    is_invalid: bool
    is_finished: bool


def pack(tokens: Tensor, accept_lens: Tensor, invalid: Tensor, finished: Tensor) -> Tensor:
    """Lines [n, W+3] of tokens [n, W] int64, accept_lens [n], invalid and finished [n] bool."""
    return torch.cat([tokens, torch.stack((accept_lens, invalid.long(), finished.long()), 1)], 1)


def unpack(line: list[int]) -> Emitted:
    """The line of one request, on the host."""
    accept_len, invalid, finished = line[-NUM_FLAGS:]
    return Emitted(line[:accept_len], bool(invalid), bool(finished))


def first_tokens(packed: Tensor) -> Tensor:
    """[n] of lines [n, W+3]; -1 for a request that emitted none."""
    return packed[:, 0]
