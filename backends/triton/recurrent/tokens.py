"""Device functions of the scan kernels: update the state of one head, [BLOCK_N keys, BLOCK_P values] in registers, by
one token."""

import triton
import triton.language as tl

from specdec.backends.recurrent import state_pool

EPS = tl.constexpr(state_pool.EPS)


@triton.jit
def load_decay(at, n, p, N: tl.constexpr, P: tl.constexpr, DECAY: tl.constexpr):
    """Load the log decay of a token in a head: one number, one per key n, or one per value p."""
    if DECAY == "head":
        return tl.load(at).to(tl.float32)
    elif DECAY == "key":
        return tl.load(at + n, mask=n < N, other=0.0).to(tl.float32)
    else:
        return tl.load(at + p, mask=p < P, other=0.0).to(tl.float32)


@triton.jit
def store_decay(at, value, n, p, is_first, N: tl.constexpr, P: tl.constexpr, DECAY: tl.constexpr):
    """Store what `load_decay` loads; is_first: p are a head's first values."""
    if DECAY == "head":
        tl.store(at, value, mask=is_first)
    elif DECAY == "key":
        tl.store(at + n, value, mask=(n < N) & is_first)
    else:
        tl.store(at + p, value, mask=p < P)


@triton.jit
def decayed(state, gap, rates, DECAY: tl.constexpr):
    """Return the state after log decay `gap` <= 0; if DECAY is "state", after rates * gap, with `rates` <= 0 <= gap."""
    if DECAY == "head":
        return state * tl.exp(gap)
    elif DECAY == "key":
        return state * tl.exp(gap)[:, None]
    else:
        return state * tl.exp(rates * gap[None, :])


@triton.jit
def written(state, k_n, u):
    """Return the state after u is written under k_n: one explicit FMA, so that all kernels round alike."""
    return tl.fma(k_n[:, None], u[None, :], state)


@triton.jit
def as_units(k_n, v_p, strength, AXIS: tl.constexpr):
    """Return the v and beta with which key k has the effect of the unit key c k with the given ones; see
    `recurrent.reference._units`. AXIS: that of keys."""
    c = tl.rsqrt(tl.sum(k_n * k_n, AXIS) + EPS)
    if AXIS == 1:
        v_p /= c[:, None]
    else:
        v_p /= c
    return v_p, strength * c * c


@triton.jit
def query_factor(q_n, SCALE: tl.constexpr, AXIS: tl.constexpr):
    """Return the factor that scales queries, along AXIS, to a norm of SCALE."""
    return SCALE * tl.rsqrt(tl.sum(q_n * q_n, AXIS) + EPS)


@triton.jit
def load_token(
    q, k, v, g, beta, token, head, key_head, n, p,
    q_t, q_h, k_t, k_h, v_t, v_h, g_t, g_h, beta_t, beta_h,
    N: tl.constexpr, P: tl.constexpr, DECAY: tl.constexpr, CORRECTED: tl.constexpr, SCALE: tl.constexpr,
):  # fmt: skip
    """Load q, k [BLOCK_N], v [BLOCK_P], log decay and beta of a token (int64), fp32; see `as_units` for a SCALE."""
    q_n = tl.load(q + token * q_t + key_head * q_h + n, mask=n < N, other=0.0).to(tl.float32)
    k_n = tl.load(k + token * k_t + key_head * k_h + n, mask=n < N, other=0.0).to(tl.float32)
    v_p = tl.load(v + token * v_t + head * v_h + p, mask=p < P, other=0.0).to(tl.float32)
    gap = load_decay(g + token * g_t + head * g_h, n, p, N, P, DECAY)
    strength = tl.zeros([], tl.float32)
    if CORRECTED:
        strength = tl.load(beta + token * beta_t + head * beta_h).to(tl.float32)
    if SCALE != 0.0:
        v_p, strength = as_units(k_n, v_p, strength, 0)
        q_n *= query_factor(q_n, SCALE, 0)
    return q_n, k_n, v_p, gap, strength


@triton.jit
def take_token(state, q_n, k_n, v_p, gap, strength, rates, DECAY: tl.constexpr, CORRECTED: tl.constexpr):
    """Return the state after a token, what the token writes under its key, and what its query reads."""
    state = decayed(state, gap, rates, DECAY)
    u = v_p
    if CORRECTED:
        u = strength * (v_p - tl.sum(state * k_n[:, None], 0))
    state = written(state, k_n, u)
    return state, u, tl.sum(state * q_n[:, None], 0)


@triton.jit
def take_node(
    state, tail_k, tail_u, tail_g, node, head, key_head, n, p, rates,
    H: tl.constexpr, G: tl.constexpr, N: tl.constexpr, P: tl.constexpr, WIDTH: tl.constexpr, DECAY: tl.constexpr,
):  # fmt: skip
    """Return the state after a node (int64) of a tail, as `take_token` left it; tails begin at the row.

    WIDTH: log decays of a head.
    """
    k_n = tl.load(tail_k + (node * G + key_head) * N + n, mask=n < N, other=0.0)
    u = tl.load(tail_u + (node * H + head) * P + p, mask=p < P, other=0.0)
    gap = load_decay(tail_g + (node * H + head) * WIDTH, n, p, N, P, DECAY)
    return written(decayed(state, gap, rates, DECAY), k_n, u)


@triton.jit
def lowest_bit(bits):
    """Return the index of the lowest set bit of a nonzero int64: the exponent of that power of two."""
    lowest = bits & -bits
    return (lowest.to(tl.float32).to(tl.int32, bitcast=True) >> 23 & 0xFF) - 127
