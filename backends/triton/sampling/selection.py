"""Radix selection without a sort: the k-th best logit of each row, and the edge of top-p.

A row is split over programs. A launch builds each split's histogram of tokens, or of their masses, over the next 4 bits
of an order-preserving integer of the logits; the next launch adds up the splits and picks the digit. Sums are integers,
so that they depend neither on the order of addition nor on the splits. A row that needs no more digits costs its
programs a few loads.

4 bits: a launch and the latency of its loads cost about 2 us, 16 sums over 2048 tokens about 1 us of a program's time;
5 bits would save one pass of four or two of eight and double the sums.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from specdec.backends.triton.sampling.keys import value_of

BITS = tl.constexpr(4)  # of a digit
BINS = tl.constexpr(16)
ONE = tl.constexpr(float(1 << 40))  # the mass of the best token; 2**22 of them fit into int64
FIELDS = tl.constexpr(8)  # int64 of a row's state: found, above, need, is_done, least
SIZES = ["num_positions", "num_splits", "span", "stride"]  # arguments that kernels do not specialise on
INPUTS = ["logits", "temperatures", "top_ks", "top_ps", "min_ps"]  # views of any alignment
# Low bits that order keys can drop, by the dtype of logits: they are 0 in bf16 and fp16 values as fp32.
SHIFTS = {torch.float32: 0, torch.bfloat16: 16, torch.float16: 12}


@triton.jit
def key_of(x, SHIFT: tl.constexpr):
    """Return a nonnegative int64 that orders like the fp32 values; -0.0 equals 0.0."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    ordered = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    return (ordered.to(tl.int64) + 2147483648) >> SHIFT


@triton.jit
def load_logits(row, v, V: tl.constexpr):
    """Load the logits of tokens v as fp32, -inf past the vocabulary."""
    return tl.load(row + v, mask=v < V, other=float("-inf")).to(tl.float32)


@triton.jit
def share_of(x, best, scale):
    """Return the weight of logits relative to the best one's, 0..1."""
    return tl.exp((x - best) * scale)


@triton.jit
def share_of_key(key, best, scale, SHIFT: tl.constexpr):
    """Return the weight of the logit with this key, 0 for NaN."""
    ordered = ((key << SHIFT) - 2147483648).to(tl.int32)
    bits = tl.where(ordered < 0, ordered ^ 0x7FFFFFFF, ordered) & (-1 << SHIFT)
    x = bits.to(tl.float32, bitcast=True)
    return tl.where(x == x, share_of(x, best, scale), 0.0)


@triton.jit
def load_best(maxima, row, num_splits, SPLITS: tl.constexpr):
    """Return the `order_key` of a row's best token, from those of its splits."""
    s = tl.arange(0, SPLITS)
    return tl.max(tl.load(maxima + row * num_splits + s, mask=s < num_splits, other=-(1 << 63)))


@triton.jit
def pick(state, bins, row, num_splits, highest, rest, shift, SPLITS: tl.constexpr, IS_MASS: tl.constexpr):
    """Fix the digit at bit `shift`: the largest for which tokens from it upwards sum to `need`, at most `highest`'s.

    rest: 1 - top_p, from which the first pass over masses computes `need`. Returns the key found so far, the sum above
    its digit, need, the excess over need of the sum from the digit upwards, and the digit's own sum; all int64.
    """
    s, b = tl.arange(0, SPLITS), tl.arange(0, BINS)
    at = (row * num_splits + s[:, None]) * BINS + b[None, :]
    sums = tl.sum(tl.load(bins + at, mask=(s < num_splits)[:, None] & (b < BINS)[None, :], other=0), 0)
    found, above, need = tl.load(state), tl.load(state + 1), tl.load(state + 2)
    total = tl.sum(sums)
    if IS_MASS:
        wanted = total - (total.to(tl.float64) * rest).to(tl.int64)
        need = tl.where(need < 0, tl.maximum(wanted, 0), need)
    reach = above + total - tl.cumsum(sums) + sums
    digit = tl.sum((reach >= need).to(tl.int64)) - 1
    digit = tl.minimum(digit, (highest - found) >> shift)
    reached, inside = tl.sum(tl.where(b == digit, reach, 0)), tl.sum(tl.where(b == digit, sums, 0))
    return found + (digit << shift), reached - inside, need, reached - need, inside


