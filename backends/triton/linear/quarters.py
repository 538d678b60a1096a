"""Products of few rows and packed weights, with a quarter of K per warp. Sums are those of `parts`.

A thread loads the weights that it multiplies straight into registers, blocks ahead, and likewise the features of rows:
without shared memory, and without waiting for other warps. On Hopper, bits depend on which 16 features one tensor-core
step adds, not on their order in it, so each thread can have four neighbouring features. Products of more rows have the
same bits: wgmma adds the same 16 features at a time.

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
MOST_ROWS, MOST_GATED = 8, 16  # above, tiles whose warps share unpacked weights are faster; measured on an H200
AHEAD, AHEAD_GATED = 4, 1  # blocks; gated products have enough programs to hide the latency of loads


def takes(num_rows: int, is_gated: bool) -> bool:
    """Return whether products of `num_rows` rows and packed weights use this kernel."""
    return num_rows <= (MOST_GATED if is_gated else MOST_ROWS) and (INTERPRETED or capability() == 90)


@triton.jit
def _columns(eighth):
    """Return weights [2 * 4 * 8 * 4, 4], by half of the columns, quarter, column and thread, as [4, COLUMNS, 16]."""
    return eighth.reshape([2, 4, 8, 4, 2, 2]).permute(1, 0, 2, 4, 3, 5).reshape([4, 16, 16])


@triton.jit
def _features(eighth, BLOCK_M: tl.constexpr):
    """Return features [BLOCK_M / 8 * 4 * 8 * 4, 4], by eight rows, quarter, row and thread, as [4, 16, BLOCK_M]."""
    return eighth.reshape([BLOCK_M // 8, 4, 8, 4, 2, 2]).permute(1, 4, 3, 5, 0, 2).reshape([4, 16, BLOCK_M])


@triton.jit
def _rows(rows, has_block, IS_UNEVEN: tl.constexpr):
    """Load a block of rows as eight tensors of 16 features; rows: pointers to the first 16, four per thread."""
    eighths = ()
    for j in tl.static_range(8):
        eighths = appended(eighths, loaded(rows + 16 * j, has_block, IS_UNEVEN))
    return eighths


@triton.jit
def _block(words, scales, first, t, left, size, GROUP: tl.constexpr, IS_UNEVEN: tl.constexpr):
    """Load words and scales of block t of each quarter; words, scales: pointers to the first; left: blocks from `first`
    on."""
    has_block = t < left
    packed = loaded(words + t * size * 16, has_block[:, None], IS_UNEVEN)
    return packed, scales_of(scales, has_block, first + t, size, GROUP, IS_UNEVEN)


@triton.jit
def _first_blocks(
    words, scales, first, left, quarter, size, GROUP: tl.constexpr, IS_UNEVEN: tl.constexpr, AHEAD: tl.constexpr
):
    """Load the first AHEAD blocks of each quarter; the last one again if there are fewer."""
    blocks = ()
    for t in tl.static_range(AHEAD):
        block = _block(words, scales, first, tl.minimum(t, quarter - 1), left, size, GROUP, IS_UNEVEN)
        blocks = appended(blocks, block)
    return blocks


@triton.jit
def _added(sums, rows, block, GROUP: tl.constexpr, UPCAST: tl.constexpr):
    """Return sums [4, COLUMNS, rows] plus the products of a block of each quarter."""
    words, scales = block
    of_words = ()
    for i in tl.static_range(len(scales)):
        of_words = appended(of_words, scales[i][:, None])
    weights = eighths_of_words(words, of_words, GROUP, rows[0].dtype, UPCAST)
    for j in tl.static_range(8):
        sums = dot(_columns(weights[j]), _features(rows[j], sums.shape[2]), sums, UPCAST)
    return sums


@triton.jit
def _total(sums):
    """Return the sum of four quarters [4, A, B], in their order."""
    even, odd = tl.split(sums.permute(1, 2, 0).reshape([sums.shape[1], sums.shape[2], 2, 2]))
    first, third = tl.split(even)
    second, fourth = tl.split(odd)
    return first + second + third + fourth


@triton.jit(do_not_specialize=["num_rows", "num_blocks", "N", "n0", "n1", "n2", "stride"])
def quarters_kernel(
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
    AHEAD: tl.constexpr,
    JOINED: tl.constexpr,
    PDL: tl.constexpr,
):
    """Compute BLOCK_M rows and COLUMNS columns of out, with AHEAD blocks prefetched; see `quantised._quantised_kernel`.

    JOINED: there are several weights. These follow a norm, which lets this kernel start early: it loads its first
    weights while the norm runs. After other kernels that costs time. The kernel after a gate reads many weights, and
    gains nothing by an early start.

    Rows past the last one repeat it. Thread 32 * q + 4 * c + i has features 4 * i to 4 * i + 3, of 16, of quarter q and
    column, or row, c, as operands of mma.sync have them. Loads have two dims, threads and features: Triton 3.6 assigns
    threads in another order to loads of more dims.
    """
    N, n0, n1, n2, stride = N * 16, n0 * 16, n1 * 16, n2 * 16, stride * 16
    part, number = part_of(tl.program_id(0), n0, n1, COLUMNS)
    begin, size = picked(0, n0, n0 + n1, part), picked(n0, n1, n2, part)
    weight, scales, bias = picked(w0, w1, w2, part), picked(s0, s1, s2, part), picked(b0, b1, b2, part)
    quarter, four = tl.cdiv(num_blocks, 4), tl.arange(0, 4)[None, :]
    thread = tl.arange(0, COLUMNS * 16)
    first = thread // 32 % 4 * quarter
    n = number * COLUMNS + thread // 128 * 8 + thread // 4 % 8
    at = ((first.to(tl.int64) * size + n) * 16 + thread % 4 * 4)[:, None] + four
    of_row = tl.arange(0, BLOCK_M * 16)
    first_of_row = of_row // 32 % 4 * quarter
    m = tl.minimum(of_row // 128 * 8 + of_row // 4 % 8, num_rows - 1).to(tl.int64)
    rows = x + (m * stride + first_of_row * 128 + of_row % 4 * 4)[:, None] + four
    left, left_of_row = num_blocks - first, (num_blocks - first_of_row)[:, None]
    if PDL:
        if ACTIVATION == "":
            gdc_launch_dependents()
        if not JOINED:
            gdc_wait()
    blocks = _first_blocks(weight + at, scales + n, first, left, quarter, size, GROUP, IS_UNEVEN, AHEAD)
    if ACTIVATION != "":
        up_blocks = _first_blocks(w1 + at, s1 + n, first, left, quarter, size, GROUP, IS_UNEVEN, AHEAD)
    if PDL and JOINED:
        gdc_wait()
    features = _rows(rows, left_of_row > 0, IS_UNEVEN)
    sums = tl.zeros([4, COLUMNS, BLOCK_M], tl.float32)
    up_sums = sums
    for t in tl.range(0, quarter, num_stages=1, loop_unroll_factor=max(AHEAD, 2)):
        later, after = tl.minimum(t + AHEAD, quarter - 1), tl.minimum(t + 1, quarter - 1)
        block = _block(weight + at, scales + n, first, later, left, size, GROUP, IS_UNEVEN)
        if ACTIVATION != "":
            up_block = _block(w1 + at, s1 + n, first, later, left, size, GROUP, IS_UNEVEN)
        next_features = _rows(rows + after * 128, after < left_of_row, IS_UNEVEN)
        sums = _added(sums, features, blocks[0], GROUP, UPCAST)
        blocks = appended(blocks[1:], block)
        if ACTIVATION != "":
            up_sums = _added(up_sums, features, up_blocks[0], GROUP, UPCAST)
            up_blocks = appended(up_blocks[1:], up_block)
        features = next_features
    n, m = number * COLUMNS + tl.arange(0, COLUMNS), tl.arange(0, BLOCK_M)
    product = finished(_total(sums), bias, n, size, HAS_BIAS, out.dtype.element_ty)
    if ACTIVATION != "":
        up = finished(_total(up_sums), b1, n, size, HAS_BIAS, out.dtype.element_ty)
        product = gated(product, up, ACTIVATION)
    at = out + m.to(tl.int64)[None, :] * N + (begin + n)[:, None]
    tl.store(at, product, mask=(m < num_rows)[None, :])
