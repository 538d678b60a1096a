"""Prompt lookup in one launch, one program a request. Twin: `specdec.core.functional.lookup.look_up`."""

import torch
import triton
import triton.language as tl


@triton.jit(do_not_specialize=["width"], do_not_specialize_on_alignment=["rows", "ends"])
def _lookup_kernel(
    history,
    rows,
    ends,
    out,
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


def look_up(
    history: torch.Tensor, rows: torch.Tensor, ends: torch.Tensor, num_tokens: int, max_ngram: int
) -> torch.Tensor:
    """See `specdec.core.functional.lookup.look_up`."""
    out = torch.empty(rows.shape[0], num_tokens, dtype=torch.int64, device=history.device)
    _lookup_kernel[(rows.shape[0],)](
        history,
        rows,
        ends,
        out,
        history.shape[1],
        NUM_TOKENS=num_tokens,
        MAX_NGRAM=max_ngram,
        BLOCK=1024,
        BLOCK_TOKENS=triton.next_power_of_2(num_tokens),
    )
    return out
