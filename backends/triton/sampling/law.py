"""The law that tokens are sampled from. Twin: `specdec.core.functional.sampling.process_logits`.

Each row of logits is split over programs, and every pass over the vocabulary is a launch: the best token, the passes of
`selection.py` if any request has filters, the mass of the kept tokens, and the law. Masses are integers, so that a law
does not depend on the splits, which depend on the number of rows. Where the mass at the edge of top-p equals 1 - top_p
up to rounding, this and the twin may differ by one token.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from specdec.backends.triton.launch.sizes import cdiv, next_power_of_2
from specdec.backends.triton.sampling.keys import index_of, order_key, value_of
from specdec.backends.triton.sampling.selection import (
    FIELDS,
    INPUTS,
    ONE,
    SHIFTS,
    SIZES,
    key_of,
    load_best,
    load_logits,
    pick,
    select,
    share_of,
    share_of_key,
)

_BLOCK = 2048  # tokens that a program loads at once
_MAX_SPLITS = 64  # of a row
_PROGRAMS = 512  # about as many as an H100 or H200 runs at once


@triton.jit(do_not_specialize=["num_splits", "span", "stride"], do_not_specialize_on_alignment=["logits"])
def _best_kernel(logits, maxima, num_splits, span, stride, V: tl.constexpr, BLOCK: tl.constexpr):
    row, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    highest = tl.full([BLOCK], -(1 << 63), tl.int64)
    for base in range(split * span, tl.minimum(split * span + span, V), BLOCK):
        v = base + tl.arange(0, BLOCK)
        x = load_logits(logits + row * stride, v, V)
        highest = tl.maximum(highest, order_key(tl.where(x != x, float("inf"), x), v))
    tl.store(maxima + row * num_splits + split, tl.max(highest))


@triton.jit(do_not_specialize=SIZES, do_not_specialize_on_alignment=INPUTS)
def _mass_kernel(
    logits,
    maxima,
    temperatures,
    top_ps,
    min_ps,
    states,
    bins,
    edges,
    masses,
    num_positions,
    num_splits,
    span,
    stride,
    V: tl.constexpr,
    BLOCK: tl.constexpr,
    SPLITS: tl.constexpr,
    SHIFT: tl.constexpr,
    HAS_FILTERS: tl.constexpr,
):
    """Store each split's mass of kept tokens, as if all tokens at the edge of top-p were kept, and the number of those.

    edges, by row: the smallest kept key, the key at the edge, how many tokens with it are dropped, their mass.
    """
    row, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    request = row // num_positions
    best = value_of(load_best(maxima, row, num_splits, SPLITS))
    temperature = tl.load(temperatures + request).to(tl.float32)
    if (temperature != 0) & (tl.abs(best) != float("inf")):
        scale = 1.0 / temperature
        least, edge = tl.zeros([], tl.int64), tl.full([], -2, tl.int64)
        min_p = 0.0
        if HAS_FILTERS:
            min_p = tl.load(min_ps + request).to(tl.float32)
            state = states + row * FIELDS
            least = tl.load(state + 4)
            if tl.load(state + 3) != 0:
                least = tl.maximum(least, tl.load(state))
            else:
                rest = (1.0 - tl.load(top_ps + request)).to(tl.float32).to(tl.float64)
                highest = key_of(best, SHIFT)
                edge, _, _, excess, inside = pick(state, bins, row, num_splits, highest, rest, 0, SPLITS, True)
                share = share_of_key(edge, best, scale, SHIFT)
                each = tl.maximum((share * ONE).to(tl.int64), 1)
                num_out = tl.minimum(excess // each, inside // each - (edge == highest).to(tl.int64))
                num_out = tl.maximum(num_out, 0)
                least = tl.maximum(least, edge)
                if split == 0:
                    tl.store(edges + row * 4 + 2, num_out)
                    tl.store(edges + row * 4 + 3, tl.where(share < min_p, 0, num_out * each))
            if split == 0:
                tl.store(edges + row * 4, least)
                tl.store(edges + row * 4 + 1, edge)
        mass, num_edge = tl.zeros([BLOCK], tl.int64), tl.zeros([BLOCK], tl.int32)
        for base in range(split * span, tl.minimum(split * span + span, V), BLOCK):
            v = base + tl.arange(0, BLOCK)
            x = load_logits(logits + row * stride, v, V)
            share = share_of(x, best, scale)
            if HAS_FILTERS:
                key = tl.where(v < V, key_of(x, SHIFT), -1)
                share = tl.where((key < least) | (share < min_p), 0.0, share)
                num_edge += (key == edge).to(tl.int32)
            mass += (share * ONE).to(tl.int64)
        at = masses + (row * num_splits + split) * 2
        tl.store(at, tl.sum(mass))
        tl.store(at + 1, tl.sum(num_edge).to(tl.int64))


@triton.jit(do_not_specialize=SIZES, do_not_specialize_on_alignment=INPUTS)
def _law_kernel(
    logits,
    maxima,
    temperatures,
    min_ps,
    edges,
    masses,
    out,
    num_positions,
    num_splits,
    span,
    stride,
    V: tl.constexpr,
    BLOCK: tl.constexpr,
    SPLITS: tl.constexpr,
    SHIFT: tl.constexpr,
    HAS_FILTERS: tl.constexpr,
):
    row, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    request = row // num_positions
    best_key = load_best(maxima, row, num_splits, SPLITS)
    best, temperature = value_of(best_key), tl.load(temperatures + request).to(tl.float32)
    own, lanes = out + row * V, tl.arange(0, BLOCK)
    start = split * span
    end = tl.minimum(start + span, V)
    if tl.abs(best) == float("inf"):  # the row has no law: it has NaN or +inf, or only -inf
        for base in range(start, end, BLOCK):
            tl.store(own + base + lanes, tl.full([BLOCK], float("nan"), tl.float32), mask=base + lanes < V)
    elif temperature == 0:
        token = index_of(best_key)
        for base in range(start, end, BLOCK):
            tl.store(own + base + lanes, (base + lanes == token).to(tl.float32), mask=base + lanes < V)
    else:
        s = tl.arange(0, SPLITS)
        parts = masses + (row * num_splits + s) * 2
        mass = tl.sum(tl.load(parts, mask=s < num_splits, other=0))
        least, edge, num_out = tl.zeros([], tl.int64), tl.zeros([], tl.int64), tl.zeros([], tl.int64)
        min_p = 0.0
        if HAS_FILTERS:
            min_p = tl.load(min_ps + request).to(tl.float32)
            least, edge = tl.load(edges + row * 4), tl.load(edges + row * 4 + 1)
            if edge >= 0:
                num_out = tl.load(edges + row * 4 + 2)
                mass -= tl.load(edges + row * 4 + 3)
                num_out -= tl.sum(tl.load(parts + 1, mask=s < split, other=0))
        factor = (1.0 / (mass.to(tl.float64) / ONE)).to(tl.float32)
        for base in range(start, end, BLOCK):
            v = base + lanes
            x = load_logits(logits + row * stride, v, V)
            share = share_of(x, best, 1.0 / temperature)
            if HAS_FILTERS:
                key = key_of(x, SHIFT)
                is_out = (key < least) | (share < min_p)
                if num_out > 0:  # of the tokens at the edge, the first ones are dropped
                    is_edge = (key == edge) & (v < V)
                    num_before = tl.cumsum(is_edge.to(tl.int32)) - 1
                    is_out = is_out | (is_edge & (num_before < num_out))
                    num_out -= tl.sum(is_edge.to(tl.int32)).to(tl.int64)
                share = tl.where(is_out, 0.0, share)
            tl.store(own + v, share * factor, mask=v < V)


def law(logits: torch.Tensor, sampling: Any) -> torch.Tensor:
    """Return the law of each position, [bs, n, V] float32; logits [bs, n, V], float, last dim dense.

    sampling: a `specdec.core.functional.sampling.SamplingBatch` of bs requests.
    """
    (bs, n, vocab), device = logits.shape, logits.device
    flat, num_rows = logits.reshape(bs * n, vocab), bs * n
    assert flat.stride(1) == 1, "logits need a dense last dim"
    block = min(_BLOCK, next_power_of_2(vocab))
    num_warps = max(1, block // 256)
    num_splits, span = _splits(num_rows, vocab, block)
    slots = next_power_of_2(min(_MAX_SPLITS, cdiv(vocab, block)))
    grid, sizes = (num_rows, num_splits), (num_splits, span, flat.stride(0))
    shape = {"V": vocab, "BLOCK": block, "num_warps": num_warps}
    wide = {**shape, "SPLITS": slots, "SHIFT": SHIFTS[logits.dtype]}

    out = torch.empty(bs, n, vocab, dtype=torch.float32, device=device)
    maxima = torch.empty(num_rows, num_splits, dtype=torch.int64, device=device)
    masses = torch.empty(num_rows, num_splits, 2, dtype=torch.int64, device=device)
    edges = torch.empty(num_rows, 4, dtype=torch.int64, device=device)
    _best_kernel[grid](flat, maxima, *sizes, **shape)
    states = bins = masses
    if sampling.has_filters:
        lanes = min(block, 32 * num_warps)
        states, bins = select(flat, maxima, sampling, n, {**wide, "LANES": lanes}, span)
    filters = {"HAS_FILTERS": sampling.has_filters}
    temperature, top_p, min_p = sampling["temperature"], sampling["top_p"], sampling["min_p"]
    inputs = (flat, maxima, temperature, top_p, min_p, states, bins)
    _mass_kernel[grid](*inputs, edges, masses, n, *sizes, **wide, **filters)
    _law_kernel[grid](flat, maxima, temperature, min_p, edges, masses, out, n, *sizes, **wide, **filters)
    return out


def _splits(num_rows: int, vocab: int, block: int) -> tuple[int, int]:
    """Return the programs per row and the tokens of each, so that all rows together have about _PROGRAMS programs."""
    num = min(_MAX_SPLITS, cdiv(vocab, block), max(1, _PROGRAMS // max(1, num_rows)))
    span = block * cdiv(vocab, block * num)
    return cdiv(vocab, span), span
