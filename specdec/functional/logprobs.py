"""Log-probabilities of emitted tokens, under the target's own logits: before temperature, filters and penalties."""

import torch
from torch import Tensor


def token_logprobs(logits: Tensor, tokens: Tensor, num_top: int) -> Tensor:
    """Return [n, W, 1 + 2*num_top] float32: the token's log-probability, the best tokens' ids, their log-probabilities.

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
