"""Results of a launch for the host: one line of int64 per request, packed on the device and unpacked here.

A line holds W tokens, of which the first accept_len count, accept_len, and two flags; then, where they are asked for,
the log-probabilities of the tokens: 1 + 2*num_top float32 a token (`token_logprobs`), by their bits.
"""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from specdec.core.outputs import TokenLogprob

NUM_FLAGS = 3  # accept_len, invalid, finished


class Emitted(NamedTuple):
    """Tokens one request emitted; is_invalid: its logits were not finite; is_finished: it will emit no more."""

    tokens: list[int]
    is_invalid: bool
    is_finished: bool
    logprobs: list[TokenLogprob]


def line_width(num_tokens: int, num_top: int | None) -> int:
    """Return the numbers in the line of a launch that emits up to `num_tokens` tokens a request."""
    return num_tokens + NUM_FLAGS + (0 if num_top is None else num_tokens * (1 + 2 * num_top))


def pack(tokens: Tensor, accept_lens: Tensor, invalid: Tensor, finished: Tensor) -> Tensor:
    """Pack tokens [n, W] int64, accept_lens [n], invalid and finished [n] bool into lines [n, W+3]."""
    return torch.cat([tokens, torch.stack((accept_lens, invalid.long(), finished.long()), 1)], 1)


def append_logprobs(lines: Tensor, logprobs: Tensor) -> Tensor:
    """Append logprobs [n, W, 1 + 2*num_top] float32 to lines [n, W+3]."""
    return torch.cat([lines, logprobs.flatten(1).view(torch.int32).long()], 1)


def unpack(line: list[int], num_top: int | None = None) -> Emitted:
    """Unpack the line of one request, on the host; num_top: None if it has no log-probabilities."""
    each = 0 if num_top is None else 1 + 2 * num_top
    width = (len(line) - NUM_FLAGS) // (1 + each)
    accept_len, invalid, finished = line[width : width + NUM_FLAGS]
    logprobs = [] if num_top is None else _unpack_logprobs(line[width + NUM_FLAGS :], accept_len, num_top)
    return Emitted(line[:accept_len], bool(invalid), bool(finished), logprobs)


def first_tokens(packed: Tensor) -> Tensor:
    """Return the first token [n] of each of the lines [n, W+3]; -1 for a request that emitted none."""
    return packed[:, 0]


def token_logprobs(logits: Tensor, tokens: Tensor, num_top: int) -> Tensor:
    """Return [n, W, 1 + 2*num_top] float32: the token's log-probability, the best tokens' ids, their log-probabilities.

    Under the target's own logits: before temperature, filters and penalties.
    logits [n, W, V], any float dtype; tokens [n, W] int64. Ids are exact: vocabularies have fewer than 2**24 tokens.
    A column at a time, so that one column of logits is held in fp32.
    """
    columns = []
    for column, token in zip(logits.unbind(1), tokens.unbind(1), strict=True):
        scores = column.float()
        norm = scores.logsumexp(1, keepdim=True)
        best = scores.topk(num_top, 1)
        parts = (scores.gather(1, token.unsqueeze(1)) - norm, best.indices.float(), best.values - norm)
        columns.append(torch.cat(parts, 1))
    return torch.stack(columns, 1)


def _unpack_logprobs(bits: list[int], num_tokens: int, num_top: int) -> list[TokenLogprob]:
    rows = np.array(bits, dtype=np.int32).view(np.float32).reshape(-1, 1 + 2 * num_top)[:num_tokens].tolist()
    ends = 1 + num_top
    return [TokenLogprob(row[0], tuple(zip(map(int, row[1:ends]), row[ends:], strict=True))) for row in rows]
