"""The arithmetic of every attention kernel: an online softmax (FlashAttention-2, arXiv 2307.08691) over blocks of keys,
and the fold of its chunks.

A state is the running maximum m [M] of logits in units of log2, the mass [M, MASS] and the values acc [M, V], fp32 and
not normalised. The bits of a row depend only on its keys, the block of each and the chunk of each block: sums over keys
are `tl.dot` products, which add in key order for any tile shape and number of warps; multiply-adds are explicit FMAs,
not left to the compiler; and a block or chunk without a key that the row sees leaves its state unchanged.
"""

import triton
import triton.language as tl

from specdec.backends.triton.launch.fences import fence_copies

MASS = tl.constexpr(16)  # equal columns of the mass: the smallest N of `tl.dot`


@triton.jit
def empty_state(M: tl.constexpr, V: tl.constexpr):
    """Return the state of rows that have seen no keys."""
    m = tl.full([M], float("-inf"), tl.float32)
    return m, tl.zeros([M, MASS], tl.float32), tl.zeros([M, V], tl.float32)


@triton.jit
def fold(total, state):
    """Return `total`, the state of all chunks so far, merged with the `state` of the next chunk.

    Masses may have fewer columns than MASS.
    """
    m_before, mass_before, acc_before = total
    m_next, mass_next, acc_next = state
    m = tl.maximum(m_before, m_next)
    m_safe = tl.where(m == float("-inf"), 0.0, m)
    before, after = tl.exp2(m_before - m_safe)[:, None], tl.exp2(m_next - m_safe)[:, None]
    return m, tl.fma(mass_before, before, mass_next * after), tl.fma(acc_before, before, acc_next * after)


@triton.jit
def result_of(total, sinks, head, is_row, HAS_SINKS: tl.constexpr):
    """Return the normalised output of rows, from their `total` and the sinks of their heads."""
    if HAS_SINKS:
        _m, mass, acc = total
        sink = tl.load(sinks + head, mask=is_row, other=0.0).to(tl.float32) * 1.4426950408889634
        total = fold(total, (sink, tl.full(mass.shape, 1.0, tl.float32), tl.zeros(acc.shape, tl.float32)))
    _m, mass, acc = total
    whole = tl.max(mass, 1)
    return acc / tl.where(whole == 0, 1.0, whole)[:, None]


@triton.jit
def _dot(a, b, acc, UPCAST: tl.constexpr):
    """Return acc + a @ b; fp32 takes three TF32 products on tensor cores, which lose 2^-22 of a term.

    UPCAST: the interpreter has no bf16 product (numpy has no bf16); widening is exact.
    """
    if UPCAST:
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, acc, input_precision="tf32x3")


@triton.jit
def _add_dot(a, b, acc, shrink, UPCAST: tl.constexpr):
    """Return acc * shrink + a @ b; in fp32 the product accumulates from zero and is then added to acc."""
    if a.dtype == tl.float32:
        return tl.fma(acc, shrink, _dot(a, b, tl.zeros_like(acc), UPCAST))
    return _dot(a, b, acc * shrink, UPCAST)


@triton.jit
def _softmax_step(s, v, state, visible, scales, MASKED: tl.constexpr, CAPPED: tl.constexpr, UPCAST: tl.constexpr):
    """Update `state` with one block of keys; s: products of queries and keys."""
    m, mass, acc = state
    scale_log2, cap_scale = scales
    if CAPPED:
        s = 1 - 2 / (tl.exp2(s * cap_scale) + 1)  # tanh(x) = 1 - 2 / (exp(2x) + 1) is right at both ends
    if MASKED:
        s = tl.where(visible, s, float("-inf"))
    m_new = tl.maximum(m, tl.max(s, 1) * scale_log2)  # scales are positive
    m_safe = tl.where(m_new == float("-inf"), 0.0, m_new) if MASKED else m_new  # rows that have seen no keys yet
    p = tl.exp2(tl.fma(s, scale_log2, -m_safe[:, None])).to(v.dtype)
    shrink = tl.exp2(m - m_safe)[:, None]
    ones = tl.full([v.shape[0], MASS], 1.0, tl.float32).to(v.dtype)
    mass = _add_dot(p, ones, mass, shrink, UPCAST)
    return m_new, mass, _add_dot(p, v, acc, shrink, UPCAST)  # the last product determines the warp layout of all


