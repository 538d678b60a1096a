"""Products of each head's columns with the head's own matrix, K in order: a row's bits depend on no other row.

Twins: `latent_queries` and `latent_values` of `specdec.backends.linear.latents`.
"""

import torch
import triton
import triton.language as tl

from specdec.backends.triton.launch.fences import fence_copies
from specdec.backends.triton.launch.relaunch import INTERPRETED
from specdec.backends.triton.launch.sizes import cdiv, next_power_of_2
from specdec.backends.triton.linear.products import dot


@triton.jit(do_not_specialize=["num_rows"])
def _heads_kernel(
    x,
    weight,
    out,
    num_rows,
    stride_t,
    stride_h,
    ROWS: tl.constexpr,
    FIRST: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    REST: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    UPCAST: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_REST: tl.constexpr,
):
    """Compute BLOCK_M rows and BLOCK_N columns of a head of out [num_rows, H, N + REST]; copy x's last REST columns.

    A head has ROWS rows of weight; its matrix begins at row FIRST: [N, K], or [K, N] if TRANSPOSED.
    """
    head, num_heads = tl.program_id(1), tl.num_programs(1)
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(2) * BLOCK_N + tl.arange(0, BLOCK_N)
    is_row, is_column = (m < num_rows)[:, None], (n < N)[None, :]
    x_at = x + m.to(tl.int64)[:, None] * stride_t + head * stride_h
    out_at = out + (m.to(tl.int64)[:, None] * num_heads + head) * (N + REST)
    matrix = weight + (head * ROWS + FIRST).to(tl.int64) * (N if TRANSPOSED else K)
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for first in range(0, K, BLOCK_K):
        k = first + tl.arange(0, BLOCK_K)
        a = tl.load(x_at + k, mask=is_row & (k < K), other=0.0)
        inside = (k < K)[:, None] & is_column
        if TRANSPOSED:
            b = tl.load(matrix + k[:, None] * N + n[None, :], mask=inside, other=0.0)
        else:
            b = tl.load(matrix + n[None, :] * K + k[:, None], mask=inside, other=0.0)
        fence_copies(BLOCK_M)
        total = dot(a, b, total, UPCAST)
    tl.store(out_at + n, total.to(out.dtype.element_ty), mask=is_row & is_column)
    if REST > 0:
        if tl.program_id(2) == 0:
            r = tl.arange(0, BLOCK_REST)
            is_rest = is_row & (r < REST)
            tl.store(out_at + N + r, tl.load(x_at + K + r, mask=is_rest, other=0.0), mask=is_rest)


def _of_heads(
    x: torch.Tensor, weight: torch.Tensor, first: int, size: int, num_rest: int, is_transposed: bool
) -> torch.Tensor:
    """Multiply all but the last num_rest columns of x [T, H, K + num_rest] with `size` rows of each head's part of
    `weight` [H * M, R], from `first` on; the last num_rest columns are appended to the product."""
    assert x.stride(2) == 1 and weight.is_contiguous() and x.dtype == weight.dtype, "dense columns, and one dtype"
    num_rows, num_heads, _ = x.shape
    N, K = (weight.shape[1], size) if is_transposed else (size, weight.shape[1])
    out = torch.empty(num_rows, num_heads, N + num_rest, dtype=x.dtype, device=x.device)
    is_short = num_rows <= 64
    block_m = min(max(16, next_power_of_2(num_rows)), 64 if is_short else 128)
    block_n = 64 if is_short else 128
    _heads_kernel[(cdiv(num_rows, block_m), num_heads, cdiv(N, block_n))](
        x,
        weight,
        out,
        num_rows,
        x.stride(0),
        x.stride(1),
        ROWS=weight.shape[0] // num_heads,
        FIRST=first,
        N=N,
        K=K,
        REST=num_rest,
        TRANSPOSED=is_transposed,
        UPCAST=INTERPRETED and x.dtype == torch.bfloat16,
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        BLOCK_K=64,
        BLOCK_REST=next_power_of_2(max(num_rest, 1)),
        num_warps=4 if is_short else 8,
        num_stages=3,
    )
    return out


def latent_queries(q: torch.Tensor, weight: torch.Tensor, num_rotary: int) -> torch.Tensor:
    """See `specdec.backends.linear.latents`; bf16 or fp16."""
    return _of_heads(q, weight, 0, q.shape[2] - num_rotary, num_rotary, True)


def latent_values(x: torch.Tensor, weight: torch.Tensor, num_keys: int) -> torch.Tensor:
    """See `specdec.backends.linear.latents`; bf16 or fp16."""
    return _of_heads(x, weight, num_keys, weight.shape[0] // x.shape[1] - num_keys, 0, False)
