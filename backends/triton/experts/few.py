"""Products of few rows with experts in MXFP4 on Hopper: a thread multiplies the weights that it loads.

Nothing goes through shared memory, and no warp waits for another; see `linear.few`. Of four warps, two have even
and two have odd blocks of 128 features, so sums are those of `quantised`, in the same order. Rows are loaded as 32-bit
words of two features each, which takes fewer registers.
"""

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl

from specdec.backends.triton.experts.products import gated_columns, line_of, scanned
from specdec.backends.triton.launch.relaunch import INTERPRETED, wait_for_others
from specdec.backends.triton.launch.sizes import cdiv
from specdec.backends.triton.linear.products import dot
from specdec.backends.triton.linear.unpack import appended, eighths_of_mxfp4

COLUMNS = 64  # per program; 32 are no faster on an H200


@triton.jit
def _features(rows, left, LEFT: tl.constexpr):
    """Load 128 features as eight tensors of 16, in words of two, at pointers [lanes, 2]; zeros past the end of a row.

    left [lanes, 1]: features up to the end of the row. LEFT: features in its last two blocks, 0 for 256.
    """
    features = ()
    for j in tl.static_range(8):
        if LEFT == 0:
            features = appended(features, tl.load(rows + 8 * j))
        else:
            inside = left > (LEFT % 128 if 16 * j >= LEFT % 128 else 0)
            features = appended(features, tl.load(rows + 8 * j, mask=inside, other=0))
    return features


@triton.jit
def _weights(words, exponents, t, last, N):
    """Load words and exponents of pair t of blocks, from pointers [lanes, 4] and [lanes] to the first pair; t past
    `last` [lanes] loads that."""
    at = tl.minimum(t, last) * (2 * N)
    return tl.load(words + (at * 16)[:, None]), tl.load(exponents + at)


