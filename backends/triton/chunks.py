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
VALUES = 16  # of a program of states; more would not fit into registers
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


@triton.jit
def _load_keys(x, stride, cums, i, n, left, N: tl.constexpr, DECAY: tl.constexpr):
    """Load keys n of a chunk's vectors and of its log decays, the decays of the whole chunk apart, fp32."""
    tile = tl.load(x + i[:, None] * stride + n[None, :], mask=(i < left)[:, None] & (n < N)[None, :], other=0.0)
    if DECAY == "head":
        return tile.to(tl.float32), tl.load(cums + i)[:, None]
    else:
        return tile.to(tl.float32), tl.load(cums + i[:, None] * N + n[None, :], mask=(n < N)[None, :], other=0.0)


@triton.jit
def _read(x, stride, cums, state, total, i, n, left, N: tl.constexpr, DECAY: tl.constexpr, PRECISION: tl.constexpr):
    """Return total and what a chunk's vectors read from keys n of the state."""
    tile, cum = _load_keys(x, stride, cums, i, n, left, N, DECAY)
    return tl.dot(tile * tl.exp(cum), state, total, input_precision=PRECISION)


@triton.jit
def _written(
    k, stride, cums, state, u, i, n, left, N: tl.constexpr, DECAY: tl.constexpr, CHUNK: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Return keys n of the state after a chunk."""
    tile, cum = _load_keys(k, stride, cums, i, n, left, N, DECAY)
    if DECAY == "head":
        last = tl.load(cums + CHUNK - 1)
        state *= tl.exp(last)
        gap = last - cum
    else:
        last = tl.load(cums + (CHUNK - 1) * N + n, mask=n < N, other=0.0)
        state *= tl.exp(last)[:, None]
        gap = last[None, :] - cum
    return tl.dot(tl.trans(tile * tl.exp(gap)), u, state, input_precision=PRECISION)


@triton.jit(do_not_specialize=["num_reqs"], do_not_specialize_on_alignment=["rows", "prefix_lens", "qo_indptr"])
def _states_kernel(
    q, k, v, beta, scores, inverse, cums, out, state, rows, prefix_lens, qo_indptr, num_reqs,
    q_t, q_h, k_t, k_h, v_t, v_h, beta_t, beta_h,
    H: tl.constexpr, G: tl.constexpr, N: tl.constexpr, P: tl.constexpr, WIDTH: tl.constexpr,
    DECAY: tl.constexpr, CORRECTED: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_P: tl.constexpr, CHUNK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Some values of one head of one request, chunk by chunk; its state is two tiles of keys, for want of registers."""
    head, request = tl.program_id(1), tl.program_id(2)
    begin, end = tl.load(qo_indptr + request).to(tl.int64), tl.load(qo_indptr + request + 1)
    if begin == end:
        return
    _, _, chunk = _chunks_before(qo_indptr, request, num_reqs, CHUNK, BLOCK_R)
    block = chunk.to(tl.int64) * H + head
    i, low = tl.arange(0, CHUNK), tl.arange(0, BLOCK_N // 2)
    high = BLOCK_N // 2 + low
    p = tl.program_id(0) * BLOCK_P + tl.arange(0, BLOCK_P)
    is_value, is_low, is_high = (p < P)[None, :], (low < N)[:, None], (high < N)[:, None]
    row = tl.load(rows + request).to(tl.int64)
    state += (row * H + head) * (N * P) + p[None, :]
    has_prefix = tl.load(prefix_lens + request) > 0
    lower = tl.load(state + low[:, None] * P, mask=is_low & is_value & has_prefix, other=0.0)
    upper = tl.load(state + high[:, None] * P, mask=is_high & is_value & has_prefix, other=0.0)
    q += begin * q_t + head // (H // G) * q_h
    k += begin * k_t + head // (H // G) * k_h
    v += begin * v_t + head * v_h
    out += (begin * H + head) * P
    scores += block * (CHUNK * CHUNK)
    cums += block * (CHUNK * WIDTH)
    if CORRECTED:
        beta += begin * beta_t + head * beta_h
        inverse += block * (CHUNK * CHUNK)
    square = i[:, None] * CHUNK + i[None, :]
    left = (end - begin).to(tl.int32)
    for _ in range(0, (left + CHUNK - 1) // CHUNK):
        inside = (i < left)[:, None] & is_value
        u = tl.load(v + i[:, None] * v_t + p[None, :], mask=inside, other=0.0).to(tl.float32)
        if CORRECTED:
            old = tl.zeros([CHUNK, BLOCK_P], tl.float32)
            old = _read(k, k_t, cums, lower, old, i, low, left, N, DECAY, PRECISION)
            old = _read(k, k_t, cums, upper, old, i, high, left, N, DECAY, PRECISION)
            strength = tl.load(beta + i * beta_t, mask=i < left, other=0.0).to(tl.float32)
            u = tl.dot(tl.load(inverse + square), strength[:, None] * (u - old), input_precision=PRECISION)
            inverse += H * CHUNK * CHUNK
            beta += CHUNK * beta_t
        read = tl.dot(tl.load(scores + square), u, input_precision=PRECISION)
        read = _read(q, q_t, cums, lower, read, i, low, left, N, DECAY, PRECISION)
        read = _read(q, q_t, cums, upper, read, i, high, left, N, DECAY, PRECISION)
        tl.store(out + i[:, None] * (H * P) + p[None, :], read.to(out.dtype.element_ty), mask=inside)
        lower = _written(k, k_t, cums, lower, u, i, low, left, N, DECAY, CHUNK, PRECISION)
        upper = _written(k, k_t, cums, upper, u, i, high, left, N, DECAY, CHUNK, PRECISION)
        q += CHUNK * q_t
        k += CHUNK * k_t
        v += CHUNK * v_t
        out += CHUNK * H * P
        scores += H * CHUNK * CHUNK
        cums += H * CHUNK * WIDTH
        left -= CHUNK
    tl.store(state + low[:, None] * P, lower, mask=is_low & is_value)
    tl.store(state + high[:, None] * P, upper, mask=is_high & is_value)


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
        BLOCK_N=max(triton.next_power_of_2(spec.k_dim), 32),
        CHUNK=size,
        PRECISION=PRECISION,
    )
    _chunk_kernel[(num_chunks, spec.heads)](
        q, k, g, beta, *scratch, m.qo_indptr, m.num_reqs, *q_k, *of_g, *of_beta, **constants
    )
    out = inputs.v.new_zeros(inputs.v.shape)
    _states_kernel[(triton.cdiv(spec.v_dim, VALUES), spec.heads, m.num_reqs)](
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
        WIDTH=scan.width(spec),
        BLOCK_P=VALUES,
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
