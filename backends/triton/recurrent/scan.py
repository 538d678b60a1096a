"""Scans token by token: a program has some values of one head of one request, and keeps their state in registers.

Twins: `recurrent.reference.scan_tail`, `scan_extend` and `scan_step`. A node of a tree continues where the node
before it ended or began, if that is its parent or sibling; else its path is recomputed from the state. So a chain costs
one pass over its tokens, and decays are multiplied one by one: no exponent is above 0.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from specdec.backends.recurrent.state_pool import ScanInputs, ScanLayer, ScanSpec
from specdec.backends.triton.launch.relaunch import early_and_leading, wait_for_others
from specdec.backends.triton.launch.sizes import cdiv, next_power_of_2
from specdec.backends.triton.recurrent.tokens import (
    decayed,
    load_decay,
    load_token,
    lowest_bit,
    store_decay,
    take_node,
    take_token,
    written,
)
from specdec.core.batch import AttentionMetadata

TILE = 1024  # elements of the state per program, which is one warp, so that sums over keys stay within it


@triton.jit
def _bit_of(node, word):
    """Return the bit of a node (int64) in a word of ancestor bits, 0 in other words."""
    return tl.where(word == node // 64, tl.full([], 1, tl.int64) << node % 64, 0)


@triton.jit(
    do_not_specialize=["first_node", "q_len", "max_tail"],
    do_not_specialize_on_alignment=["rows", "prefix_lens", "ancestor_bits"],
)
def _scan_tail_kernel(
    q, k, v, g, beta, rates, out, state, tail_k, tail_u, tail_g, kept_rates, rows, prefix_lens, ancestor_bits,
    first_node, q_len, max_tail,
    q_t, q_h, k_t, k_h, v_t, v_h, g_t, g_h, beta_t, beta_h, rates_h, rates_n, rates_p,
    H: tl.constexpr, G: tl.constexpr, N: tl.constexpr, P: tl.constexpr, WIDTH: tl.constexpr,
    DECAY: tl.constexpr, CORRECTED: tl.constexpr, WORDS: tl.constexpr, BLOCK_WORDS: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_P: tl.constexpr, GIVEN: tl.constexpr, SCALE: tl.constexpr,
    PDL: tl.constexpr, LEADS: tl.constexpr,
):  # fmt: skip
    """Scan the nodes of one request. GIVEN: heads of q and k, of which G are stored."""
    wait_for_others(PDL, LEADS)
    head, request = tl.program_id(1), tl.program_id(2)
    key_head, given_head = head // (H // G), head // (H // GIVEN)
    n, p = tl.arange(0, BLOCK_N), tl.program_id(0) * BLOCK_P + tl.arange(0, BLOCK_P)
    is_first = tl.program_id(0) == 0
    inside = (n < N)[:, None] & (p < P)
    at = (head * N + n[:, None]) * P + p
    rate = tl.zeros([], tl.float32)
    if DECAY == "state":
        rate = tl.load(rates + head * rates_h + n[:, None] * rates_n + p * rates_p, mask=inside, other=0.0)
        rate = rate.to(tl.float32)
        tl.store(kept_rates + at, rate, mask=inside & (request == 0))
    row = tl.load(rows + request).to(tl.int64)
    has_prefix = tl.load(prefix_lens + request) > 0
    start = tl.load(state + row * (H * N * P) + at, mask=inside & has_prefix, other=0.0)
    tail_k += row * max_tail * (G * N)
    tail_u += row * max_tail * (H * P)
    tail_g += row * max_tail * (H * WIDTH)
    current = start
    if WORDS == 0:
        for earlier in range(0, first_node):
            node = tl.zeros([], tl.int64) + earlier
            current = take_node(
                current, tail_k, tail_u, tail_g, node, head, key_head, n, p, rate, H, G, N, P, WIDTH, DECAY
            )
    parent = current  # the state after the previous node's parent
    w = tl.arange(0, BLOCK_WORDS)
    first = request.to(tl.int64) * q_len
    q_n, k_n, v_p, gap, strength = load_token(
        q, k, v, g, beta, first, head, given_head, n, p, q_t, q_h, k_t, k_h, v_t, v_h, g_t, g_h, beta_t, beta_h,
        N, P, DECAY, CORRECTED, SCALE,
    )  # fmt: skip
    for i in range(0, q_len):
        token = first + i
        following = load_token(  # prefetched one token ahead
            q, k, v, g, beta, first + tl.minimum(i + 1, q_len - 1), head, given_head, n, p,
            q_t, q_h, k_t, k_h, v_t, v_h, g_t, g_h, beta_t, beta_h, N, P, DECAY, CORRECTED, SCALE,
        )  # fmt: skip
        node = tl.zeros([], tl.int64) + first_node + i
        if WORDS:
            bits_at = ancestor_bits + token * WORDS
            bits = tl.load(bits_at + w, mask=w < WORDS, other=0)
            path = bits & ~_bit_of(node, w)
            before = tl.load(bits_at - WORDS + w, mask=(w < WORDS) & (i > 0), other=0)
            is_next = (i > 0) & (tl.sum((path != before).to(tl.int32)) == 0)
            is_sibling = (i > 0) & (tl.sum((path != before & ~_bit_of(node - 1, w)).to(tl.int32)) == 0)
            if is_sibling:
                current = parent
            elif not is_next:
                current = start
                for word in range(WORDS):
                    left = tl.load(bits_at + word) & ~_bit_of(node, word)
                    while left != 0:
                        ancestor = lowest_bit(left).to(tl.int64) + word * 64
                        left = left & (left - 1)
                        if ancestor < first_node:
                            current = take_node(
                                current, tail_k, tail_u, tail_g, ancestor, head, key_head, n, p, rate,
                                H, G, N, P, WIDTH, DECAY,
                            )  # fmt: skip
                        else:  # k and log decay of this forward's nodes may not be in the tails yet
                            other = token + ancestor - node
                            step = load_decay(g + other * g_t + head * g_h, n, p, N, P, DECAY)
                            key = tl.load(k + other * k_t + given_head * k_h + n, mask=n < N, other=0.0).to(tl.float32)
                            u = tl.load(tail_u + (ancestor * H + head) * P + p, mask=p < P, other=0.0)
                            current = written(decayed(current, step, rate, DECAY), key, u)
            parent = current
        current, u, read = take_token(current, q_n, k_n, v_p, gap, strength, rate, DECAY, CORRECTED)
        tl.store(out + (token * H + head) * P + p, read.to(out.dtype.element_ty), mask=p < P)
        tl.store(tail_u + (node * H + head) * P + p, u, mask=p < P)
        tl.store(tail_k + (node * G + key_head) * N + n, k_n, mask=(n < N) & is_first & (head == key_head * (H // G)))
        store_decay(tail_g + (node * H + head) * WIDTH, gap, n, p, is_first, N, P, DECAY)
        q_n, k_n, v_p, gap, strength = following
        if WORDS:
            tl.debug_barrier()  # other threads may load this u


@triton.jit(do_not_specialize_on_alignment=["rows", "prefix_lens", "qo_indptr"])
def _scan_extend_kernel(
    q, k, v, g, beta, rates, out, state, kept_rates, rows, prefix_lens, qo_indptr,
    q_t, q_h, k_t, k_h, v_t, v_h, g_t, g_h, beta_t, beta_h, rates_h, rates_n, rates_p,
    H: tl.constexpr, G: tl.constexpr, N: tl.constexpr, P: tl.constexpr,
    DECAY: tl.constexpr, CORRECTED: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_P: tl.constexpr,
    GIVEN: tl.constexpr, SCALE: tl.constexpr, PDL: tl.constexpr, LEADS: tl.constexpr,
):  # fmt: skip
    wait_for_others(PDL, LEADS)
    head, request = tl.program_id(1), tl.program_id(2)
    given_head = head // (H // GIVEN)
    n, p = tl.arange(0, BLOCK_N), tl.program_id(0) * BLOCK_P + tl.arange(0, BLOCK_P)
    inside = (n < N)[:, None] & (p < P)
    at = (head * N + n[:, None]) * P + p
    rate = tl.zeros([], tl.float32)
    if DECAY == "state":
        rate = tl.load(rates + head * rates_h + n[:, None] * rates_n + p * rates_p, mask=inside, other=0.0)
        rate = rate.to(tl.float32)
        tl.store(kept_rates + at, rate, mask=inside & (request == 0))
    begin, end = tl.load(qo_indptr + request).to(tl.int64), tl.load(qo_indptr + request + 1)
    if begin == end:
        return
    row = tl.load(rows + request).to(tl.int64)
    has_prefix = tl.load(prefix_lens + request) > 0
    state_at = state + row * (H * N * P) + at
    current = tl.load(state_at, mask=inside & has_prefix, other=0.0)
    q_n, k_n, v_p, gap, strength = load_token(
        q, k, v, g, beta, begin, head, given_head, n, p, q_t, q_h, k_t, k_h, v_t, v_h, g_t, g_h, beta_t, beta_h,
        N, P, DECAY, CORRECTED, SCALE,
    )  # fmt: skip
    for i in range(0, (end - begin).to(tl.int32)):
        token = begin + i
        following = load_token(  # prefetched one token ahead
            q, k, v, g, beta, tl.minimum(token + 1, end - 1), head, given_head, n, p,
            q_t, q_h, k_t, k_h, v_t, v_h, g_t, g_h, beta_t, beta_h, N, P, DECAY, CORRECTED, SCALE,
        )  # fmt: skip
        current, _, read = take_token(current, q_n, k_n, v_p, gap, strength, rate, DECAY, CORRECTED)
        tl.store(out + (token * H + head) * P + p, read.to(out.dtype.element_ty), mask=p < P)
        q_n, k_n, v_p, gap, strength = following
    tl.store(state_at, current, mask=inside)


def scan_tail(inputs: ScanInputs, layer: ScanLayer, metadata: AttentionMetadata) -> torch.Tensor:
    """See `recurrent.reference.scan_tail`."""
    m, spec, bits = metadata, layer.spec, metadata.ancestor_bits
    out, (tensors, strides) = torch.empty_like(inputs.v, memory_format=torch.contiguous_format), arguments(inputs)
    words = 0 if bits is None else bits.shape[2]
    _scan_tail_kernel[_grid(spec, m.num_reqs)](
        *tensors,
        out,
        layer.state,
        layer.k,
        layer.u,
        layer.g,
        layer.rates,
        m.rows,
        m.prefix_lens,
        bits,
        m.tail_len - m.q_len,
        m.q_len,
        layer.k.shape[1],
        *strides,
        WIDTH=width(spec),
        WORDS=words,
        BLOCK_WORDS=next_power_of_2(max(words, 1)),
        **constants(spec),
        **_of_inputs(inputs),
    )
    return out


def scan_extend(inputs: ScanInputs, layer: ScanLayer, metadata: AttentionMetadata) -> torch.Tensor:
    """See `recurrent.reference.scan_extend`."""
    return _token_by_token(inputs, layer, metadata, inputs.v.new_zeros(inputs.v.shape))  # where padding stays zero


def scan_step(inputs: ScanInputs, layer: ScanLayer, metadata: AttentionMetadata) -> torch.Tensor:
    """See `recurrent.reference.scan_step`: a prefill of one token, so that states are read once and written once."""
    out = torch.empty_like(inputs.v, memory_format=torch.contiguous_format)
    return _token_by_token(inputs, layer, metadata, out)


def _token_by_token(
    inputs: ScanInputs, layer: ScanLayer, metadata: AttentionMetadata, out: torch.Tensor
) -> torch.Tensor:
    m, spec, (tensors, strides) = metadata, layer.spec, arguments(inputs)
    _scan_extend_kernel[_grid(spec, m.num_reqs)](
        *tensors,
        out,
        layer.state,
        layer.rates,
        m.rows,
        m.prefix_lens,
        m.qo_indptr,
        *strides,
        **constants(spec),
        **_of_inputs(inputs),
    )
    return out


def constants(spec: ScanSpec) -> dict[str, Any]:
    """Return constexprs and compiler options of the kernels. The compiler must not fuse products and sums to FMAs: its
    choice differs from kernel to kernel, and states must not."""
    block_n = next_power_of_2(spec.k_dim)
    tile = TILE // 2 if spec.decay == "state" else TILE  # each element takes an exponential then
    return dict(
        H=spec.heads,
        G=spec.key_heads,
        N=spec.k_dim,
        P=spec.v_dim,
        DECAY=spec.decay,
        CORRECTED=spec.is_corrected,
        BLOCK_N=block_n,
        BLOCK_P=min(max(tile // block_n, 8), next_power_of_2(spec.v_dim)),
        num_warps=1,
        enable_fp_fusion=False,
    )


def _of_inputs(inputs: ScanInputs) -> dict[str, Any]:
    """Return the other constexprs of the kernels of tokens, which depend on inputs, and their launch options."""
    return {"GIVEN": inputs.q.shape[1], "SCALE": inputs.scale or 0.0, **early_and_leading(len(inputs.v))}


def width(spec: ScanSpec) -> int:
    """Return the number of log decays per head."""
    return 1 if spec.decay == "head" else spec.decay_shape[1]


def _grid(spec: ScanSpec, num_reqs: int) -> tuple[int, int, int]:
    return cdiv(spec.v_dim, constants(spec)["BLOCK_P"]), spec.heads, num_reqs


def arguments(inputs: ScanInputs) -> tuple[list[torch.Tensor | None], list[int]]:
    """Return the tensors of `inputs`, with dense last dims of q, k, v and decays, and their strides."""
    q, k, v, g, beta, rates, _ = inputs
    q, k, v = (t if t.stride(2) == 1 else t.contiguous() for t in (q, k, v))
    g = g if g.dim() == 2 or g.stride(2) == 1 else g.contiguous()
    strides = [s for t in (q, k, v, g) for s in t.stride()[:2]]
    strides += [0, 0] if beta is None else beta.stride()
    strides += [0, 0, 0] if rates is None else rates.stride()
    return [q, k, v, g, beta, rates], strides
