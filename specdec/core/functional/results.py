"""Results of a launch for the host: one line of int64 per request, packed on the device and unpacked here.

A line holds W tokens, of which the first accept_len count, accept_len, and two flags; then, where they are asked for,
digests of the logits that the tokens were chosen from (`row_digests`), and the tokens' log-probabilities: 1 + 2*num_top
float32 a token (`token_logprobs`), by their bits.
"""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from specdec.core.outputs import TokenLogprob

NUM_FLAGS = 3  # accept_len, invalid, finished


class Emitted(NamedTuple):
    """Tokens one request emitted; is_invalid: logits after them were not finite, and the last of them means nothing;
    is_finished: it will emit no more."""

    tokens: list[int]
    is_invalid: bool
    is_finished: bool
    logprobs: list[TokenLogprob]
    digests: list[int]


def line_width(num_tokens: int, num_top: int | None, has_digests: bool = False) -> int:
    """Return the numbers in the line of a launch that emits up to `num_tokens` tokens a request."""
    each = 1 + has_digests + (0 if num_top is None else 1 + 2 * num_top)
    return num_tokens * each + NUM_FLAGS


def pack(tokens: Tensor, accept_lens: Tensor, invalid: Tensor, finished: Tensor) -> Tensor:
    """Pack tokens [n, W] int64, accept_lens [n], invalid and finished [n] bool into lines [n, W+3]."""
    return torch.cat([tokens, torch.stack((accept_lens, invalid.long(), finished.long()), 1)], 1)


def append_logprobs(lines: Tensor, logprobs: Tensor) -> Tensor:
    """Append logprobs [n, W, 1 + 2*num_top] float32 to lines [n, W+3], or to what has digests [n, W] appended."""
    return torch.cat([lines, logprobs.flatten(1).view(torch.int32).long()], 1)


def unpack(line: list[int], num_top: int | None = None, has_digests: bool = False) -> Emitted:
    """Unpack the line of one request, on the host; num_top: None if it has no log-probabilities."""
    if num_top is None and not has_digests:  # the usual line, of which a batch has many
        accept_len, invalid, finished = line[-NUM_FLAGS:]
        return Emitted(line[:accept_len], bool(invalid), bool(finished), [], [])
    width = (len(line) - NUM_FLAGS) // (line_width(1, num_top, has_digests) - NUM_FLAGS)
    accept_len, invalid, finished = line[width : width + NUM_FLAGS]
    rest = line[width + NUM_FLAGS :]
    digests = rest[:accept_len] if has_digests else []
    logprobs = [] if num_top is None else _unpack_logprobs(rest[width * has_digests :], accept_len, num_top)
    return Emitted(line[:accept_len], bool(invalid), bool(finished), logprobs, digests)


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


def row_digests(logits: Tensor) -> Tensor:
    """Return a checksum [n, W] int64 of the bits of each row of logits [n, W, V], any float dtype.

    The sum of all bits, each element's times a number that its place hashes to: rows that differ have the same with
    chance 2**-64 or so. A column at a time, as above.
    """
    places = torch.arange(1, logits.shape[-1] + 1, device=logits.device) * -0x61C8864680B583EB
    weights = (places ^ (places >> 32)) * -0x4B47D0C5A1A62B2D | 1
    kind = torch.int32 if logits.dtype == torch.float32 else torch.int16
    return torch.stack([(column.contiguous().view(kind) * weights).sum(1) for column in logits.unbind(1)], 1)


def _unpack_logprobs(bits: list[int], num_tokens: int, num_top: int) -> list[TokenLogprob]:
    rows = np.array(bits, dtype=np.int32).view(np.float32).reshape(-1, 1 + 2 * num_top)[:num_tokens].tolist()
    ends = 1 + num_top
    return [TokenLogprob(row[0], tuple(zip(map(int, row[1:ends]), row[ends:], strict=True))) for row in rows]
