"""The draft tree on the device: growth and re-rank, one program per request.

Twins: `specdec.core.functional.tree.grow` and `build`.
Candidates are ranked by counting better ones, which is stable, bounded and needs no sort: keys are unique.
"""

import torch
import triton
import triton.language as tl

from specdec.backends.triton.launch.sizes import next_power_of_2
from specdec.backends.triton.sampling.keys import order_key
from specdec.core.config import num_words


@triton.jit
def _child_scores(log_probs, parent_scores, request, j, K: tl.constexpr, C: tl.constexpr):
    """Return the cumulative scores of children j of all parents, none above its parent's; NaN becomes -inf."""
    is_child = j < K * C
    log_prob = tl.load(log_probs + request * K * C + j, mask=is_child, other=float("-inf"))
    parent = tl.load(parent_scores + request * K + j // C, mask=is_child, other=float("-inf"))
    score = parent + tl.where(log_prob > 0, 0.0, log_prob)
    return tl.where(score != score, float("-inf"), score)


@triton.jit
def _child_key(score, j, KEEPS_FIRST: tl.constexpr):
    """Return the keys by which children j rank; with KEEPS_FIRST the first one ranks highest."""
    key = order_key(score, j)
    if KEEPS_FIRST:
        key = tl.where(j == 0, tl.full([], 0x7FFFFFFFFFFFFFFF, tl.int64), key)
    return key


@triton.jit(do_not_specialize=["first_name"])
def _grow_kernel(
    log_probs,
    tokens,
    parent_scores,
    names,
    bits,
    own_bits,
    scores,
    parents,
    next_tokens,
    next_scores,
    next_names,
    next_bits,
    above,
    first_name,
    K: tl.constexpr,
    C: tl.constexpr,
    TOPK: tl.constexpr,
    W: tl.constexpr,
    KEEPS_FIRST: tl.constexpr,
    BLOCK_J: tl.constexpr,
    BLOCK_I: tl.constexpr,
):
    request = tl.program_id(0).to(tl.int64)
    j = tl.arange(0, BLOCK_J)
    is_child = j < K * C
    score = _child_scores(log_probs, parent_scores, request, j, K, C)
    key = _child_key(score, j, KEEPS_FIRST)
    rank = tl.zeros([BLOCK_J], tl.int32)
    for base in range(0, K * C, BLOCK_I):
        i = base + tl.arange(0, BLOCK_I)
        other = _child_key(_child_scores(log_probs, parent_scores, request, i, K, C), i, KEEPS_FIRST)
        rank += tl.sum(((other[None, :] > key[:, None]) & (i[None, :] < K * C)).to(tl.int32), 1)
    parent = j // C
    tl.store(scores + request * K * C + j, score, mask=is_child)
    tl.store(
        parents + request * K * C + j, tl.load(names + request * K + parent, mask=is_child, other=0), mask=is_child
    )
    is_kept = is_child & (rank < TOPK)
    at = request * TOPK + rank
    tl.store(next_tokens + at, tl.load(tokens + request * K * C + j, mask=is_kept, other=0), mask=is_kept)
    tl.store(next_scores + at, score, mask=is_kept)
    tl.store(next_names + at, (first_name + j).to(tl.int64), mask=is_kept)
    tl.store(above + at, parent.to(tl.int64), mask=is_kept)
    for word in tl.static_range(W):
        seen = tl.load(bits + (request * K + parent) * W + word, mask=is_kept, other=0)
        own = tl.load(own_bits + rank * W + word, mask=is_kept, other=0)
        tl.store(next_bits + at * W + word, seen | own, mask=is_kept)


@triton.jit
def _build_kernel(
    root,
    tokens,
    log_probs,
    parents,
    depths,
    node_of,
    out_tokens,
    out_parents,
    out_depths,
    out_bits,
    N: tl.constexpr,
    D: tl.constexpr,
    W: tl.constexpr,
    NUM_JUMPS: tl.constexpr,
    BLOCK_J: tl.constexpr,
    BLOCK_I: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    request = tl.program_id(0).to(tl.int64)
    num_before = 0
    for base_j in range(0, N, BLOCK_J):
        j = base_j + tl.arange(0, BLOCK_J)
        key = order_key(tl.load(log_probs + request * N + j, mask=j < N, other=float("-inf")), j)
        rank = tl.zeros([BLOCK_J], tl.int32)
        for base in range(0, N, BLOCK_I):
            i = base + tl.arange(0, BLOCK_I)
            other = order_key(tl.load(log_probs + request * N + i, mask=i < N, other=float("-inf")), i)
            rank += tl.sum(((other[None, :] > key[:, None]) & (i[None, :] < N)).to(tl.int32), 1)
        is_selected = (rank < D - 1) & (j < N)
        node = num_before + tl.cumsum(is_selected.to(tl.int32))  # creation order, from 1
        num_before += tl.sum(is_selected.to(tl.int32))
        tl.store(node_of + request * N + j, tl.where(is_selected, node, 0), mask=j < N)
        at = request * D + node
        tl.store(out_tokens + at, tl.load(tokens + request * N + j, mask=is_selected, other=0), mask=is_selected)
        tl.store(out_parents + at, tl.load(parents + request * N + j, mask=is_selected, other=0), mask=is_selected)
        tl.store(out_depths + at, tl.load(depths + j, mask=is_selected, other=0), mask=is_selected)
    tl.debug_barrier()  # from here on, threads read what others have stored

    n = tl.arange(0, BLOCK_D)
    is_draft = (n > 0) & (n < D)
    candidate = tl.load(out_parents + request * D + n, mask=is_draft, other=-1)
    has_parent = is_draft & (candidate >= 0)
    parent = tl.load(node_of + request * N + candidate, mask=has_parent, other=0)
    tl.debug_barrier()  # candidates are read before nodes take their place
    tl.store(out_parents + request * D + n, parent.to(tl.int64), mask=n < D)
    tl.store(out_tokens + request * D, tl.load(root + request))
    tl.store(out_depths + request * D, tl.zeros([], tl.int64))
    # Pointer jumping: after k steps a node knows the nearest 2**k nodes of its path; the root jumps to itself.
    for word in tl.static_range(W):
        bits = tl.where(n // 64 == word, tl.full([BLOCK_D], 1, tl.int64) << (n % 64).to(tl.int64), 0)
        jump = parent
        for _ in tl.static_range(NUM_JUMPS):
            bits = bits | tl.gather(bits, jump, 0)
            jump = tl.gather(jump, jump, 0)
        tl.store(out_bits + (request * D + n) * W + word, bits, mask=n < D)


def grow(
    log_probs: torch.Tensor,
    tokens: torch.Tensor,
    parent_scores: torch.Tensor,
    names: torch.Tensor,
    bits: torch.Tensor,
    own_bits: torch.Tensor,
    first_name: int,
    keeps_first: bool = False,
) -> tuple[torch.Tensor, ...]:
    """Return scores and parents [bs, K*C] of the children, and tokens, scores, names [bs, topk], bits [bs, topk, W] and
    parents [bs, topk] of the best.

    log_probs [bs, K, C] and parent_scores [bs, K], float32; tokens [bs, K*C], names [bs, K], bits [bs, K, W] and
    own_bits [topk, W], int64.
    """
    (bs, k, c), (topk, words), device = log_probs.shape, own_bits.shape, log_probs.device
    scores = torch.empty(bs, k * c, dtype=torch.float32, device=device)
    parents = torch.empty(bs, k * c, dtype=torch.int64, device=device)
    next_tokens, next_names, above = torch.empty(3, bs, topk, dtype=torch.int64, device=device)
    next_scores = torch.empty(bs, topk, dtype=torch.float32, device=device)
    next_bits = torch.empty(bs, topk, words, dtype=torch.int64, device=device)
    _grow_kernel[(bs,)](
        *(t.contiguous() for t in (log_probs, tokens, parent_scores, names, bits, own_bits)),
        scores,
        parents,
        next_tokens,
        next_scores,
        next_names,
        next_bits,
        above,
        first_name,
        K=k,
        C=c,
        TOPK=topk,
        W=words,
        KEEPS_FIRST=keeps_first,
        BLOCK_J=next_power_of_2(k * c),
        BLOCK_I=max(1, min(16, 16384 // next_power_of_2(k * c))),  # as many pairs as registers hold
        num_warps=8 if k * c > 512 else 4,
    )
    return scores, parents, next_tokens, next_scores, next_names, next_bits, above


def build(
    root: torch.Tensor,
    tokens: torch.Tensor,
    log_probs: torch.Tensor,
    parents: torch.Tensor,
    depths: torch.Tensor,
    *,
    num_draft_tokens: int,
    num_steps: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return tokens, parents, depths [bs, D] and ancestor bits [bs, D, W], int64, of the root and the best D-1
    candidates.

    root [bs], tokens and parents [bs, N], depths [N] int64; log_probs [bs, N] float32.
    """
    bs, num_candidates = tokens.shape
    words = num_words(num_draft_tokens)
    shapes = [(bs, num_draft_tokens)] * 3 + [(bs, num_draft_tokens, words)]
    tree = [torch.empty(shape, dtype=torch.int64, device=tokens.device) for shape in shapes]
    _build_kernel[(bs,)](
        *(t.contiguous() for t in (root, tokens, log_probs, parents, depths)),
        torch.empty(bs, num_candidates, dtype=torch.int32, device=tokens.device),
        *tree,
        N=num_candidates,
        D=num_draft_tokens,
        W=words,
        NUM_JUMPS=num_steps.bit_length(),
        BLOCK_J=min(512, next_power_of_2(num_candidates)),
        BLOCK_I=16,
        BLOCK_D=next_power_of_2(num_draft_tokens),
        num_warps=8,
    )
    return tree[0], tree[1], tree[2], tree[3]