@triton.jit(do_not_specialize=[*SIZES, "shift", "is_first"], do_not_specialize_on_alignment=INPUTS)
def _digit_kernel(
    logits,
    maxima,
    temperatures,
    top_ks,
    top_ps,
    states,
    bins,
    new_states,
    new_bins,
    num_positions,
    num_splits,
    span,
    stride,
    shift,
    is_first,
    V: tl.constexpr,
    BLOCK: tl.constexpr,
    LANES: tl.constexpr,
    SPLITS: tl.constexpr,
    SHIFT: tl.constexpr,
    IS_MASS: tl.constexpr,
):
    """Run one pass: pick the digit that the previous pass has summed (in states and bins), and sum the next one.

    IS_MASS: a pass of top-p, else of top-k. is_first: 1 if there is no digit to pick, else 0. Top-p's first pass picks
    top-k's last digit.
    """
    row, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    request = row // num_positions
    best_key = load_best(maxima, row, num_splits, SPLITS)
    best, temperature = value_of(best_key), tl.load(temperatures + request).to(tl.float32)
    highest = key_of(best, SHIFT)
    scale = 1.0 / tl.where(temperature == 0, 1.0, temperature)
    rest = (1.0 - tl.load(top_ps + request)).to(tl.float32).to(tl.float64)
    state = states + row * FIELDS
    found, above, need = tl.zeros([], tl.int64), tl.zeros([], tl.int64), tl.full([], -1, tl.int64)
    least, is_done = tl.zeros([], tl.int64), tl.zeros([], tl.int64)  # least: key of the worst token of top-k
    if is_first != 0:
        is_off = (temperature == 0) | (tl.abs(best) == float("inf"))
        if IS_MASS:
            least = tl.load(state)
            if tl.load(state + 3) == 0:
                least, _, _, _, _ = pick(state, bins, row, num_splits, highest, rest, 0, SPLITS, False)
            is_done = (is_off | (rest <= 0)).to(tl.int64)
        else:
            need = tl.load(top_ks + request)
            is_done = (is_off | (need <= 0) | (need >= V)).to(tl.int64)
    else:
        found, above, need, is_done = tl.load(state), tl.load(state + 1), tl.load(state + 2), tl.load(state + 3)
        least = tl.load(state + 4)
        if is_done == 0:
            found, above, need, excess, _ = pick(
                state, bins, row, num_splits, highest, rest, shift + BITS, SPLITS, IS_MASS
            )
            smallest = tl.full([], 1, tl.int64)
            if IS_MASS:
                smallest = (share_of_key(found, best, scale, SHIFT) * ONE).to(tl.int64)
            is_done = (excess < smallest).to(tl.int64)  # every token from `found` upwards is needed, so all are kept
    if split == 0:
        new = new_states + row * FIELDS
        tl.store(new, found)
        tl.store(new + 1, above)
        tl.store(new + 2, need)
        tl.store(new + 3, is_done)
        tl.store(new + 4, least)
    if is_done == 0:
        own = new_bins + (row * num_splits + split) * BINS
        _store_sums(
            own, logits + row * stride, split * span, span, best, scale, found, least, shift,
            V, BLOCK, LANES, SHIFT, IS_MASS,
        )  # fmt: skip


@triton.jit
def _store_sums(
    out,
    row,
    start,
    span,
    best,
    scale,
    found,
    least,
    shift,
    V: tl.constexpr,
    BLOCK: tl.constexpr,
    LANES: tl.constexpr,
    SHIFT: tl.constexpr,
    IS_MASS: tl.constexpr,
):
    """Store sums by digit at bit `shift`, [BINS] int64, of the split's tokens whose higher digits equal `found`."""
    digits = tl.arange(0, BINS)
    tokens = tl.arange(0, BLOCK // LANES)[:, None] * LANES + tl.arange(0, LANES)[None, :]
    sums = tl.zeros([BINS, LANES], tl.int64 if IS_MASS else tl.int32)
    has_any = False
    for base in range(start, tl.minimum(start + span, V), BLOCK):
        v = base + tokens
        x = load_logits(row, v, V)
        key = tl.where(v < V, key_of(x, SHIFT), -1)
        digit = (key - found) >> shift
        is_in = (key >= found) & (key >= least) & (digit < BINS)
        digit = tl.where(is_in, digit, BINS).to(tl.int32)
        if tl.min(digit) < BINS:  # after a few digits, most blocks have no such token
            has_any = True
            weight = tl.full([BLOCK // LANES, LANES], 1, tl.int32)
            if IS_MASS:
                weight = (share_of(x, best, scale) * ONE).to(tl.int64)
            sums += tl.sum(tl.where(digit[None, :, :] == digits[:, None, None], weight[None, :, :], 0), 1)
    if has_any:
        tl.store(out + digits, tl.sum(sums, 1).to(tl.int64))
    else:
        tl.store(out + digits, tl.zeros([BINS], tl.int64))


def select(
    logits: torch.Tensor, maxima: torch.Tensor, sampling: Any, num_positions: int, shape: dict[str, int], span: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Find, for all rows of logits [n, V], the smallest key of top-k and all but the last digit of top-p's edge.

    maxima: [n, splits] int64, see `load_best`. Returns the states and sums from which `pick` computes the edge; field 4
    of a state is the smallest key of top-k.
    """
    num_rows, num_splits = maxima.shape
    key_bits = 32 - shape["SHIFT"]
    num_passes = key_bits // BITS.value
    states = torch.empty(2 * num_passes, num_rows, FIELDS.value, dtype=torch.int64, device=logits.device)
    bins = torch.empty(2, num_rows, num_splits, BINS.value, dtype=torch.int64, device=logits.device)
    for i in range(2 * num_passes):
        _digit_kernel[(num_rows, num_splits)](
            logits,
            maxima,
            sampling["temperature"],
            sampling["top_k"],
            sampling["top_p"],
            states[i - 1],
            bins[(i - 1) % 2],
            states[i],
            bins[i % 2],
            num_positions,
            num_splits,
            span,
            logits.stride(0),
            key_bits - BITS.value * (i % num_passes + 1),
            int(i % num_passes == 0),
            **shape,
            IS_MASS=i >= num_passes,
        )
    return states[-1], bins[1]
