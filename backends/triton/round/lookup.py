"""Prompt lookup, and merging its tokens into a tree, one program per request. Twins: `look_up` and `merge` in
`specdec.core.functional.lookup`."""

import torch
import triton
import triton.language as tl

from specdec.backends.triton.launch.sizes import next_power_of_2


@triton.jit(do_not_specialize=["width"], do_not_specialize_on_alignment=["rows", "ends"])
def _lookup_kernel(
    history,
    rows,
    ends,
    out,
    lengths,
    width,
    NUM_TOKENS: tl.constexpr,
    MAX_NGRAM: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
):
    request = tl.program_id(0).to(tl.int64)
    text = history + tl.load(rows + request) * width
    last = tl.load(ends + request)
    best = tl.full([], -1, tl.int64)  # length of the match, then its place
    for base in range(0, last, BLOCK):
        at = base + tl.arange(0, BLOCK).to(tl.int64)
        matches = at < last
        length = tl.zeros([BLOCK], tl.int64)
        for n in tl.static_range(MAX_NGRAM):
            suffix = tl.load(text + tl.maximum(last - n, 0))
            token = tl.load(text + at - n, mask=matches & (at >= n), other=-1)
            matches = matches & (token == suffix) & (at >= n) & (last >= n)
            length += matches.to(tl.int64)
        best = tl.maximum(best, tl.max(tl.where(length > 0, length * width + at, -1)))
    place = tl.where(best < 0, last - 1, best % width)
    i = tl.arange(0, BLOCK_TOKENS)
    source = tl.where(best < 0, last, place + 1 + i % (last - place))
    token = tl.load(text + source, mask=i < NUM_TOKENS, other=0)
    tl.store(out + request * NUM_TOKENS + i, token.to(tl.int64), mask=i < NUM_TOKENS)
    tl.store(lengths + request, tl.where(best < 0, 0, best // width))


def look_up(
    history: torch.Tensor, rows: torch.Tensor, ends: torch.Tensor, num_tokens: int, max_ngram: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `specdec.core.functional.lookup.look_up`."""
    out = torch.empty(rows.shape[0], num_tokens, dtype=torch.int64, device=history.device)
    lengths = torch.empty(rows.shape[0], dtype=torch.int64, device=history.device)
    _lookup_kernel[(rows.shape[0],)](
        history,
        rows,
        ends,
        out,
        lengths,
        history.shape[1],
        NUM_TOKENS=num_tokens,
        MAX_NGRAM=max_ngram,
        BLOCK=1024,
        BLOCK_TOKENS=next_power_of_2(num_tokens),
    )
    return out, lengths


@triton.jit
def _merge_kernel(
    tokens,
    scores,
    parents,
    found,
    lengths,
    out_tokens,
    out_scores,
    out_parents,
    N: tl.constexpr,
    M: tl.constexpr,
    BLOCK: tl.constexpr,
):
    request = tl.program_id(0).to(tl.int64)
    j = tl.arange(0, BLOCK)
    at, out = request * N + j, request * (N + M)
    token = tl.load(tokens + at, mask=j < N, other=-1)
    parent = tl.load(parents + at, mask=j < N, other=-2)
    score = tl.load(scores + at, mask=j < N, other=0.0)
    length = tl.load(lengths + request)
    law, above, current = 0.0, float("inf"), -1
    for step in tl.static_range(M):
        matched = (length + step).to(tl.float32)
        law += tl.log((matched + 0.5) / (matched + 3.5))
        least = tl.minimum(above, tl.where(length > 0, law, float("-inf")))
        wanted = tl.load(found + request * M + step)
        place = tl.min(tl.where((parent == current) & (token == wanted), j, BLOCK))
        is_there = place < BLOCK
        score = tl.where(j == place, tl.maximum(score, least), score)
        own = tl.max(tl.where(j == place, score, float("-inf")))
        tl.store(out_tokens + out + N + step, wanted)
        tl.store(out_scores + out + N + step, tl.where(is_there, float("-inf"), least))
        tl.store(out_parents + out + N + step, tl.where(is_there, -1, current).to(tl.int64))
        above = tl.where(is_there, own, least)
        current = tl.where(is_there, place, N + step)
    tl.store(out_tokens + out + j, token, mask=j < N)
    tl.store(out_scores + out + j, score, mask=j < N)
    tl.store(out_parents + out + j, parent, mask=j < N)


def merge(
    tokens: torch.Tensor, scores: torch.Tensor, parents: torch.Tensor, found: torch.Tensor, lengths: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """See `specdec.core.functional.lookup.merge`."""
    (bs, num), more = tokens.shape, found.shape[1]
    made = [torch.empty(bs, num + more, dtype=t.dtype, device=t.device) for t in (tokens, scores, parents)]
    inputs = (t.contiguous() for t in (tokens, scores, parents, found, lengths))
    block = next_power_of_2(num)
    num_warps = 8 if block > 1024 else 4 if block > 512 else 1  # one warp needs no barrier in its reductions
    _merge_kernel[(bs,)](*inputs, *made, N=num, M=more, BLOCK=block, num_warps=num_warps)
    return made[0], made[1], made[2]