@triton.jit
def slots_of(table, key, kv_end):
    """Load the slots of keys, int32; keys past the last get its slot, which the request owns, and are masked later."""
    return tl.load(table + tl.minimum(key, kv_end - 1))


@triton.jit
def _rows(pool, slots, d, STRIDE: tl.constexpr, DIM: tl.constexpr):
    """Load K or V of slots, [BLOCK_N, columns d]; pool points at the head."""
    at = pool + slots[:, None].to(tl.int64) * STRIDE + d
    if d.shape[0] == DIM:
        return tl.load(at)
    return tl.load(at, mask=d < DIM, other=0.0)


@triton.jit
def query_tile(q_row, d, dv, is_row, QK_DIM: tl.constexpr, V_DIM: tl.constexpr, V_IN_K: tl.constexpr):
    """Load a tile of queries [BLOCK_M, columns d]; q_row [BLOCK_M] points at its rows. With V_IN_K return two tiles:
    the columns dv that multiply V, and the columns d behind them."""
    mask = is_row[:, None]
    if V_IN_K:
        rest = tl.load(q_row[:, None] + V_DIM + d, mask=mask & (d < QK_DIM - V_DIM), other=0.0)
        return tl.load(q_row[:, None] + dv, mask=mask & (dv < V_DIM), other=0.0), rest
    else:
        return (tl.load(q_row[:, None] + d, mask=mask & (d < QK_DIM), other=0.0),)


@triton.jit
def take_block(
    q,
    k_head,
    v_head,
    slots,
    d,
    dv,
    state,
    visible,
    scales,
    NUM_KV_HEADS: tl.constexpr,
    QK_DIM: tl.constexpr,
    V_DIM: tl.constexpr,
    MASKED: tl.constexpr,
    CAPPED: tl.constexpr,
    UPCAST: tl.constexpr,
    V_IN_K: tl.constexpr,
):
    """Load K and V of `slots` [BLOCK_N] and update `state`; k_head and v_head point at the head, d and dv are columns.

    q: of `query_tile`. V_IN_K: V is loaded once, and d are the columns of K behind it.
    visible [BLOCK_M, BLOCK_N]: only used if MASKED. scales: the factor from logits (if CAPPED, from their tanh) to
    units of log2, and the factor of logits within the softcap's tanh.
    """
    s = tl.zeros([q[0].shape[0], slots.shape[0]], tl.float32)
    if V_IN_K:
        v = _rows(k_head, slots, dv, NUM_KV_HEADS * QK_DIM, V_DIM)
        rest = _rows(k_head + V_DIM, slots, d, NUM_KV_HEADS * QK_DIM, QK_DIM - V_DIM)
        fence_copies(q[0].shape[0])
        s = _dot(q[1], tl.trans(rest), _dot(q[0], tl.trans(v), s, UPCAST), UPCAST)
    else:
        k = _rows(k_head, slots, d, NUM_KV_HEADS * QK_DIM, QK_DIM)
        v = _rows(v_head, slots, dv, NUM_KV_HEADS * V_DIM, V_DIM)
        fence_copies(q[0].shape[0])
        s = _dot(q[0], tl.trans(k), s, UPCAST)
    return _softmax_step(s, v, state, visible, scales, MASKED, CAPPED, UPCAST)


@triton.jit
def visible_keys(key, q_pos, limit, window, HAS_WINDOW: tl.constexpr):
    """Return the mask of the keys that each row sees, [BLOCK_M, BLOCK_N] bool; key [BLOCK_N], q_pos [BLOCK_M]:
    positions; limit [BLOCK_M]: each row's last visible position."""
    visible = key[None, :] <= limit[:, None]
    if HAS_WINDOW:
        visible = visible & (q_pos[:, None] - key[None, :] < window)
    return visible
