"""Prefills of scans by chunks of tokens: first what each needs of itself, all at once; then states, one by one.

Twin: `backends.recurrent_ref.scan_extend`, in its notation: with A the strict lower part of beta_i exp(cum_i - cum_j)
(k_i . k_j), a chunk's u are (I + A)^-1 beta (v - (exp(cum) S)^T k), a row of the inverse at a time. Decays by element
of the state have no such form, and few tokens no use for it: those pass one by one.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from specdec.backends.state_pool import ScanInputs, ScanLayer, ScanSpec
from specdec.backends.triton import scan
from specdec.batch import AttentionMetadata

CHUNK = {"head": 64, "key": 32}  # tokens; decays by key are taken a column of A at a time
FEWEST = 48  # tokens that are worth two launches
PRECISION = "tf32x3"  # of products: three products of tensor cores, which together are as exact as fp32


@triton.jit
def _chunks_before(qo_indptr, request, num_reqs, CHUNK: tl.constexpr, BLOCK_R: tl.constexpr):
    """Chunks of each request, and of all up to it, [BLOCK_R]; and of those before `request`."""
    r = tl.arange(0, BLOCK_R)
    begin = tl.load(qo_indptr + r, mask=r < num_reqs, other=0)
    end = tl.load(qo_indptr + r + 1, mask=r < num_reqs, other=0)
    num = (end - begin + CHUNK - 1) // CHUNK
    return num, tl.cumsum(num, 0), tl.sum(tl.where(r < request, num, 0))


@triton.jit(do_not_specialize=["num_reqs"], do_not_specialize_on_alignment=["qo_indptr"])
def _chunk_kernel(
    q, k, g, beta, scores, inverse, cums, qo_indptr, num_reqs, q_t, q_h, k_t, k_h, g_t, g_h, beta_t, beta_h,
    H: tl.constexpr, G: tl.constexpr, N: tl.constexpr, DECAY: tl.constexpr, CORRECTED: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr, CHUNK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One head of one chunk: cum, weights of its tokens for its queries, and (I + A)^-1."""
    chunk, head = tl.program_id(0), tl.program_id(1)
    num, upto, _ = _chunks_before(qo_indptr, 0, num_reqs, CHUNK, BLOCK_R)
    request = tl.sum((upto <= chunk).to(tl.int32))
    if request >= num_reqs:
        return
    is_it = tl.arange(0, BLOCK_R) == request
    first = tl.load(qo_indptr + request) + (chunk - tl.sum(tl.where(is_it, upto - num, 0))) * CHUNK
    end = tl.load(qo_indptr + request + 1)
    i, n = tl.arange(0, CHUNK), tl.arange(0, BLOCK_N)
    token = first.to(tl.int64) + i
    inside = (token < end)[:, None] & (n < N)[None, :]
    k += head // (H // G) * k_h + n
    q_tile = tl.load(q + token[:, None] * q_t + head // (H // G) * q_h + n[None, :], mask=inside, other=0.0)
    k_tile = tl.load(k[None, :] + token[:, None] * k_t, mask=inside, other=0.0).to(tl.float32)
    q_tile = q_tile.to(tl.float32)
    block = chunk.to(tl.int64) * H + head
    square = block * CHUNK * CHUNK + i[:, None] * CHUNK + i[None, :]
    is_seen = i[:, None] >= i[None, :]
    if DECAY == "head":
        cum = tl.cumsum(tl.load(g + token * g_t + head * g_h, mask=token < end, other=0.0).to(tl.float32), 0)
        tl.store(cums + block * CHUNK + i, cum)
        decay = tl.exp(tl.where(is_seen, cum[:, None] - cum[None, :], float("-inf")))
        across = tl.trans(k_tile)
        qk = tl.dot(q_tile, across, input_precision=PRECISION) * decay
        kk = tl.dot(k_tile, across, input_precision=PRECISION) * decay
    else:
        g_tile = tl.load(g + token[:, None] * g_t + head * g_h + n[None, :], mask=inside, other=0.0)
        cum = tl.cumsum(g_tile.to(tl.float32), 0)
        cums += block * CHUNK * N + n
        tl.store(cums[None, :] + i[:, None] * N, cum, mask=(n < N)[None, :])
        tl.debug_barrier()  # rows are read by other threads
        qk = tl.zeros([CHUNK, CHUNK], tl.float32)
        kk = tl.zeros([CHUNK, CHUNK], tl.float32)
        for j in range(0, CHUNK):
            k_j = tl.load(k + (first.to(tl.int64) + j) * k_t, mask=(n < N) & (first + j < end), other=0.0)
            cum_j = tl.load(cums + j * N, mask=n < N, other=0.0)
            gap = tl.where((i >= j)[:, None], cum - cum_j[None, :], float("-inf"))
            reached = k_j.to(tl.float32)[None, :] * tl.exp(gap)
            qk = tl.where(i[None, :] == j, tl.sum(q_tile * reached, 1)[:, None], qk)
            kk = tl.where(i[None, :] == j, tl.sum(k_tile * reached, 1)[:, None], kk)
    tl.store(scores + square, qk)
    if CORRECTED:
        strength = tl.load(beta + token * beta_t + head * beta_h, mask=token < end, other=0.0).to(tl.float32)
        tl.store(inverse + square, tl.where(i[:, None] > i[None, :], kk * strength[:, None], 0.0))
        tl.debug_barrier()
        solved = tl.where(i[:, None] == i[None, :], 1.0, 0.0)
        for row in range(1, CHUNK):
            weights = tl.load(inverse + block * CHUNK * CHUNK + row * CHUNK + i)
            others = tl.sum(weights[:, None] * solved, 0)
            solved = tl.where(i[:, None] == row, solved - others[None, :], solved)
        tl.debug_barrier()
        tl.store(inverse + square, solved)


@triton.jit(do_not_specialize=["num_reqs"], do_not_specialize_on_alignment=["rows", "prefix_lens", "qo_indptr"])
def _states_kernel(
    q, k, v, beta, scores, inverse, cums, out, state, rows, prefix_lens, qo_indptr, num_reqs,
    q_t, q_h, k_t, k_h, v_t, v_h, beta_t, beta_h,
    H: tl.constexpr, G: tl.constexpr, N: tl.constexpr, P: tl.constexpr,
    DECAY: tl.constexpr, CORRECTED: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_P: tl.constexpr, CHUNK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Some values of one head of one request, chunk by chunk."""
    head, request = tl.program_id(1), tl.program_id(2)
    begin, end = tl.load(qo_indptr + request).to(tl.int64), tl.load(qo_indptr + request + 1)
    if begin == end:
        return
    _, _, chunk = _chunks_before(qo_indptr, request, num_reqs, CHUNK, BLOCK_R)
    block = chunk.to(tl.int64) * H + head
    i, n = tl.arange(0, CHUNK), tl.arange(0, BLOCK_N)
    p = tl.program_id(0) * BLOCK_P + tl.arange(0, BLOCK_P)
    row = tl.load(rows + request).to(tl.int64)
    state_at = state + row * (H * N * P) + (head * N + n[:, None]) * P + p[None, :]
    is_state = (n < N)[:, None] & (p < P)[None, :]
    has_prefix = tl.load(prefix_lens + request) > 0
    current = tl.load(state_at, mask=is_state & has_prefix, other=0.0)
    q += head // (H // G) * q_h + n[None, :]
    k += head // (H // G) * k_h + n[None, :]
    for _ in range(0, ((end - begin + CHUNK - 1) // CHUNK).to(tl.int32)):
        token = begin + i
        is_token = (token < end)[:, None]
        k_tile = tl.load(k + token[:, None] * k_t, mask=is_token & (n < N)[None, :], other=0.0).to(tl.float32)
        q_tile = tl.load(q + token[:, None] * q_t, mask=is_token & (n < N)[None, :], other=0.0).to(tl.float32)
        inside = is_token & (p < P)[None, :]
        u = tl.load(v + token[:, None] * v_t + head * v_h + p[None, :], mask=inside, other=0.0).to(tl.float32)
        if DECAY == "head":
            cum = tl.load(cums + block * CHUNK + i)[:, None]
            last = tl.load(cums + block * CHUNK + CHUNK - 1)
            shrink = tl.exp(last)
        else:
            cum_at = cums + block * CHUNK * N + n
            cum = tl.load(cum_at[None, :] + i[:, None] * N, mask=(n < N)[None, :], other=0.0)
            last = tl.load(cum_at + (CHUNK - 1) * N, mask=n < N, other=0.0)[None, :]
            shrink = tl.trans(tl.exp(last))
        square = block * CHUNK * CHUNK + i[:, None] * CHUNK + i[None, :]
        decay = tl.exp(cum)
        if CORRECTED:
            strength = tl.load(beta + token * beta_t + head * beta_h, mask=token < end, other=0.0).to(tl.float32)
            u = strength[:, None] * (u - tl.dot(k_tile * decay, current, input_precision=PRECISION))
            u = tl.dot(tl.load(inverse + square), u, input_precision=PRECISION)
        read = tl.dot(q_tile * decay, current, input_precision=PRECISION)
        read = tl.dot(tl.load(scores + square), u, read, input_precision=PRECISION)
        out_at = out + (token[:, None] * H + head) * P + p[None, :]
        tl.store(out_at, read.to(out.dtype.element_ty), mask=inside)
        kept = tl.trans(k_tile * tl.exp(last - cum))
        current = tl.dot(kept, u, current * shrink, input_precision=PRECISION)
        begin += CHUNK
        block += H
    tl.store(state_at, current, mask=is_state)


class _Scratch(NamedTuple):
    """What chunks need of themselves, fp32, [num_chunks, heads, CHUNK, ...]: CHUNK, CHUNK or nothing, decays."""

    scores: torch.Tensor
    inverse: torch.Tensor | None
    cums: torch.Tensor


def scan_extend(inputs: ScanInputs, layer: ScanLayer, metadata: AttentionMetadata) -> torch.Tensor:
    """See `backends.recurrent_ref.scan_extend`."""
    if layer.spec.decay == "state" or inputs.v.shape[0] < FEWEST:
        return scan.scan_extend(inputs, layer, metadata)
    m, spec, size = metadata, layer.spec, CHUNK[layer.spec.decay]
    (q, k, v, g, beta, _), strides = scan.arguments(inputs)
    q_k, of_v, of_g, of_beta = strides[:4], strides[4:6], strides[6:8], strides[8:10]
    num_chunks = triton.cdiv(inputs.v.shape[0], size) + m.num_reqs - 1  # or fewer
    scratch = _scratch(spec, num_chunks, inputs.v.device)
    constants = dict(
        H=spec.heads,
        G=spec.key_heads,
        N=spec.k_dim,
        DECAY=spec.decay,
        CORRECTED=spec.is_corrected,
        BLOCK_R=triton.next_power_of_2(m.num_reqs),
        BLOCK_N=max(triton.next_power_of_2(spec.k_dim), 16),
        CHUNK=size,
        PRECISION=PRECISION,
    )
    _chunk_kernel[(num_chunks, spec.heads)](
        q, k, g, beta, *scratch, m.qo_indptr, m.num_reqs, *q_k, *of_g, *of_beta, **constants
    )
    out = inputs.v.new_zeros(inputs.v.shape)
    block_p = min(max(triton.next_power_of_2(spec.v_dim), 16), 32)
    _states_kernel[(triton.cdiv(spec.v_dim, block_p), spec.heads, m.num_reqs)](
        q,
        k,
        v,
        beta,
        *scratch,
        out,
        layer.state,
        m.rows,
        m.prefix_lens,
        m.qo_indptr,
        m.num_reqs,
        *q_k,
        *of_v,
        *of_beta,
        P=spec.v_dim,
        BLOCK_P=block_p,
        num_stages=1,
        **constants,
    )
    return out


def _scratch(spec: ScanSpec, num_chunks: int, device: torch.device) -> _Scratch:
    size = CHUNK[spec.decay]
    squares = (num_chunks, spec.heads, size, size)
    return _Scratch(
        scores=torch.empty(squares, device=device),
        inverse=torch.empty(squares, device=device) if spec.is_corrected else None,
        cums=torch.empty(num_chunks, spec.heads, size, scan.width(spec), device=device),
    )
