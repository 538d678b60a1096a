"""Prompt lookup: finds an earlier occurrence of a text's last tokens, and the tokens that followed it."""

import math

import torch
from torch import Tensor


def look_up(history: Tensor, rows: Tensor, ends: Tensor, num_tokens: int, max_ngram: int) -> tuple[Tensor, Tensor]:
    """Return the tokens after the longest earlier match of the last tokens, [bs, num_tokens] int64, and the length of
    the match, [bs] int64, 0 if there is none.

    history [num_rows, width] int32: tokens by position; rows [bs] int64; ends [bs] int64: the last token's position.
    Of matches of up to `max_ngram` tokens the longest counts, of equally long ones the latest. If fewer than num_tokens
    tokens followed a match, they are repeated as a period. Without a match, the last token is repeated.
    """
    tokens, last = history[rows].long(), ends.unsqueeze(1)
    at = torch.arange(tokens.shape[1], device=history.device)
    matches = at < last
    length = torch.zeros_like(tokens)
    for n in range(max_ngram):
        before = tokens.roll(n, 1)  # [i] is the token n places before i; wrapped ones are masked
        suffix = tokens.gather(1, (last - n).clamp(min=0))
        matches = matches & (before == suffix) & (at >= n) & (last >= n)
        length = length + matches
    best = (length * tokens.shape[1] + at).masked_fill(length == 0, -1).amax(1, keepdim=True)
    place = torch.where(best < 0, last - 1, best % tokens.shape[1])
    steps = torch.arange(num_tokens, device=history.device) % (last - place)
    followed = tokens.gather(1, (place + 1 + steps).clamp(min=0))
    lengths = torch.where(best < 0, 0, best // tokens.shape[1]).squeeze(1)
    return torch.where(best < 0, tokens.gather(1, last), followed), lengths


def merge(
    tokens: Tensor, scores: Tensor, parents: Tensor, found: Tensor, lengths: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Add the tokens of `look_up` to the candidates of a tree; return tokens, scores, parents [bs, N + M], as
    `tree.build` takes them. The m-th added token has depth m.

    tokens, parents [bs, N] int64 and scores [bs, N] float32: see `tree.build`. found [bs, M] int64, lengths [bs] int64.
    The path of `found` is followed from the root. A token that is a candidate there has at least the score of a match
    of its length; one that is not is added. After a match of n tokens (n + 1/2) / (n + 7/2) of next tokens are right:
    fitted to the answers of GSM8K and to code, n = 1 to 16. It is no statistic of the engine's: a sampled text must not
    depend on the texts beside it.
    """
    num, steps = tokens.shape[1], torch.arange(found.shape[1], device=tokens.device)
    matched = lengths.unsqueeze(1) + steps
    law = ((matched + 0.5) / (matched + 3.5)).float().log().cumsum(1)
    law = law.masked_fill(lengths.unsqueeze(1) == 0, -math.inf)
    names, current = torch.arange(num, device=tokens.device), torch.full_like(lengths, -1)
    above = torch.full_like(law[:, 0], math.inf)
    added: list[tuple[Tensor, Tensor, Tensor]] = []
    for step in range(found.shape[1]):
        token, least = found[:, step], torch.minimum(above, law[:, step])
        is_it = (parents == current.unsqueeze(1)) & (tokens == token.unsqueeze(1))
        place, is_there = torch.where(is_it, names, num).amin(1), is_it.any(1)
        scores = torch.where(names == place.unsqueeze(1), scores.maximum(least.unsqueeze(1)), scores)
        own = torch.where(is_there, -math.inf, least)  # an unused place: never among the best
        added.append((token, own, torch.where(is_there, -1, current)))
        above = torch.where(is_there, scores.gather(1, place.clamp(max=num - 1).unsqueeze(1)).squeeze(1), least)
        current = torch.where(is_there, place, num + step)
    more = (torch.stack(column, 1) for column in zip(*added, strict=True))
    return tuple(torch.cat(pair, 1) for pair in zip((tokens, scores, parents), more, strict=True))  # type: ignore
