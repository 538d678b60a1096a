"""The part of a chunked scan within each chunk that needs no state, for all chunks in parallel.

Twin: `recurrent.reference.scan_extend`, in its notation: with A the strict lower part of beta_i exp(cum_i - cum_j)
(k_i . k_j) and X = (I + A)^-1 diag(beta), a chunk's u are X v + w S, where w = -X exp(cum) k.
"""

import triton
import triton.language as tl

from specdec.backends.triton.recurrent.chunk_tiles import (
    PARTS,
    PRECISION,
    find_chunk,
    load_tile,
    product,
    solved,
    store_parts,
)


@triton.jit(do_not_specialize=["num_reqs", "num_tokens", "first_chunk"], do_not_specialize_on_alignment=["qo_indptr"])
def weights_kernel(
    q, k, g, cums, keys, qk, kk, qo_indptr, num_reqs, num_tokens, first_chunk, q_t, q_h, k_t, k_h, g_t, g_h,
    H: tl.constexpr, G: tl.constexpr, N: tl.constexpr, CORRECTED: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Store, for decays by key and 16 tokens i of a head: cum; qk and kk, exp(cum_i - cum_j) times q_i . k_j and
    k_i . k_j for tokens j of the chunk; keys, exp(last - cum) k, for the state.

    Earlier tokens j are a product of exp(cum_i - from) and exp(from - cum_j), `from` being the sum before these 16, so
    that no exponent is positive; those among the 16 are computed one by one.
    """
    slot, head = tl.program_id(0) // (CHUNK // 16), tl.program_id(1)
    request, first, left = find_chunk(qo_indptr, first_chunk + slot, num_reqs, num_tokens, CHUNK, BLOCK_R)
    if request >= num_reqs:
        return
    before = tl.program_id(0) % (CHUNK // 16) * 16  # tokens of the chunk
    c, n, i = tl.arange(0, CHUNK), tl.arange(0, BLOCK_N), tl.arange(0, 16)
    q += first * q_t + head // (H // G) * q_h
    k += first * k_t + head // (H // G) * k_h
    g += first * g_t + head * g_h
    every = load_tile(g, g_t, c, n, left, N).to(tl.float32)
    earlier = tl.where((c < before)[:, None], every, 0.0)
    start = tl.sum(earlier, 0)
    since = tl.where((c < before)[:, None], start[None, :] - tl.cumsum(earlier, 0), float("-inf"))
    reached = tl.trans(load_tile(k, k_t, c, n, left, N).to(tl.float32) * tl.exp(since))
    cum = tl.cumsum(load_tile(g, g_t, before + i, n, left, N).to(tl.float32), 0)  # from `start` on
    q_tile = load_tile(q, q_t, before + i, n, left, N).to(tl.float32)
    k_tile = load_tile(k, k_t, before + i, n, left, N).to(tl.float32)
    q_seen = tl.dot(q_tile * tl.exp(cum), reached, input_precision=PRECISION)
    k_seen = tl.zeros([16, CHUNK], tl.float32)
    if CORRECTED:
        k_seen = tl.dot(k_tile * tl.exp(cum), reached, input_precision=PRECISION)
    block = slot.to(tl.int64) * H + head
    place = before + i[:, None]
    is_key = (n < N)[None, :]
    tl.store(cums + block * (CHUNK * N) + place * N + n[None, :], start[None, :] + cum, mask=is_key)
    until = tl.sum(every, 0)[None, :] - start[None, :] - cum
    keys += block * (PARTS * CHUNK * N) + place * N + n[None, :]
    store_parts(keys, CHUNK * N, k_tile * tl.exp(until), is_key)
    for j in range(0, 16):
        is_j = (i == j)[:, None]
        gap = tl.where((i >= j)[:, None], cum - tl.sum(tl.where(is_j, cum, 0.0), 0)[None, :], float("-inf"))
        other = tl.sum(tl.where(is_j, k_tile, 0.0), 0)[None, :] * tl.exp(gap)
        is_column = (c == before + j)[None, :]
        q_seen = tl.where(is_column, tl.sum(q_tile * other, 1)[:, None], q_seen)
        if CORRECTED:
            k_seen = tl.where(is_column, tl.sum(k_tile * other, 1)[:, None], k_seen)
    square = place * CHUNK + c[None, :]
    tl.store(qk + block * (CHUNK * CHUNK) + square, q_seen)
    if CORRECTED:
        tl.store(kk + block * (CHUNK * CHUNK) + square, k_seen)


@triton.jit(do_not_specialize=["num_reqs", "num_tokens", "first_chunk"], do_not_specialize_on_alignment=["qo_indptr"])
def solve_kernel(
    k, v, g, beta, cums, kk, u, w, qo_indptr, num_reqs, num_tokens, first_chunk,
    k_t, k_h, v_t, v_h, g_t, g_h, beta_t, beta_h,
    H: tl.constexpr, G: tl.constexpr, N: tl.constexpr, P: tl.constexpr, DECAY: tl.constexpr, BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Compute X v (as u) and w for one head of one chunk. cums, kk: for decays by key."""
    slot, head = tl.program_id(0), tl.program_id(1)
    request, first, left = find_chunk(qo_indptr, first_chunk + slot, num_reqs, num_tokens, CHUNK, BLOCK_R)
    if request >= num_reqs:
        return
    i, column = tl.arange(0, CHUNK), tl.arange(0, BLOCK)
    block = slot.to(tl.int64) * H + head
    k += first * k_t + head // (H // G) * k_h
    v += first * v_t + head * v_h
    is_before = i[:, None] > i[None, :]
    if DECAY == "head":
        cum = tl.cumsum(tl.load(g + (first + i) * g_t + head * g_h, mask=i < left, other=0.0).to(tl.float32), 0)
        seen = tl.zeros([CHUNK, CHUNK], tl.float32)
        for n in range(0, BLOCK_N, BLOCK):
            tile = load_tile(k, k_t, i, n + column, left, N)
            seen = product(tile, tl.trans(tile), seen)
        seen *= tl.exp(tl.where(is_before, cum[:, None] - cum[None, :], float("-inf")))
    else:
        seen = tl.load(kk + block * (CHUNK * CHUNK) + i[:, None] * CHUNK + i[None, :])
    strength = tl.load(beta + (first + i) * beta_t + head * beta_h, mask=i < left, other=0.0).to(tl.float32)
    x = solved(tl.where(is_before, seen * strength[:, None], 0.0), CHUNK) * strength[None, :]
    empty = tl.zeros([CHUNK, BLOCK], tl.float32)
    for p in range(0, BLOCK_P, BLOCK):
        tile = product(x, load_tile(v, v_t, i, p + column, left, P), empty)
        u_at = u + block * (CHUNK * P) + i[:, None] * P + (p + column)[None, :]
        tl.store(u_at, tile, mask=(p + column < P)[None, :])
    if DECAY == "head":
        x *= tl.exp(cum)[None, :]
    for n in range(0, BLOCK_N, BLOCK):
        at = i[:, None] * N + (n + column)[None, :]
        is_key = (n + column < N)[None, :]
        tile = load_tile(k, k_t, i, n + column, left, N)
        if DECAY == "key":
            tile = tile.to(tl.float32) * tl.exp(tl.load(cums + block * (CHUNK * N) + at, mask=is_key, other=0.0))
        tile = product(-x, tile, empty)
        store_parts(w + block * (PARTS * CHUNK * N) + at, CHUNK * N, tile, is_key)
