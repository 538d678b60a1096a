"""Device functions of the kernels of `chunks`: the tokens of a chunk, products as exact as fp32, triangular solves.

Twin: `backends.recurrent.reference.scan_extend`.
"""

import triton
import triton.language as tl

from specdec.backends.triton.launch.fences import fence_copies
from specdec.backends.triton.launch.relaunch import INTERPRETED
from specdec.backends.triton.launch.sizes import next_power_of_2

UPCAST = tl.constexpr(INTERPRETED)  # the interpreter cannot multiply bf16
PRECISION = tl.constexpr("tf32x3")  # of fp32 products: three TF32 tensor-core products, together as exact
LEAST_REQUESTS = 32  # one per lane of a warp
PARTS = tl.constexpr(3)  # bf16 numbers that fp32 is split into if its partner is bf16: 24 bits


def requests_block(num_reqs: int) -> int:
    """Return BLOCK_R, the same for all but large batches, since each value compiles another variant."""
    return max(next_power_of_2(num_reqs), LEAST_REQUESTS)


@triton.jit
def find_chunk(qo_indptr, chunk, num_reqs, num_tokens, CHUNK: tl.constexpr, BLOCK_R: tl.constexpr):
    """Return a chunk's request, its first token (int64) and the number of tokens from there to the request's end.

    Chunks are numbered over all requests in order; chunks of padding follow, with request num_reqs.
    """
    r = tl.arange(0, BLOCK_R)
    begin = tl.load(qo_indptr + r, mask=r < num_reqs, other=0)
    end = tl.load(qo_indptr + r + 1, mask=r < num_reqs, other=0)
    num = ((end - begin + CHUNK - 1) // CHUNK).to(tl.int32)
    request = tl.sum(((tl.cumsum(num, 0) <= chunk) & (r < num_reqs)).to(tl.int32))
    earlier = tl.sum(tl.where(r < request, num, 0))
    first = tl.load(qo_indptr + request).to(tl.int64) + (chunk - earlier) * CHUNK
    last = tl.load(qo_indptr + request + 1, mask=request < num_reqs, other=num_tokens)
    return request, first, (last - first).to(tl.int32)


@triton.jit
def chunks_before(qo_indptr, request, CHUNK: tl.constexpr, BLOCK_R: tl.constexpr):
    """Return the number of chunks of all requests before `request`."""
    r = tl.arange(0, BLOCK_R)
    begin = tl.load(qo_indptr + r, mask=r < request, other=0)
    end = tl.load(qo_indptr + r + 1, mask=r < request, other=0)
    return tl.sum((end - begin + CHUNK - 1) // CHUNK).to(tl.int32)


@triton.jit
def load_tile(x, stride, i, n, left, WIDTH: tl.constexpr):
    """Load columns n of a chunk's rows i: bf16 unchanged, for `product`, other dtypes as fp32."""
    tile = tl.load(x + i[:, None] * stride + n[None, :], mask=(i < left)[:, None] & (n < WIDTH)[None, :], other=0.0)
    if tile.dtype == tl.bfloat16:
        return tile
    else:
        return tile.to(tl.float32)


@triton.jit
def _dot(a, b, total):
    fence_copies(a.shape[0])
    if a.dtype == tl.float32:
        return tl.dot(a, b, total, input_precision=PRECISION)
    elif UPCAST:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), total)
    else:
        return tl.dot(a, b, total)


@triton.jit
def _rounded(x):
    """Round fp32 to bf16 precision, but keep it as fp32: the conversion takes shared memory and is left to products."""
    return (x.to(tl.int32, bitcast=True) + 0x8000 & -0x10000).to(tl.float32, bitcast=True)


@triton.jit
def _parts(x):
    """Split fp32 into three values of bf16 precision, the largest first."""
    first = _rounded(x)
    second = _rounded(x - first)
    return first, second, x - first - second


