"""Random numbers and sampling on the device. Twins: `specdec.functional.sampling.uniform` and `sample`.

One program samples for one request: one pass over the vocabulary sums its blocks, then the block where the CDF crosses
u is read again.
Everything is float64; loops are bounded by the vocabulary and by the nodes of a tree.
"""

import torch
import triton
import triton.language as tl

# splitmix64 (Steele, Lea, Flood 2014), its unsigned constants written as the int64 of the same bits.
_GAMMA = tl.constexpr(0x9E3779B97F4A7C15 - (1 << 64))
_MIX_A = tl.constexpr(0xBF58476D1CE4E5B9 - (1 << 64))
_MIX_B = tl.constexpr(0x94D049BB133111EB - (1 << 64))


@triton.jit
def _shift_right(x, BITS: tl.constexpr):
    """Logical right shift: `>>` on int64 copies the sign bit in, the mask clears it again."""
    return (x >> BITS) & ((1 << (64 - BITS)) - 1)


@triton.jit
def _mix(x):
    """splitmix64's finaliser; products wrap."""
    x = (x ^ _shift_right(x, 30)) * _MIX_A
    x = (x ^ _shift_right(x, 27)) * _MIX_B
    return x ^ _shift_right(x, 31)


@triton.jit(do_not_specialize=["first_stream"])
def _uniform_kernel(seeds, counters, out, first_stream, NUM: tl.constexpr, BLOCK: tl.constexpr):
    request = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    none = tl.zeros([BLOCK], tl.int64)
    state = _mix(none + tl.load(seeds + request) + _GAMMA)
    state = _mix(state + (none + tl.load(counters + request) + 1) * _GAMMA)
    state = _mix(state + (i + first_stream + 1).to(tl.int64) * _GAMMA)
    tl.store(out + request * NUM + i, _shift_right(state, 11).to(tl.float64) * (1.0 / 9007199254740992.0), mask=i < NUM)


@triton.jit
def _weights(law, law_scale, draft, draft_scale, excluded, num_excluded, v, V: tl.constexpr, HAS_DRAFT: tl.constexpr):
    """Return the law at tokens v and its residual: without the excluded tokens, or (law - draft)+. NaN counts as 0."""
    p = tl.load(law + v, mask=v < V, other=0.0).to(tl.float64) * law_scale
    p = tl.where(p > 0, p, 0.0)
    residual = p
    if HAS_DRAFT:
        q = tl.load(draft + v, mask=v < V, other=0.0).to(tl.float64) * draft_scale
        residual = tl.where(q > 0, tl.where(p > q, p - q, 0.0), p)
    for i in range(0, num_excluded):
        residual = tl.where(v == tl.load(excluded + i), 0.0, residual)
    return p, residual


@triton.jit
def draw(
    law,
    law_scale,
    draft,
    draft_scale,
    excluded,
    num_excluded,
    u,
    V: tl.constexpr,
    BLOCK: tl.constexpr,
    SLOTS: tl.constexpr,
    HAS_DRAFT: tl.constexpr,
):
    """Sample a token from the residual of one law [V], or from the law if the residual has no mass; 0 if neither has.

    law_scale, draft_scale: factors that make both sum to one; draft_scale 0: nothing was drafted. u: float64 in [0, 1].
    SLOTS: a power of two, at least the number of blocks of BLOCK tokens.
    """
    NUM_BLOCKS: tl.constexpr = (V + BLOCK - 1) // BLOCK
    blocks, lanes = tl.arange(0, SLOTS), tl.arange(0, BLOCK)
    law_sums = tl.zeros([SLOTS], tl.float64)  # mass by block of the vocabulary
    sums = tl.zeros([SLOTS], tl.float64)
    law_last = 0
    last = 0
    for block in range(0, NUM_BLOCKS):
        v = block * BLOCK + lanes
        p, residual = _weights(law, law_scale, draft, draft_scale, excluded, num_excluded, v, V, HAS_DRAFT)
        law_sums = tl.where(blocks == block, tl.sum(p), law_sums)
        sums = tl.where(blocks == block, tl.sum(residual), sums)
        law_last = tl.maximum(law_last, tl.max(tl.where(p > 0, v, 0)))
        last = tl.maximum(last, tl.max(tl.where(residual > 0, v, 0)))
    has_mass = tl.sum(sums) > 0
    sums = tl.where(has_mass, sums, law_sums)
    ends = tl.cumsum(sums)
    goal = u * tl.sum(sums)
    block = tl.min(tl.where((sums > 0) & (ends > goal), blocks, NUM_BLOCKS - 1))  # where the CDF crosses u
    before = tl.sum(tl.where(blocks < block, sums, 0.0))
    v = block * BLOCK + lanes
    p, residual = _weights(law, law_scale, draft, draft_scale, excluded, num_excluded, v, V, HAS_DRAFT)
    weight = tl.where(has_mass, residual, p)
    is_reached = (weight > 0) & (before + tl.cumsum(weight) > goal)
    first = tl.min(tl.where(is_reached, v, V))
    # Sums in another order round differently: where nothing is reached, take the last possible token.
    return tl.minimum(first, tl.where(has_mass, last, law_last)).to(tl.int64)


@triton.jit
def _sample_kernel(probs, u, out, V: tl.constexpr, BLOCK: tl.constexpr, SLOTS: tl.constexpr):
    request = tl.program_id(0).to(tl.int64)
    law = probs + request * V
    tl.store(out + request, draw(law, 1.0, law, 0.0, out, 0, tl.load(u + request), V, BLOCK, SLOTS, False))


def uniform(seeds: torch.Tensor, counters: torch.Tensor, first_stream: int, num: int) -> torch.Tensor:
    """Return streams first_stream .. first_stream+num-1 of (seed, counter), [bs, num] float64 in [0, 1).

    seeds, counters: [bs] int64.
    """
    out = torch.empty(seeds.shape[0], num, dtype=torch.float64, device=seeds.device)
    _uniform_kernel[(seeds.shape[0],)](seeds, counters, out, first_stream, NUM=num, BLOCK=triton.next_power_of_2(num))
    return out


def sample(probs: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
    """Sample a token of positive probability per row, [bs] int64; probs [bs, V] >= 0, u [bs] float64 in [0, 1]."""
    out = torch.empty(probs.shape[0], dtype=torch.int64, device=probs.device)
    _sample_kernel[(probs.shape[0],)](
        probs.contiguous(), u.contiguous(), out, V=probs.shape[1], **vocab_blocks(probs.shape[1])
    )
    return out


def vocab_blocks(vocab_size: int) -> dict[str, int]:
    """Return the launch constants of `draw` for a vocabulary: tokens per block, bound of the blocks, and warps."""
    block = min(8192, triton.next_power_of_2(vocab_size))
    slots = triton.next_power_of_2(triton.cdiv(vocab_size, block))
    return {"BLOCK": block, "SLOTS": slots, "num_warps": 16}
