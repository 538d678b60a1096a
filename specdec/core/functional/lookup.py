"""Prompt lookup: where the last tokens of a text stand earlier in it, and what followed them there."""

import torch
from torch import Tensor


def look_up(history: Tensor, rows: Tensor, ends: Tensor, num_tokens: int, max_ngram: int) -> Tensor:
    """Return what followed the longest earlier match of the last tokens: [bs, num_tokens] int64.

    history [num_rows, width] int32: tokens by position; rows [bs] int64; ends [bs] int64: the last token's position.
    Of matches of up to `max_ngram` tokens the longest counts, of equal ones the latest. A match so near the end that
    fewer tokens followed it is a period, and goes on. Where nothing matches, the last token is repeated.
    """
    tokens, last = history[rows].long(), ends.unsqueeze(1)
    at = torch.arange(tokens.shape[1], device=history.device)
    matches = at < last
    length = torch.zeros_like(tokens)
    for n in range(max_ngram):
        before = tokens.roll(n, 1)  # [i] is the token n places before i; what comes around is masked
        suffix = tokens.gather(1, (last - n).clamp(min=0))
        matches = matches & (before == suffix) & (at >= n) & (last >= n)
        length = length + matches
    best = (length * tokens.shape[1] + at).masked_fill(length == 0, -1).amax(1, keepdim=True)
    place = torch.where(best < 0, last - 1, best % tokens.shape[1])
    steps = torch.arange(num_tokens, device=history.device) % (last - place)
    followed = tokens.gather(1, (place + 1 + steps).clamp(min=0))
    return torch.where(best < 0, tokens.gather(1, last), followed)