@triton.jit
def _added(sums, features, packed, UPCAST: tl.constexpr):
    """Return sums [4, columns, rows] plus the products of a block per warp; features: of `_features`."""
    words, exponents = packed
    N: tl.constexpr = sums.shape[1]
    M: tl.constexpr = sums.shape[2]
    weights = eighths_of_mxfp4(words, exponents[:, None], UPCAST)
    for j in tl.static_range(8):
        pair = features[j]
        x = tl.join(pair.to(tl.int16), (pair >> 16).to(tl.int16)).to(tl.bfloat16, bitcast=True)
        w = weights[j].reshape([N // 8, 4, 8, 4, 2, 2]).permute(1, 0, 2, 3, 4, 5).reshape([4, N, 16])
        x = x.reshape([M // 8, 4, 8, 4, 2, 2]).permute(1, 3, 4, 5, 0, 2).reshape([4, 16, M])
        sums = dot(w, x, sums, UPCAST)
    return sums


@triton.jit(do_not_specialize=["num_rows", "copies", "by_row"], do_not_specialize_on_alignment=["ids"])
def few_rows_kernel(
    x,
    ids,
    words,
    exponents,
    bias,
    out,
    num_rows,
    copies,
    by_row,
    N,
    K,
    num_blocks,
    E: tl.constexpr,
    ACTIVATION: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    UPCAST: tl.constexpr,
    LEFT: tl.constexpr,
    BLOCK_IDS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PDL: tl.constexpr,
):
    """Compute BLOCK_N columns of the products with one expert; see `quantised._quantised_experts_kernel`.

    A warp has half of the columns and half of the blocks, and prefetches one block. Columns past the last one repeat
    it. LEFT: see `_features`.
    """
    DTYPE: tl.constexpr = out.dtype.element_ty
    HALF: tl.constexpr = BLOCK_N // 2  # the columns of a warp
    wait_for_others(PDL, False)
    expert, is_own, rank, end = scanned(ids, tl.program_id(1), num_rows, by_row, E, BLOCK_IDS)
    own = tl.minimum(expert, E - 1).to(tl.int64)
    x, two, four = x.to(tl.pointer_type(tl.int32), bitcast=True), tl.arange(0, 2)[None, :], tl.arange(0, 4)[None, :]
    i, j = tl.arange(0, HALF * 16), tl.arange(0, BLOCK_M * 16)
    n, parity = i // 64 % 2 * HALF + i // 128 * 8 + i // 4 % 8, tl.minimum(i // 32 % 2, num_blocks - 1)
    n = parity * N + tl.minimum(tl.program_id(0) * BLOCK_N + n, N - 1)
    words += own * num_blocks * N * 16 + (n * 16 + i % 4 * 4)[:, None] + four
    exponents += own * num_blocks * N + n
    last, pairs = (num_blocks - 1 - parity) // 2, tl.where(expert < E, (num_blocks + 1) // 2, 0)
    feature = (j // 32 % 2 * 128)[:, None]
    for first in range(0, end, BLOCK_M):
        packed = _weights(words, exponents, 0, last, N)
        m = first + tl.arange(0, BLOCK_M)
        line = line_of(ids, is_own, rank, m, end, False, BLOCK_IDS)
        row = line.reshape([BLOCK_M // 8, 1, 8, 1]).broadcast_to([BLOCK_M // 8, 4, 8, 4]).reshape([BLOCK_M * 16])
        rows = x + ((row // copies).to(tl.int64) * (K // 2) + j % 4 * 2)[:, None] + feature // 2 + two
        features = _features(rows, K - feature, LEFT)
        sums = tl.zeros([4, HALF, BLOCK_M], tl.float32)
        for t in tl.range(0, pairs, num_stages=1):
            after = tl.minimum(t + 1, pairs - 1)
            next_packed = _weights(words, exponents, after, last, N)
            next_features = _features(rows + after * 128, K - feature - after * 256, LEFT)
            sums = _added(sums, features, packed, UPCAST)
            features, packed = next_features, next_packed
        even, odd = tl.split(sums.reshape([2, 2, HALF, BLOCK_M]).permute(0, 2, 3, 1))
        product = (even + odd).reshape([BLOCK_N, BLOCK_M])
        column = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
        if HAS_BIAS:
            inside = (column < N) & (expert < E)
            product += tl.load(bias + own * N + column, mask=inside, other=0.0).to(tl.float32)[:, None]
        at = out + line.to(tl.int64)[None, :] * (N if ACTIVATION == "" else N // 2)
        if ACTIVATION == "":
            tl.store(at + column[:, None], product.to(DTYPE), mask=(m < end)[None, :] & (column < N)[:, None])
        else:
            half = tl.program_id(0) * (BLOCK_N // 2) + tl.arange(0, BLOCK_N // 2)
            result = gated_columns(product, ACTIVATION, DTYPE, BLOCK_M, BLOCK_N)
            tl.store(at + half[:, None], result, mask=(m < end)[None, :] & (half < N // 2)[:, None])


def launch(
    x: torch.Tensor,
    ids: torch.Tensor,
    words: torch.Tensor,
    exponents: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    activation: str,
    counts: Sequence[int],
    num_groups: int,
    constants: dict[str, Any],
) -> None:
    """Fill `out`; counts, num_groups, constants: of `products.grouping`; see `quantised.grouped`."""
    (E, num_blocks, N), K = exponents.shape, x.shape[1]
    few_rows_kernel[(cdiv(N, COLUMNS), num_groups)](
        x,
        ids,
        words,
        exponents,
        out if bias is None else bias,
        out,
        *counts,
        N,
        K,
        num_blocks,
        ACTIVATION=activation,
        HAS_BIAS=bias is not None,
        UPCAST=INTERPRETED,
        LEFT=K % 256,
        BLOCK_M=8 if counts[0] <= 4 * E else 16,  # rows per expert: above 4 on average
        BLOCK_N=COLUMNS,
        num_warps=4,
        **{name: value for name, value in constants.items() if name != "ROUTED"},
    )
