"""The law that tokens are sampled from, a program a row of logits. Twin: `specdec.functional.sampling.process_logits`.

No sort: the k-th best logit and the edge of top-p are found bit by bit, each pass over the row fixing two bits of an
integer that orders as logits do (radix selection). Masses are integers, so that their sums do not depend on the order
of addition. Where the mass at the edge equals 1 - top_p up to rounding, this and the twin may part by one token.
"""

from typing import Any

import torch
import triton
import triton.language as tl

_ONE = tl.constexpr(float(1 << 40))  # the weight of the best token; 2**22 of them fit into int64
# Low bits that an order key need not have, by the bytes of a logit: bf16 and fp16 keep theirs as fp32.
_SHIFTS = {torch.float32: 0, torch.bfloat16: 16, torch.float16: 12}


@triton.jit
def _key(x, SHIFT: tl.constexpr):
    """An int64 from 0 on that orders fp32 values as they are; -0.0 equals 0.0."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    ordered = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    return (ordered.to(tl.int64) + 2147483648) >> SHIFT


@triton.jit
def _load(row, v, V: tl.constexpr):
    return tl.load(row + v, mask=v < V, other=float("-inf")).to(tl.float32)


@triton.jit
def _share(x, best, scale):
    """The weight of logits relative to that of the best one, 0..1."""
    return tl.exp((x - best) * scale)


@triton.jit
def _sums(row, best, scale, a, b, c, V: tl.constexpr, BLOCK: tl.constexpr, SHIFT: tl.constexpr, IS_MASS: tl.constexpr):
    """Sums over the tokens whose key is at least a, b and c: of their integer weights, or how many there are."""
    lanes = tl.arange(0, BLOCK)
    in_a, in_b, in_c = tl.zeros([BLOCK], tl.int64), tl.zeros([BLOCK], tl.int64), tl.zeros([BLOCK], tl.int64)
    for base in range(0, V, BLOCK):
        x = _load(row, base + lanes, V)
        key = tl.where(base + lanes < V, _key(x, SHIFT), -1)
        weight = tl.full([BLOCK], 1, tl.int64)
        if IS_MASS:
            weight = (_share(x, best, scale) * _ONE).to(tl.int64)
        in_a += tl.where(key >= a, weight, 0)
        in_b += tl.where(key >= b, weight, 0)
        in_c += tl.where(key >= c, weight, 0)
    return tl.sum(in_a), tl.sum(in_b), tl.sum(in_c)


@triton.jit
def _kth_best(row, k, V: tl.constexpr, BLOCK: tl.constexpr, SHIFT: tl.constexpr):
    """The largest key that at least k tokens reach."""
    found = tl.zeros([], tl.int64)
    for step in range(0, (32 - SHIFT) // 2):
        unit = tl.full([], 1, tl.int64) << (30 - SHIFT - 2 * step)
        a, b, c = found + unit, found + 2 * unit, found + 3 * unit
        in_a, in_b, in_c = _sums(row, 0.0, 1.0, a, b, c, V, BLOCK, SHIFT, False)
        found += unit * ((in_a >= k).to(tl.int64) + (in_b >= k).to(tl.int64) + (in_c >= k).to(tl.int64))
    return found


@triton.jit
def _edge(row, best, scale, least, total, limit, V: tl.constexpr, BLOCK: tl.constexpr, SHIFT: tl.constexpr):
    """The largest key below which tokens have a mass of at most `limit`, of those with a key of `least` or more, which
    have `total`."""
    found = tl.zeros([], tl.int64)
    for step in range(0, (32 - SHIFT) // 2):
        unit = tl.full([], 1, tl.int64) << (30 - SHIFT - 2 * step)
        a = tl.maximum(found + unit, least)
        b, c = tl.maximum(found + 2 * unit, least), tl.maximum(found + 3 * unit, least)
        in_a, in_b, in_c = _sums(row, best, scale, a, b, c, V, BLOCK, SHIFT, True)
        is_a, is_b, is_c = total - in_a <= limit, total - in_b <= limit, total - in_c <= limit
        found += unit * (is_a.to(tl.int64) + is_b.to(tl.int64) + is_c.to(tl.int64))
    return found


@triton.jit(do_not_specialize=["num_positions", "stride"])
def _law_kernel(
    logits,
    temperatures,
    top_ks,
    top_ps,
    min_ps,
    out,
    num_positions,
    stride,
    V: tl.constexpr,
    BLOCK: tl.constexpr,
    SHIFT: tl.constexpr,
    HAS_FILTERS: tl.constexpr,
):
    at = tl.program_id(0).to(tl.int64)
    request = at // num_positions
    row, own = logits + at * stride, out + at * V
    lanes = tl.arange(0, BLOCK)
    highest = tl.full([BLOCK], float("-inf"), tl.float32)
    for base in range(0, V, BLOCK):
        x = _load(row, base + lanes, V)
        highest = tl.maximum(highest, tl.where(x != x, float("inf"), x))
    best = tl.max(highest)
    temperature = tl.load(temperatures + request)
    if tl.abs(best) == float("inf"):  # the row has no law: NaN or +inf is in it, or nothing else than -inf
        for base in range(0, V, BLOCK):
            tl.store(own + base + lanes, tl.full([BLOCK], float("nan"), tl.float32), mask=base + lanes < V)
    elif temperature == 0:
        token = tl.full([BLOCK], V, tl.int32)
        for base in range(0, V, BLOCK):
            v = base + lanes
            token = tl.minimum(token, tl.where(_load(row, v, V) == best, v, V))
        first = tl.min(token)
        for base in range(0, V, BLOCK):
            v = base + lanes
            tl.store(own + v, (v == first).to(tl.float32), mask=v < V)
    else:
        scale = 1.0 / temperature
        least = tl.zeros([], tl.int64)  # key of the worst token that is kept
        edge = tl.zeros([], tl.int64)  # key at the edge of top-p; of the tokens that have it, `num_out` are dropped
        num_out = tl.zeros([], tl.int64)
        min_p = 0.0
        if HAS_FILTERS:
            k = tl.load(top_ks + request)
            if (k > 0) & (k < V):
                least = _kth_best(row, k, V, BLOCK, SHIFT)
            rest = (1.0 - tl.load(top_ps + request)).to(tl.float32).to(tl.float64)
            if rest > 0:
                total, _, _ = _sums(row, best, scale, least, least, least, V, BLOCK, SHIFT, True)
                limit = (total.to(tl.float64) * rest).to(tl.int64)
                edge = _edge(row, best, scale, least, total, limit, V, BLOCK, SHIFT)
                edge = tl.minimum(edge, tl.max(_key(tl.full([BLOCK], best, tl.float32), SHIFT)))
                in_edge, over, _ = _sums(row, best, scale, edge, edge + 1, edge + 1, V, BLOCK, SHIFT, True)
                num_in, num_over, _ = _sums(row, best, scale, edge, edge + 1, edge + 1, V, BLOCK, SHIFT, False)
                num_equal = num_in - num_over
                each = (in_edge - over) // tl.maximum(num_equal, 1)
                num_out = (limit - (total - in_edge)) // tl.maximum(each, 1)
                num_out = tl.minimum(tl.maximum(num_out, 0), num_equal - (num_over == 0).to(tl.int64))
            min_p = tl.load(min_ps + request)
        mass = tl.zeros([BLOCK], tl.float64)
        num_seen = tl.zeros([], tl.int64)
        for base in range(0, V, BLOCK):
            x = _load(row, base + lanes, V)
            share, num_seen = _kept(
                x, base + lanes, best, scale, least, edge, num_out, num_seen, min_p, V, SHIFT, HAS_FILTERS
            )
            mass += share.to(tl.float64)
        norm = tl.sum(mass)
        num_seen = tl.zeros([], tl.int64)
        for base in range(0, V, BLOCK):
            v = base + lanes
            x = _load(row, v, V)
            share, num_seen = _kept(x, v, best, scale, least, edge, num_out, num_seen, min_p, V, SHIFT, HAS_FILTERS)
            tl.store(own + v, (share / norm).to(tl.float32), mask=v < V)


@triton.jit
def _kept(
    x,
    v,
    best,
    scale,
    least,
    edge,
    num_out,
    num_seen,
    min_p,
    V: tl.constexpr,
    SHIFT: tl.constexpr,
    FILTERS: tl.constexpr,
):
    """Weights of the tokens v that are kept, 0 of the others, and how many at the edge have been seen so far."""
    share = _share(x, best, scale)
    if FILTERS:
        key = tl.where(v < V, _key(x, SHIFT), -1)
        is_edge = (key == edge) & (num_out > 0)
        rank = num_seen + tl.cumsum(is_edge.to(tl.int32)).to(tl.int64) - 1
        is_out = (key < least) | (key < edge) | (is_edge & (rank < num_out)) | (share < min_p)
        share = tl.where(is_out, 0.0, share)
        num_seen += tl.sum(is_edge.to(tl.int32)).to(tl.int64)
    return share, num_seen


def law(logits: torch.Tensor, sampling: Any) -> torch.Tensor:
    """Return the law of each position, [bs, n, V] float32; logits [bs, n, V], float, last dim dense.

    sampling: a `specdec.functional.sampling.SamplingBatch` of bs requests.
    """
    (bs, n, vocab), device = logits.shape, logits.device
    flat = logits.reshape(bs * n, vocab)
    assert flat.stride(1) == 1, "logits need a dense last dim"
    out = torch.empty(bs, n, vocab, dtype=torch.float32, device=device)
    block = min(4096, triton.next_power_of_2(vocab))
    _law_kernel[(bs * n,)](
        flat,
        sampling.temperature.contiguous(),
        sampling.top_k.contiguous(),
        sampling.top_p.contiguous(),
        sampling.min_p.contiguous(),
        out,
        n,
        flat.stride(0),
        V=vocab,
        BLOCK=block,
        SHIFT=_SHIFTS[logits.dtype],
        HAS_FILTERS=sampling.has_filters,
        num_warps=max(1, min(16, block // 128)),
    )
    return out
