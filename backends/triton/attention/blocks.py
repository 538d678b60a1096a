"""Body of the attention loops: takes a block of keys into a running softmax (FlashAttention-2, arXiv 2307.08691)."""

import triton
import triton.language as tl


@triton.jit
def _dot(a, b, acc, UPCAST: tl.constexpr):
    """Return acc + a @ b. UPCAST: the interpreter has no bf16 product (numpy has no bf16); widening is exact."""
    if UPCAST:
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, acc, input_precision="ieee")


@triton.jit
def _softmax_step(
    q,
    k,
    v,
    m,
    mass,
    acc,
    visible,
    scale_log2,
    cap_log2,
    cap_scale,
    MASKED: tl.constexpr,
    CAPPED: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """Take one block of keys into the running maximum m, mass and accumulator acc (logits in units of log2)."""
    s = _dot(q, k, tl.zeros([q.shape[0], k.shape[1]], tl.float32), UPCAST)
    if CAPPED:
        e = tl.exp2(s * cap_scale)  # exp(2x), so that tanh(x) = 1 - 2 / (e + 1) is right at both ends
        s = cap_log2 * (1 - 2 / (e + 1))
        scale_log2 = 1.0
    if MASKED:
        s = tl.where(visible, s, float("-inf"))
    m_new = tl.maximum(m, tl.max(s, 1) * scale_log2)  # scales are positive
    m_safe = tl.where(m_new == float("-inf"), 0.0, m_new) if MASKED else m_new  # rows that have seen nothing yet
    p = tl.exp2(s * scale_log2 - m_safe[:, None])
    shrink = tl.exp2(m - m_safe)
    acc = _dot(p.to(v.dtype), v, acc * shrink[:, None], UPCAST)
    return m_new, mass * shrink + tl.sum(p, 1), acc


@triton.jit
def slots_of(table, key, kv_end):
    """Return slots of keys, int32; keys past the last get its slot, which the request owns, and are masked later."""
    return tl.load(table + tl.minimum(key, kv_end - 1))


@triton.jit
def _rows(pool, slots, d, STRIDE: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr):
    """Load K or V of slots, [BLOCK_N, BLOCK]; pool points at the head."""
    at = pool + slots[:, None].to(tl.int64) * STRIDE + d
    if DIM == BLOCK:
        return tl.load(at)
    return tl.load(at, mask=d < DIM, other=0.0)


@triton.jit
def take_block(
    q,
    k_head,
    v_head,
    slots,
    d,
    dv,
    m,
    mass,
    acc,
    visible,
    scale_log2,
    cap_log2,
    cap_scale,
    K_STRIDE: tl.constexpr,
    V_STRIDE: tl.constexpr,
    QK_DIM: tl.constexpr,
    V_DIM: tl.constexpr,
    MASKED: tl.constexpr,
    CAPPED: tl.constexpr,
    UPCAST: tl.constexpr,
    FENCED: tl.constexpr,
):
    """Load K and V of `slots` [BLOCK_N] and take them in; k_head and v_head point at the head, d and dv are columns.

    visible [BLOCK_M, BLOCK_N]: only used if MASKED. FENCED: put a fence between copies to shared memory and wgmma,
    which reads it through another proxy.
    """
    k = _rows(k_head, slots, d, K_STRIDE, QK_DIM, d.shape[0])
    v = _rows(v_head, slots, dv, V_STRIDE, V_DIM, dv.shape[0])
    if FENCED:
        tl.inline_asm_elementwise(
            "fence.proxy.async.shared::cta; // $0", "=r", [], dtype=tl.int32, is_pure=False, pack=1
        )
    return _softmax_step(
        q, tl.trans(k), v, m, mass, acc, visible, scale_log2, cap_log2, cap_scale, MASKED, CAPPED, UPCAST
    )


@triton.jit
def visible_keys(
    key,
    kv_end,
    prefix,
    is_row,
    node,
    bits,
    bits_at,
    q_pos,
    window,
    tail_positions,
    WORDS: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_TAIL_POSITIONS: tl.constexpr,
):
    """Return the mask of the keys each row sees, [BLOCK_M, BLOCK_N] bool. key [BLOCK_N] int32: slot table positions.

    For each row [BLOCK_M]: node int32, its own tail index; q_pos int32, its position. WORDS of ancestor bits a row, 0
    for a chain: of one word `bits` int64 holds it, of more `bits_at` points at the first, and words are read block by
    block. tail_positions: pointer to those of the request.
    """
    is_key = key < kv_end
    tail = key - prefix  # tail index of each key, negative in the prefix
    if WORDS == 1:
        visible = (tail[None, :] < 0) | (((bits[:, None] >> tl.maximum(tail, 0)[None, :]) & 1) != 0)
    elif WORDS > 1:
        in_tail = (tail >= 0)[None, :] & is_key[None, :] & is_row[:, None]
        word = tl.load(bits_at[:, None] + (tail // 64)[None, :], mask=in_tail, other=0)
        visible = (tail[None, :] < 0) | (((word >> (tl.maximum(tail, 0) % 64)[None, :]) & 1) != 0)
    else:
        visible = tail[None, :] <= node[:, None]
    visible = visible & is_key[None, :] & is_row[:, None]
    if HAS_WINDOW:
        k_pos = key
        if HAS_TAIL_POSITIONS:
            in_tail = tl.load(tail_positions + tail, mask=is_key & (tail >= 0), other=0)
            k_pos = tl.where(tail < 0, key, in_tail.to(tl.int32))
        visible = visible & (q_pos[:, None] - k_pos[None, :] < window)
    return visible
