"""Products of few rows and packed weights on Hopper, with a warp per split of K. Sums are those of `parts`.

A thread loads the weights that it multiplies straight into registers, and likewise the features of rows: without shared
memory, and without waiting for other warps. It loads the next step of blocks before it multiplies the current one, and
features as early as weights, since the compiled code waits for the loads of both at once.

Bits depend on which 16 features one tensor-core step adds, not on their order in it, so each thread can have four
neighbouring features. Products of more rows have the same bits: wgmma adds the same 16 features at a time.

Twin: `specdec.backends.linear.packed.packed_linear`.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from specdec.backends.triton.launch.relaunch import INTERPRETED, capability
from specdec.backends.triton.linear.gates import gated
from specdec.backends.triton.linear.parts import finished, part_of, picked
from specdec.backends.triton.linear.products import dot
from specdec.backends.triton.linear.unpack import appended, eighths_of_words, loaded, scales_of

COLUMNS = tl.constexpr(16)  # per program
MOST_ROWS = 16  # above, tiles whose warps share unpacked weights are faster; measured on an H200


def takes(num_rows: int) -> bool:
    """Return whether products of `num_rows` rows and packed weights use this kernel."""
    return num_rows <= MOST_ROWS and (INTERPRETED or capability() == 90)


def splits_of(num_blocks: int) -> int:
    """Return the splits of K of packed weights, in any product: eight of a long K, where this kernel needs warps."""
    return 8 if num_blocks >= 64 and takes(1) else 4


def step_of(splits: int, is_gated: bool, num_rows: int) -> int:
    """Return how many blocks of each split are loaded at once: more where a multiprocessor has few warps, if registers
    hold them."""
    return 2 if splits == 4 and not is_gated and num_rows <= 8 else 1


@triton.jit
def _columns(eighth):
    """Return weights [2 * SPLITS * 8 * 4, 4] (half of the columns, split, column, thread) as [SPLITS, 16, 16]."""
    SPLITS: tl.constexpr = eighth.shape[0] // 64
    return eighth.reshape([2, SPLITS, 8, 4, 2, 2]).permute(1, 0, 2, 4, 3, 5).reshape([SPLITS, 16, 16])


@triton.jit
def _features(eighth, SPLITS: tl.constexpr, BLOCK_M: tl.constexpr):
    """Return features [BLOCK_M / 8 * SPLITS * 8 * 4, 4] (eight rows, split, row, thread) as [SPLITS, 16, BLOCK_M]."""
    return eighth.reshape([BLOCK_M // 8, SPLITS, 8, 4, 2, 2]).permute(1, 4, 3, 5, 0, 2).reshape([SPLITS, 16, BLOCK_M])


@triton.jit
def _rows(rows, t, left, IS_UNEVEN: tl.constexpr, STEP: tl.constexpr):
    """Load STEP blocks of rows from block t of each split on, as tensors of 16 features; rows: pointers to the first
    16, four per thread; left: blocks of the split."""
    features = ()
    for j in tl.static_range(8 * STEP):
        features = appended(features, loaded(rows + t * 128 + 16 * j, (t + j // 8 < left)[:, None], IS_UNEVEN))
    return features


@triton.jit
def _weights(words, scales, first, t, left, size, GROUP: tl.constexpr, IS_UNEVEN: tl.constexpr, STEP: tl.constexpr):
    """Load words and scales of STEP blocks from block t of each split on; words, scales: pointers to the first."""
    all_words, all_scales = (), ()
    for i in tl.static_range(STEP):
        has_block = t + i < left
        all_words = appended(all_words, loaded(words + (t + i) * size * 16, has_block[:, None], IS_UNEVEN))
        of_block = scales_of(scales, has_block, first + t + i, size, GROUP, IS_UNEVEN)
        for j in tl.static_range(len(of_block)):
            all_scales = appended(all_scales, of_block[j][:, None])
    return all_words, all_scales


@triton.jit
def _added(sums, features, weights, GROUP: tl.constexpr, UPCAST: tl.constexpr):
    """Return sums [SPLITS, COLUMNS, rows] plus the products of a step of each split."""
    words, scales = weights
    for i in tl.static_range(len(words)):
        of_block = ()
        for j in tl.static_range(len(scales) // len(words)):
            of_block = appended(of_block, scales[i * (len(scales) // len(words)) + j])
        eighths = eighths_of_words(words[i], of_block, GROUP, features[0].dtype, UPCAST)
        for j in tl.static_range(8):
            x = _features(features[8 * i + j], sums.shape[0], sums.shape[2])
            sums = dot(_columns(eighths[j]), x, sums, UPCAST)
    return sums


@triton.jit
def _four(sums):
    """Return [A, B, 4] as four tensors [A, B]."""
    even, odd = tl.split(sums.reshape([sums.shape[0], sums.shape[1], 2, 2]))
    first, third = tl.split(even)
    second, fourth = tl.split(odd)
    return first, second, third, fourth


@triton.jit
def _total(sums):
    """Return the sum of splits [SPLITS, A, B], in their order."""
    last = sums.permute(1, 2, 0)
    if sums.shape[0] == 4:
        a, b, c, d = _four(last)
        total = a + b + c + d
    else:
        even, odd = tl.split(last.reshape([sums.shape[1], sums.shape[2], 4, 2]))
        a, c, e, g = _four(even)
        b, d, f, h = _four(odd)
        total = a + b + c + d + e + f + g + h
    return total


@triton.jit(do_not_specialize=["num_rows", "num_blocks", "N", "n0", "n1", "n2", "stride"])
def packed_few_rows_kernel(
    x,
    w0,
    w1,
    w2,
    s0,
    s1,
    s2,
    b0,
    b1,
    b2,
    out,
    num_rows,
    num_blocks,
    N,
    n0,
    n1,
    n2,
    stride,
    GROUP: tl.constexpr,
    ACTIVATION: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    UPCAST: tl.constexpr,
    IS_UNEVEN: tl.constexpr,
    BLOCK_M: tl.constexpr,
    SPLITS: tl.constexpr,
    STEP: tl.constexpr,
    PDL: tl.constexpr,
):
    """Compute BLOCK_M rows and COLUMNS columns of out, STEP blocks at a time; see `quantised._quantised_kernel`.

    The first weights are loaded while the kernel in front runs, and what follows can start as early.

    Rows past the last one repeat it. Thread 32 * s + 4 * c + i has features 4 * i to 4 * i + 3, of 16, of split s and
    column, or row, c, as operands of mma.sync have them. Loads have two dims, threads and features: Triton 3.6 assigns
    threads in another order to loads of more dims.
    """
    N, n0, n1, n2, stride = N * 16, n0 * 16, n1 * 16, n2 * 16, stride * 16
    part, number = part_of(tl.program_id(0), n0, n1, COLUMNS)
    begin, size = picked(0, n0, n0 + n1, part), picked(n0, n1, n2, part)
    weight, scales, bias = picked(w0, w1, w2, part), picked(s0, s1, s2, part), picked(b0, b1, b2, part)
    split, four = tl.cdiv(num_blocks, SPLITS), tl.arange(0, 4)[None, :]
    thread = tl.arange(0, COLUMNS * 4 * SPLITS)
    first = thread // 32 % SPLITS * split
    n = number * COLUMNS + thread // (32 * SPLITS) * 8 + thread // 4 % 8
    at = ((first.to(tl.int64) * size + n) * 16 + thread % 4 * 4)[:, None] + four
    of_row = tl.arange(0, BLOCK_M * 4 * SPLITS)
    first_of_row = of_row // 32 % SPLITS * split
    m = tl.minimum(of_row // (32 * SPLITS) * 8 + of_row // 4 % 8, num_rows - 1).to(tl.int64)
    rows = x + (m * stride + first_of_row * 128 + of_row % 4 * 4)[:, None] + four
    left, left_of_row = tl.minimum(num_blocks - first, split), tl.minimum(num_blocks - first_of_row, split)
    if PDL:
        gdc_launch_dependents()
    weights = _weights(weight + at, scales + n, first, 0, left, size, GROUP, IS_UNEVEN, STEP)
    if ACTIVATION != "":
        up_weights = _weights(w1 + at, s1 + n, first, 0, left, size, GROUP, IS_UNEVEN, STEP)
    if PDL:
        gdc_wait()
    features = _rows(rows, 0, left_of_row, IS_UNEVEN, STEP)
    sums = tl.zeros([SPLITS, COLUMNS, BLOCK_M], tl.float32)
    up_sums = sums
    for t in tl.range(0, split, STEP, num_stages=1):
        later = tl.where(t + STEP < split, t + STEP, t)  # the last step loads itself again
        next_weights = _weights(weight + at, scales + n, first, later, left, size, GROUP, IS_UNEVEN, STEP)
        if ACTIVATION != "":
            next_up = _weights(w1 + at, s1 + n, first, later, left, size, GROUP, IS_UNEVEN, STEP)
        next_features = _rows(rows, later, left_of_row, IS_UNEVEN, STEP)
        # Always true: ptxas moves loads behind products, next to where it waits for them, but not past a branch. A
        # condition that does not depend on t would be hoisted out of the loop.
        if t < num_blocks:
            sums = _added(sums, features, weights, GROUP, UPCAST)
            if ACTIVATION != "":
                up_sums = _added(up_sums, features, up_weights, GROUP, UPCAST)
        weights, features = next_weights, next_features
        if ACTIVATION != "":
            up_weights = next_up
    n, m = number * COLUMNS + tl.arange(0, COLUMNS), tl.arange(0, BLOCK_M)
    product = finished(_total(sums), bias, n, size, HAS_BIAS, out.dtype.element_ty)
    if ACTIVATION != "":
        up = finished(_total(up_sums), b1, n, size, HAS_BIAS, out.dtype.element_ty)
        product = gated(product, up, ACTIVATION)
    at = out + m.to(tl.int64)[None, :] * N + (begin + n)[:, None]
    tl.store(at, product, mask=(m < num_rows)[None, :])
