"""The best tokens of each row of logits, in two launches for any vocabulary.

Twins: `specdec.core.functional.tree.top_tokens` and `best_token`, and the `max` of `verify_greedy`.

The vocabulary is split into chunks, one program each; a second kernel merges the chunks of a row. Ties go to the lower
token; for several tokens, candidates are compared by keys that are all different, so none is returned twice.
"""

import torch
import triton
import triton.language as tl

from specdec.backends.triton.launch.relaunch import early, wait_for_others
from specdec.backends.triton.launch.sizes import cdiv, next_power_of_2
from specdec.backends.triton.sampling.keys import index_of, order_key, value_of

_LOWEST = tl.constexpr(-(1 << 63))


@triton.jit(do_not_specialize=["vocab", "num_chunks"])
def _chunk_kernel(logits, keys, maxima, sums, vocab, num_chunks, stride, K: tl.constexpr, BLOCK: tl.constexpr):
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    index = chunk * BLOCK + tl.arange(0, BLOCK)
    is_token = index < vocab
    x = tl.load(logits + row * stride + index, mask=is_token, other=float("-inf")).to(tl.float32)
    top = tl.max(tl.where(x != x, float("-inf"), x))
    # A chunk of -inf has no mass; NaN and +inf make the sum NaN, which `_row_kernel` propagates to the row's values.
    sum_exp = tl.sum(tl.where(x == float("-inf"), 0.0, tl.exp(x - tl.where(top == float("-inf"), 0.0, top))))
    at = row * num_chunks + chunk
    tl.store(maxima + at, top)
    tl.store(sums + at, sum_exp)
    key = tl.where(is_token, order_key(x, index), _LOWEST)
    for k in range(0, K):
        best = tl.max(key)
        tl.store(keys + at * K + k, best)
        key = tl.where(key == best, _LOWEST, key)


@triton.jit(do_not_specialize=["num_chunks"])
def _row_kernel(
    keys,
    maxima,
    sums,
    names,
    values,
    tokens,
    num_chunks,
    K: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    HAS_NAMES: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, BLOCK_C)
    top = tl.load(maxima + row * num_chunks + c, mask=c < num_chunks, other=float("-inf"))
    part = tl.load(sums + row * num_chunks + c, mask=c < num_chunks, other=0.0)
    highest = tl.max(top)
    shift = tl.where(highest == float("-inf"), 0.0, highest)
    total = tl.sum(tl.where(part == 0, 0.0, part * tl.exp(top - shift)))
    log_total = shift + tl.log(total)
    i = tl.arange(0, BLOCK_KEYS)
    key = tl.load(keys + row * num_chunks * K + i, mask=i < num_chunks * K, other=0)
    key = tl.where(i < num_chunks * K, key, _LOWEST)
    for k in range(0, K):
        best = tl.max(key)
        key = tl.where(key == best, _LOWEST, key)
        token = index_of(best)
        if HAS_NAMES:
            token = tl.load(names + token)
        tl.store(values + row * K + k, value_of(best) - log_total)
        tl.store(tokens + row * K + k, token)


@triton.jit(do_not_specialize=["vocab", "num_chunks"])
def _chunk_max_kernel(logits, maxima, places, vocab, num_chunks, stride, BLOCK: tl.constexpr, PDL: tl.constexpr):
    wait_for_others(PDL, True)
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    index = chunk * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(logits + row * stride + index, mask=index < vocab, other=float("-inf")).to(tl.float32)
    best, place = tl.max(tl.where(x != x, float("inf"), x), 0, return_indices=True)
    tl.store(maxima + row * num_chunks + chunk, best)
    tl.store(places + row * num_chunks + chunk, chunk * BLOCK + place)


@triton.jit(do_not_specialize=["num_chunks"])
def _row_max_kernel(
    maxima,
    places,
    names,
    values,
    tokens,
    num_chunks,
    BLOCK_C: tl.constexpr,
    HAS_NAMES: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_others(PDL, False)
    row = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, BLOCK_C)
    is_chunk = c < num_chunks
    best, chunk = tl.max(
        tl.load(maxima + row * num_chunks + c, mask=is_chunk, other=float("-inf")), 0, return_indices=True
    )
    token = tl.load(places + row * num_chunks + chunk).to(tl.int64)
    if HAS_NAMES:
        token = tl.load(names + token)
    tl.store(values + row, best)
    tl.store(tokens + row, token)


def best_token(logits: torch.Tensor, names: torch.Tensor | None) -> torch.Tensor:
    """Return the best token of each row of logits [n, V] (last dim dense), [n] int64, mapped by `names` [V] int64."""
    return row_max(logits, names)[1]


def row_max(logits: torch.Tensor, names: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Return each row's maximum [n] float32, +inf for NaN, and its token [n] int64; logits [n, V] (last dim dense)."""
    assert logits.stride(-1) == 1, "logits need a dense last dim"
    (num_rows, vocab), device = logits.shape, logits.device
    block = min(4096, next_power_of_2(vocab))
    num_chunks = cdiv(vocab, block)
    maxima = torch.empty(num_rows, num_chunks, dtype=torch.float32, device=device)
    places = torch.empty(num_rows, num_chunks, dtype=torch.int32, device=device)
    values = torch.empty(num_rows, dtype=torch.float32, device=device)
    tokens = torch.empty(num_rows, dtype=torch.int64, device=device)
    _chunk_max_kernel[(num_rows, num_chunks)](
        logits, maxima, places, vocab, num_chunks, logits.stride(0), BLOCK=block, **early()
    )
    _row_max_kernel[(num_rows,)](
        maxima,
        places,
        tokens if names is None else names,
        values,
        tokens,
        num_chunks,
        BLOCK_C=next_power_of_2(num_chunks),
        HAS_NAMES=names is not None,
        num_warps=1,
        **early(),
    )
    return values, tokens


def top_tokens(logits: torch.Tensor, topk: int, names: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the top log-probabilities [n, topk] float32 and tokens [n, topk] int64, best first.

    logits [n, V] (last dim dense); names [V] int64: token id of each index; None: the index itself.
    """
    assert logits.stride(-1) == 1, "logits need a dense last dim"
    (num_rows, vocab), device = logits.shape, logits.device
    assert topk <= vocab, f"topk={topk} of {vocab} tokens"
    block = min(4096, max(next_power_of_2(vocab), next_power_of_2(topk)))
    num_chunks = cdiv(vocab, block)
    keys = torch.empty(num_rows, num_chunks, topk, dtype=torch.int64, device=device)
    maxima = torch.empty(num_rows, num_chunks, dtype=torch.float32, device=device)
    sums = torch.empty_like(maxima)
    values = torch.empty(num_rows, topk, dtype=torch.float32, device=device)
    tokens = torch.empty(num_rows, topk, dtype=torch.int64, device=device)
    _chunk_kernel[(num_rows, num_chunks)](
        logits, keys, maxima, sums, vocab, num_chunks, logits.stride(0), K=topk, BLOCK=block, num_warps=8
    )
    _row_kernel[(num_rows,)](
        keys,
        maxima,
        sums,
        tokens if names is None else names,
        values,
        tokens,
        num_chunks,
        K=topk,
        BLOCK_C=next_power_of_2(num_chunks),
        BLOCK_KEYS=next_power_of_2(num_chunks * topk),
        HAS_NAMES=names is not None,
    )
    return values, tokens