@triton.jit
def product(a, b, total):
    """Return total + a b. A bf16 operand stays bf16, and its fp32 partner is split: cheaper than tf32x3."""
    if a.dtype == b.dtype:
        return _dot(a, b, total)
    elif a.dtype == tl.bfloat16:
        first, second, third = _parts(b)
        total = _dot(a, second.to(tl.bfloat16), _dot(a, third.to(tl.bfloat16), total))
        return _dot(a, first.to(tl.bfloat16), total)
    else:
        first, second, third = _parts(a)
        total = _dot(second.to(tl.bfloat16), b, _dot(third.to(tl.bfloat16), b, total))
        return _dot(first.to(tl.bfloat16), b, total)


@triton.jit
def store_parts(at, step, x, mask):
    """Store fp32 in parts, `step` elements apart, for `stored_product`."""
    first, second, third = _parts(x)
    tl.store(at, first.to(tl.bfloat16), mask=mask)
    tl.store(at + step, second.to(tl.bfloat16), mask=mask)
    tl.store(at + 2 * step, third.to(tl.bfloat16), mask=mask)


@triton.jit
def stored_product(at, step, mask, b, total, IS_TRANSPOSED: tl.constexpr):
    """Return total + a b for an `a` (or its transpose) stored in parts, which reach tensor cores without registers."""
    a_first = tl.load(at, mask=mask, other=0.0)
    a_second = tl.load(at + step, mask=mask, other=0.0)
    if IS_TRANSPOSED:
        a_first, a_second = tl.trans(a_first), tl.trans(a_second)
    first, second, third = _parts(b)
    total = _dot(a_first, third.to(tl.bfloat16), total)
    part = second.to(tl.bfloat16)
    total = _dot(a_first, part, _dot(a_second, part, total))
    part = first.to(tl.bfloat16)
    a_third = tl.load(at + 2 * step, mask=mask, other=0.0)
    if IS_TRANSPOSED:
        a_third = tl.trans(a_third)
    total = _dot(a_third, part, total)
    return _dot(a_first, part, _dot(a_second, part, total))


@triton.jit
def solved(a, CHUNK: tl.constexpr):
    """Return (I + a)^-1 of a strictly lower [CHUNK, CHUNK], fp32: all diagonal blocks of 16 at once, column by column,
    then pairs of blocks.

    Both are forward substitution: powers of `a` can be large even if the inverse is not.
    """
    BLOCKS: tl.constexpr = CHUNK // 16
    block, i = tl.arange(0, BLOCKS), tl.arange(0, 16)
    is_diagonal = (block[:, None] == block[None, :])[:, None, :, None]
    diagonal = tl.sum(tl.where(is_diagonal, tl.reshape(a, [BLOCKS, 16, BLOCKS, 16]), 0.0), 2)
    x = tl.where((i[:, None] == i[None, :])[None, :, :], 1.0, tl.zeros([BLOCKS, 16, 16], tl.float32))
    for j in range(0, 15):
        column = tl.sum(tl.where((i == j)[None, None, :], diagonal, 0.0), 2)
        row = tl.sum(tl.where((i == j)[None, :, None], x, 0.0), 1)
        x -= column[:, :, None] * row[:, None, :]
    x = tl.reshape(tl.where(is_diagonal, x[:, :, None, :], 0.0), [CHUNK, CHUNK])
    c = tl.arange(0, CHUNK)
    size: tl.constexpr = 16
    LEVELS: tl.constexpr = (CHUNK >= 32) + (CHUNK >= 64) + (CHUNK >= 128) + (CHUNK >= 256)  # log2(BLOCKS)
    for level in range(0, LEVELS):
        of_row, of_column = c[:, None] // (size << level), c[None, :] // (size << level)
        lower = tl.where((of_row % 2 == 1) & (of_column == of_row - 1), a, 0.0)
        x -= tl.dot(x, tl.dot(lower, x, input_precision=PRECISION), input_precision=PRECISION)
    return x
