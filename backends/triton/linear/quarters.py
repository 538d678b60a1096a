"""Products of few rows and packed weights, a quarter of K a warp. Sums are those of `parts`.

A warp's products are of 16 features at a time: it multiplies what it has unpacked, and waits for no other warp. In
wider ones Triton would choose which 16 features meet in a step of the tensor cores, and so the bits: products of more
rows are equal on Hopper, whose wgmma takes them in order.

Twin: `specdec.backends.linear.packed.packed_linear_twin`.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

from specdec.backends.triton.linear.gates import gated
from specdec.backends.triton.linear.parts import finished, part_of, picked
from specdec.backends.triton.linear.products import dot
from specdec.backends.triton.linear.unpack import eighths_of_words


@triton.jit
def _halves(rows):
    """Return the first and the second half of the features of rows [4, M, K]."""
    M: tl.constexpr = rows.shape[1]
    return tl.split(rows.reshape([4, M, 2, rows.shape[2] // 2]).permute(0, 1, 3, 2))


@triton.jit
def _eighth(rows, inside, J: tl.constexpr):
    """Load 16 features of rows [4, M], the J-th of eight, from pointers to the first ones."""
    features = tl.expand_dims(rows, 2) + (16 * J + tl.arange(0, 16))[None, None, :]
    return tl.load(features, mask=inside[:, :, None], other=0.0)


@triton.jit
def _eighths(rows, inside, COLUMNS: tl.constexpr):
    """Return 16 after 16 of the 128 features of rows [4, M], from pointers to the first ones: [4, COLUMNS, 16] each.

    Fewer rows than COLUMNS are loaded at once and repeated; more would lie in the same banks of shared memory.
    """
    M: tl.constexpr = rows.shape[1]
    if M < COLUMNS:
        features = tl.expand_dims(rows, 2) + tl.arange(0, 128)[None, None, :]
        block = tl.load(features, mask=inside[:, :, None], other=0.0)
        block = block[:, None, :, :].broadcast_to([4, COLUMNS // M, M, 128]).reshape([4, COLUMNS, 128])
        first, second = _halves(block)
        one, two = _halves(first)
        three, four = _halves(second)
        a, b = _halves(one)
        c, d = _halves(two)
        e, f = _halves(three)
        g, h = _halves(four)
    else:
        a, b = _eighth(rows, inside, 0), _eighth(rows, inside, 1)
        c, d = _eighth(rows, inside, 2), _eighth(rows, inside, 3)
        e, f = _eighth(rows, inside, 4), _eighth(rows, inside, 5)
        g, h = _eighth(rows, inside, 6), _eighth(rows, inside, 7)
    return a, b, c, d, e, f, g, h


@triton.jit
def _added(sums, rows, words, scales, inside, block, size, GROUP: tl.constexpr, UPCAST: tl.constexpr):
    """Return sums [4, columns, rows] and the products of a block of each quarter; rows: of `_eighths`.

    words: pointers [4, columns], scales: pointers to the first ones; block: [4, 1].
    """
    packed = tl.load(tl.expand_dims(words, 2) + tl.arange(0, 16)[None, None, :], mask=inside[:, :, None], other=0)
    weights = eighths_of_words(packed, scales, inside, block, size, GROUP, rows[0].dtype, UPCAST)
    for j in tl.static_range(8):
        sums = dot(weights[j], rows[j].trans(0, 2, 1), sums, UPCAST)
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
    BLOCK_N: tl.constexpr,
    NUM_STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    """BLOCK_M rows and BLOCK_N columns of out; see `quantised._quantised_kernel`. Fewer rows than the eight that tensor
    cores have columns for are loaded once and repeated."""
    N, n0, n1, n2, stride = N * 16, n0 * 16, n1 * 16, n2 * 16, stride * 16
    COLUMNS: tl.constexpr = max(BLOCK_M, 8)
    part, number = part_of(tl.program_id(1), n0, n1, BLOCK_N)
    begin, size = picked(0, n0, n0 + n1, part), picked(n0, n1, n2, part)
    weight, scales, bias = picked(w0, w1, w2, part), picked(s0, s1, s2, part), picked(b0, b1, b2, part)
    quarter = tl.cdiv(num_blocks, 4)
    first = (tl.arange(0, 4) * quarter)[:, None]
    n = (number * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)[None, :]
    m = (tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)[None, :]
    rows, at = x + m * stride + first * 128, (first * size + n) * 16
    has_n, has_m = (n < size) & (first >= 0), (m < num_rows) & (first >= 0)
    if PDL:
        gdc_wait()
    sums = tl.zeros([4, BLOCK_N, COLUMNS], tl.float32)
    up_sums = sums
    for t in tl.range(0, quarter, num_stages=NUM_STAGES):
        if IS_UNEVEN:
            has_n, has_m = (n < size) & (first + t < num_blocks), (m < num_rows) & (first + t < num_blocks)
        features = _eighths(rows + t * 128, has_m, COLUMNS)
        w = at + t * size * 16
        sums = _added(sums, features, weight + w, scales + n, has_n, first + t, size, GROUP, UPCAST)
        if ACTIVATION != "":
            up_sums = _added(up_sums, features, w1 + w, s1 + n, has_n, first + t, size, GROUP, UPCAST)
    n, m = number * BLOCK_N + tl.arange(0, BLOCK_N), tl.program_id(0) * BLOCK_M + tl.arange(0, COLUMNS)
    product = finished(_total(sums), bias, n, size, HAS_BIAS, out.dtype.element_ty)
    if ACTIVATION != "":
        up = finished(_total(up_sums), b1, n, size, HAS_BIAS, out.dtype.element_ty)
        product = gated(product, up, ACTIVATION)
    is_row = (m < num_rows) & (tl.arange(0, COLUMNS) < BLOCK_M)
    at = out + m.to(tl.int64)[None, :] * N + (begin + n)[:, None]
    tl.store(at, product, mask=is_row[None, :] & (n < size)[:, None])
