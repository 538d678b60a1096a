"""Chunked scans of prefills: work within chunks in parallel, states chunk by chunk, then outputs in parallel.

Twin: `recurrent.reference.scan_extend`, in its notation; `chunk_solve` has the first step, which only corrected scans
and decays by key need. Decays by element of the state have no chunked form: `scan` takes their tokens one by one.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from specdec.backends.recurrent.state_pool import ScanInputs, ScanLayer, ScanSpec
from specdec.backends.triton.launch.shared_memory import shared_memory
from specdec.backends.triton.launch.sizes import cdiv, next_power_of_2
from specdec.backends.triton.recurrent import scan
from specdec.backends.triton.recurrent.chunk_solve import solve_kernel, weights_kernel
from specdec.backends.triton.recurrent.chunk_tiles import (
    PARTS,
    chunks_before,
    find_chunk,
    load_tile,
    product,
    requests_block,
    stored_product,
)
from specdec.backends.triton.recurrent.units import units
from specdec.core.batch import AttentionMetadata

CHUNK = {"head": 64, "key": 32}  # tokens, 16 to 256
SCRATCH = 96 << 20  # bytes; longer prefills run in segments of chunks
ALIGNED = 8  # divides dims of 16-bit inputs, else they become fp32: a GPU test fails on unaligned rows (Triton 3.6)
WEIGHTS = dict(num_warps=8, num_stages=1)
SOLVE = dict(BLOCK=64, num_warps=4, num_stages=1)  # BLOCK: columns of a product
# STAGES: chunks in shared memory, at most. With 8 warps Triton 3.6 gives wrong results for corrected scans.
STATES = dict(BLOCK_P=32, STAGES=2, num_warps=4)
OUTPUTS = dict(BLOCK_P=64, BLOCK_K=64, STAGES=2, num_warps=4)  # BLOCK_K: keys of a product


@triton.jit(
    do_not_specialize=["first_chunk", "num_chunks"],
    do_not_specialize_on_alignment=["rows", "prefix_lens", "qo_indptr"],
)
def _states_kernel(
    k, v, g, cums, keys, u, w, states, state, rows, prefix_lens, qo_indptr, first_chunk, num_chunks,
    k_t, k_h, v_t, v_h, g_t, g_h,
    H: tl.constexpr, G: tl.constexpr, N: tl.constexpr, P: tl.constexpr, DECAY: tl.constexpr, CORRECTED: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_P: tl.constexpr, CHUNK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Compute, chunk by chunk, the state that a chunk begins with and its u (if corrected), for BLOCK_P values of one
    head of one request."""
    head, request = tl.program_id(1), tl.program_id(2)
    begin, end = tl.load(qo_indptr + request).to(tl.int64), tl.load(qo_indptr + request + 1)
    before = chunks_before(qo_indptr, request, CHUNK, BLOCK_R)
    skipped = tl.maximum(first_chunk - before, 0)
    num = ((end - begin + CHUNK - 1) // CHUNK).to(tl.int32)
    num = tl.minimum(num, first_chunk + num_chunks - before) - skipped
    if num <= 0:
        return
    begin += skipped * CHUNK
    left = (end - begin).to(tl.int32)
    i, n = tl.arange(0, CHUNK), tl.arange(0, BLOCK_N)
    p = tl.program_id(0) * BLOCK_P + tl.arange(0, BLOCK_P)
    inside = (n < N)[:, None] & (p < P)[None, :]
    row = tl.load(rows + request).to(tl.int64)
    at = n[:, None] * P + p[None, :]
    state += (row * H + head) * (N * P) + at
    is_continued = (tl.load(prefix_lens + request) > 0) | (skipped > 0)
    current = tl.load(state, mask=inside & is_continued, other=0.0)
    block = (before + skipped - first_chunk).to(tl.int64) * H + head
    states += block * (N * P)
    k += begin * k_t + head // (H // G) * k_h
    g += begin * g_t + head * g_h
    v += begin * v_t + head * v_h
    key_at, value_at = i[:, None] * N + n[None, :], i[:, None] * P + p[None, :]
    is_key, is_value = (n < N)[None, :], (p < P)[None, :]
    for chunk in tl.range(0, num, num_stages=STAGES):
        c = tl.zeros([], tl.int64) + chunk
        rest = left - chunk * CHUNK
        at_chunk = block + c * H
        tl.store(states + c * (H * N * P) + at, current, mask=inside)
        if CORRECTED:
            u_at = u + at_chunk * (CHUNK * P) + value_at
            given = tl.load(u_at, mask=is_value, other=0.0)
            w_at = w + at_chunk * (PARTS * CHUNK * N) + key_at
            given = stored_product(w_at, CHUNK * N, is_key, current, given, False)
            tl.store(u_at, given, mask=is_value)
        else:
            given = load_tile(v + c * (CHUNK * v_t), v_t, i, p, rest, P).to(tl.float32)
        if DECAY == "head":
            gap = tl.load(g + (c * CHUNK + i) * g_t, mask=i < rest, other=0.0).to(tl.float32)
            last = tl.sum(gap)
            given *= tl.exp(last - tl.cumsum(gap, 0))[:, None]
            tile = load_tile(k + c * (CHUNK * k_t), k_t, i, n, rest, N)
            current = product(tl.trans(tile), given, current * tl.exp(last))
        else:
            last = tl.load(cums + (at_chunk * CHUNK + CHUNK - 1) * N + n, mask=n < N, other=0.0)
            current *= tl.exp(last)[:, None]
            keys_at = keys + at_chunk * (PARTS * CHUNK * N) + key_at
            current = stored_product(keys_at, CHUNK * N, is_key, given, current, True)
    tl.store(state, current, mask=inside)


@triton.jit(do_not_specialize=["num_reqs", "num_tokens", "first_chunk"], do_not_specialize_on_alignment=["qo_indptr"])
def _outputs_kernel(
    q, k, v, g, cums, qk, u, states, factors, out, qo_indptr, num_reqs, num_tokens, first_chunk,
    q_t, q_h, k_t, k_h, v_t, v_h, g_t, g_h,
    H: tl.constexpr, G: tl.constexpr, N: tl.constexpr, P: tl.constexpr, DECAY: tl.constexpr, CORRECTED: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_K: tl.constexpr, CHUNK: tl.constexpr,
    STAGES: tl.constexpr, HAS_FACTORS: tl.constexpr,
):  # fmt: skip
    """Compute the outputs of one chunk: BLOCK_P values of one head. Padding gets zeros."""
    slot, head = tl.program_id(0), tl.program_id(1)
    request, first, left = find_chunk(qo_indptr, first_chunk + slot, num_reqs, num_tokens, CHUNK, BLOCK_R)
    i, low = tl.arange(0, CHUNK), tl.arange(0, BLOCK_K)
    p = tl.program_id(2) * BLOCK_P + tl.arange(0, BLOCK_P)
    out_at = out + (first * H + head) * P + i[:, None] * (H * P) + p[None, :]
    inside = (i < left)[:, None] & (p < P)[None, :]
    total = tl.zeros([CHUNK, BLOCK_P], tl.float32)
    if request >= num_reqs:
        tl.store(out_at, total.to(out.dtype.element_ty), mask=inside)
        return
    block = slot.to(tl.int64) * H + head
    q += first * q_t + head // (H // G) * q_h
    k += first * k_t + head // (H // G) * k_h
    states += block * (N * P)
    if DECAY == "key":
        cums += block * (CHUNK * N)
    seen = tl.zeros([CHUNK, CHUNK], tl.float32)
    for begin in tl.range(0, BLOCK_N, BLOCK_K, num_stages=STAGES):
        n = begin + low
        q_tile = load_tile(q, q_t, i, n, left, N)
        state_at = states + n[:, None] * P + p[None, :]
        state = tl.load(state_at, mask=(n < N)[:, None] & (p < P)[None, :], other=0.0)
        if DECAY == "head":
            seen = product(q_tile, tl.trans(load_tile(k, k_t, i, n, left, N)), seen)
        else:
            cum_at = cums + i[:, None] * N + n[None, :]
            q_tile = q_tile.to(tl.float32) * tl.exp(tl.load(cum_at, mask=(n < N)[None, :], other=0.0))
        total = product(q_tile, state, total)
    if DECAY == "head":
        cum = tl.cumsum(tl.load(g + (first + i) * g_t + head * g_h, mask=i < left, other=0.0).to(tl.float32), 0)
        total *= tl.exp(cum)[:, None]
        seen *= tl.exp(tl.where(i[:, None] >= i[None, :], cum[:, None] - cum[None, :], float("-inf")))
    else:
        seen = tl.load(qk + block * (CHUNK * CHUNK) + i[:, None] * CHUNK + i[None, :])
    if CORRECTED:
        given = tl.load(u + block * (CHUNK * P) + i[:, None] * P + p[None, :], mask=(p < P)[None, :], other=0.0)
    else:
        given = load_tile(v + first * v_t + head * v_h, v_t, i, p, left, P).to(tl.float32)
    total = product(seen, given, total)
    if HAS_FACTORS:
        total *= tl.load(factors + (first + i) * H + head, mask=i < left, other=0.0)[:, None]
    tl.store(out_at, total.to(out.dtype.element_ty), mask=inside)


class _Scratch(NamedTuple):
    """Intermediate tensors between kernels, [num_chunks, heads, ...], fp32; SCRATCH bounds their bytes.

    states [k_dim, v_dim]: with which chunks begin. For corrected scans, u [CHUNK, v_dim], and w [CHUNK, k_dim] in bf16
    parts, [PARTS, ...]. For decays by key, cums [CHUNK, k_dim], decayed keys for the state, in parts, and decayed
    products of queries with keys, qk, and of keys with keys, kk (if corrected), [CHUNK, CHUNK]. With 32 heads and dims
    of 128, a chunk of 64 takes 4.7 MB, one of 32 with decays by key 5 MB; 2048 tokens would take 150 MB (320 MB) and
    run in segments.
    """

    states: torch.Tensor
    u: torch.Tensor | None
    w: torch.Tensor | None
    cums: torch.Tensor | None
    keys: torch.Tensor | None
    qk: torch.Tensor | None
    kk: torch.Tensor | None


def scan_extend(inputs: ScanInputs, layer: ScanLayer, metadata: AttentionMetadata) -> torch.Tensor:
    """See `recurrent.reference.scan_extend`."""
    if layer.spec.decay == "state":
        return scan.scan_extend(inputs, layer, metadata)
    dtype = inputs.v.dtype
    inputs, factors = (inputs, None) if inputs.scale is None else units(inputs)
    is_wide = all(t.dtype == torch.float32 for t in inputs[:3])
    if not is_wide and (layer.spec.k_dim % ALIGNED or layer.spec.v_dim % ALIGNED):
        inputs = inputs._replace(q=inputs.q.float(), k=inputs.k.float(), v=inputs.v.float())
    m, spec, num_tokens = metadata, layer.spec, inputs.v.shape[0]
    (q, k, v, g, beta, _), strides = scan.arguments(inputs)
    of_q, of_k, of_v, of_g, of_beta = (strides[at : at + 2] for at in range(0, 10, 2))
    out = torch.empty(inputs.v.shape, dtype=dtype, device=inputs.v.device)
    total = cdiv(num_tokens, CHUNK[spec.decay]) + m.num_reqs  # or fewer, padding included
    num_segments = cdiv(total * _chunk_bytes(spec), SCRATCH)
    num_chunks = cdiv(total, num_segments)
    s = _scratch(spec, num_chunks, inputs.v.device)
    common = _constants(spec, m.num_reqs) | {"G": inputs.q.shape[1]}
    for first in range(0, total, num_chunks):
        lies = (m.qo_indptr, m.num_reqs, num_tokens, first)
        if spec.decay == "key":
            weights_kernel[(num_chunks * (common["CHUNK"] // 16), spec.heads)](
                q, k, g, s.cums, s.keys, s.qk, s.kk, *lies, *of_q, *of_k, *of_g,
                CORRECTED=spec.is_corrected, **common, **WEIGHTS,
            )  # fmt: skip
        common_p = dict(P=spec.v_dim, DECAY=spec.decay, **common)
        if spec.is_corrected:
            solve_kernel[(num_chunks, spec.heads)](
                k, v, g, beta, s.cums, s.kk, s.u, s.w, *lies, *of_k, *of_v, *of_g, *of_beta,
                BLOCK_P=next_power_of_2(spec.v_dim), **common_p, **SOLVE,
            )  # fmt: skip
        states = _states_constants(spec, inputs.k.element_size(), shared_memory(inputs.k.device))
        _states_kernel[(cdiv(spec.v_dim, states["BLOCK_P"]), spec.heads, m.num_reqs)](
            k, v, g, s.cums, s.keys, s.u, s.w, s.states, layer.state, m.rows, m.prefix_lens, m.qo_indptr,
            first, num_chunks, *of_k, *of_v, *of_g, CORRECTED=spec.is_corrected, **common_p, **states,
        )  # fmt: skip
        outputs = _blocks(spec, OUTPUTS)
        _outputs_kernel[(num_chunks, spec.heads, cdiv(spec.v_dim, outputs["BLOCK_P"]))](
            q, k, v, g, s.cums, s.qk, s.u, s.states, factors, out, *lies, *of_q, *of_k, *of_v, *of_g,
            CORRECTED=spec.is_corrected, HAS_FACTORS=factors is not None, **common_p, **outputs,
        )  # fmt: skip
    return out


def _constants(spec: ScanSpec, num_reqs: int) -> dict[str, Any]:
    return dict(
        H=spec.heads,
        G=spec.key_heads,
        N=spec.k_dim,
        BLOCK_R=requests_block(num_reqs),
        BLOCK_N=max(next_power_of_2(spec.k_dim), 16),
        CHUNK=CHUNK[spec.decay],
    )


def _blocks(spec: ScanSpec, given: dict[str, int]) -> dict[str, int]:
    """Return `given` with blocks of values and keys no wider than necessary."""
    widths = {"BLOCK_P": spec.v_dim, "BLOCK_K": spec.k_dim}
    return {
        name: min(value, max(next_power_of_2(widths[name]), 16)) if name in widths else value
        for name, value in given.items()
    }


def _states_constants(spec: ScanSpec, key_bytes: int, shared: int) -> dict[str, int]:
    """Return STATES with as many stages as fit in `shared` bytes of memory."""
    found, common = _blocks(spec, STATES), _constants(spec, 1)
    size, width, of_parts = common["CHUNK"], common["BLOCK_N"], 2 * PARTS.value
    per_key = (of_parts if spec.is_corrected else 0) + (of_parts if spec.decay == "key" else key_bytes)
    u, state = size * found["BLOCK_P"] * 4, width * found["BLOCK_P"] * 4  # u takes one stage less
    num_stages = (shared - 1024 - state + u) // (size * width * per_key + u)
    return found | dict(STAGES=max(min(found["STAGES"], num_stages), 1))


def _chunk_shapes(spec: ScanSpec) -> dict[str, tuple[torch.dtype, Sequence[int]] | None]:
    """Return dtype and shape of each field of `_Scratch`, for one head of one chunk."""
    size, is_by_key, is_corrected = CHUNK[spec.decay], spec.decay == "key", spec.is_corrected
    of_keys = torch.bfloat16, (PARTS.value, size, spec.k_dim)
    return {
        "states": (torch.float32, (spec.k_dim, spec.v_dim)),
        "u": (torch.float32, (size, spec.v_dim)) if is_corrected else None,
        "w": of_keys if is_corrected else None,
        "cums": (torch.float32, (size, spec.k_dim)) if is_by_key else None,
        "keys": of_keys if is_by_key else None,
        "qk": (torch.float32, (size, size)) if is_by_key else None,
        "kk": (torch.float32, (size, size)) if is_by_key and is_corrected else None,
    }


def _chunk_bytes(spec: ScanSpec) -> int:
    return spec.heads * sum(math.prod(f[1]) * f[0].itemsize for f in _chunk_shapes(spec).values() if f)


def _scratch(spec: ScanSpec, num_chunks: int, device: torch.device) -> _Scratch:
    fields: dict[str, Any] = {
        name: torch.empty(num_chunks, spec.heads, *field[1], dtype=field[0], device=device) if field else None
        for name, field in _chunk_shapes(spec).items()
    }
    return _Scratch(**fields)
