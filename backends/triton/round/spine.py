"""Trees with a drawn path (the spine): its tokens among candidates, and verification; one program per request.

Twins: `specdec.core.functional.spine.put_first` and `verify.verify_spine` beside it, which writes laws.
Here the first kernel follows the spine to the node after which a drawn token is rejected, the second sums the residual
of the law there, and the third walks on from that node as in a tree of point masses.
"""

import torch
import triton
import triton.language as tl

from specdec.backends.triton.launch.sizes import next_power_of_2
from specdec.backends.triton.round.path import (
    VerifyOutput,
    empty_notes,
    empty_output,
    exclude,
    is_law,
    last_drawn,
    store_output,
    walk_down,
)
from specdec.backends.triton.sampling.draws import bonus_parts, draw_bonus, masses, note_draw

_FIELDS = tl.constexpr(4)  # of a block of `bonus_parts`; the second one is the mass of the residual


@triton.jit
def _put_first_kernel(
    drawn,
    tokens,
    log_probs,
    own,
    token_stride,
    log_prob_stride,
    K: tl.constexpr,
    BLOCK_K: tl.constexpr,
    ACCEPTED: tl.constexpr,
    REFUSED: tl.constexpr,
    HAS_OWN: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    k = tl.arange(0, BLOCK_K)
    tokens += row * token_stride + k
    log_probs += row * log_prob_stride + k
    token = tl.load(tokens, mask=k < K, other=-1)
    log_prob = tl.load(log_probs, mask=k < K, other=0.0)
    first = tl.load(drawn + row)
    place = tl.min(tl.where(token == first, k, K - 1))
    token = tl.where(k == place, tl.sum(tl.where(k == 0, token, 0)), token)
    log_prob = tl.where(k == place, tl.sum(tl.where(k == 0, log_prob, 0.0)), log_prob)
    if HAS_OWN:
        log_prob = tl.where(k == 0, tl.load(own + row), log_prob)
    else:
        log_prob = tl.where(k == 0, ACCEPTED, log_prob + REFUSED)
    tl.store(tokens, tl.where(k == 0, first, token), mask=k < K)
    tl.store(log_probs, log_prob, mask=k < K)


@triton.jit
def _first_of_depths(depths, n, c, D: tl.constexpr):
    """Return the first node of each depth c among nodes n: the spine."""
    depth = tl.load(depths + n, mask=n < D, other=-1)
    return tl.min(tl.where(depth[None, :] == c[:, None], n[None, :], D - 1), 1)


@triton.jit
def _drawn_kernel(
    probs,
    mass,
    draft_probs,
    draft_mass,
    tokens,
    depths,
    uniforms,
    rows,
    scales,
    S: tl.constexpr,
    D: tl.constexpr,
    W: tl.constexpr,
    V: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_W: tl.constexpr,
):
    request = tl.program_id(0).to(tl.int64)
    n, c = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_W)
    is_draft = (c > 0) & (c < W)
    node = _first_of_depths(depths + request * D, n, c, D)
    above = _first_of_depths(depths + request * D, n, c - 1, D)
    token = tl.load(tokens + request * D + node, mask=is_draft, other=0)
    u = tl.load(uniforms + request * D + node, mask=is_draft, other=0.0)
    law, draft_law = request * D + above, request * S + c - 1
    p_total = tl.load(mass + law, mask=is_draft, other=1.0)
    q_total = tl.load(draft_mass + draft_law, mask=is_draft, other=0.0)
    p = tl.load(probs + law * V + token, mask=is_draft, other=0.0).to(tl.float64) / p_total
    q = tl.load(draft_probs + draft_law * V + token, mask=is_draft, other=0.0).to(tl.float64)
    last, draft_scale = last_drawn(p, q, q_total, u, c, W)
    end = tl.sum(tl.where(c == last, node, 0))
    end_mass = tl.load(mass + request * D + end)
    law_scale = 1.0 / tl.where(is_law(end_mass), end_mass, 1.0)
    draft_scale = tl.where(is_law(end_mass), draft_scale, 0.0)
    draft_row = request * S + tl.minimum(last, S - 1)
    note_draw(rows, scales, request, request * D + end, draft_row, 0, law_scale, draft_scale, 0.0)


@triton.jit
def _spine_kernel(
    probs,
    mass,
    draft_probs,
    tokens,
    parents,
    depths,
    uniforms,
    drawn_rows,
    drawn_scales,
    parts,
    excluded,
    rows,
    scales,
    accept_index,
    accept_lens,
    out_tokens,
    out_invalid,
    num_blocks,
    D: tl.constexpr,
    W: tl.constexpr,
    V: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_W: tl.constexpr,
    SLOTS: tl.constexpr,
):
    request = tl.program_id(0).to(tl.int64)
    n, c = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_W)
    is_node, is_draft = n < D, (n > 0) & (n < D)
    token = tl.load(tokens + request * D + n, mask=is_node, other=-1)
    parent = tl.load(parents + request * D + n, mask=is_node, other=-1)
    total = tl.load(mass + request * D + n, mask=is_node, other=1.0)
    u = tl.load(uniforms + request * D + n, mask=is_node, other=0.0)
    at_parent = tl.load(probs + (request * D + parent) * V + token, mask=is_draft, other=0.0).to(tl.float64)

    # After the last accepted token, the target's law is the residual, (law - draft)+, if that has mass.
    end = (tl.load(drawn_rows + request * 3) - request * D).to(tl.int32)
    draft_row = tl.load(drawn_rows + request * 3 + 1)
    law_scale, draft_scale = tl.load(drawn_scales + request * 3), tl.load(drawn_scales + request * 3 + 1)
    b = tl.arange(0, SLOTS)
    left = tl.sum(tl.load(parts + (request * num_blocks + b) * _FIELDS + 1, mask=b < num_blocks, other=0.0))
    left = tl.where(draft_scale > 0, left, 0.0)
    refused = tl.where(left > 0, end, -1)  # the node with that law
    is_sibling = is_draft & (parent == refused)
    q = tl.load(draft_probs + draft_row * V + token, mask=is_sibling, other=0.0).to(tl.float64) * draft_scale
    at_parent = tl.where(is_sibling, tl.maximum(at_parent * law_scale - q, 0.0), at_parent)
    total = tl.where(n == refused, left, total)

    last = tl.load(depths + request * D + end).to(tl.int32)
    path = tl.where(c <= last, _first_of_depths(depths + request * D, n, c, D), -1)
    path, current = walk_down(path, end, last + 1, at_parent, parent, total, u, is_draft, n, c, W, BLOCK_D)
    num_rejected = exclude(excluded + request * D, token, is_draft & (parent == current))
    store_output(path, token, is_law(total), n, c, request, accept_index, accept_lens, out_tokens, out_invalid, W)
    law_scale = tl.where(current == refused, law_scale, 1.0)
    draft_scale = tl.where(current == refused, draft_scale, 0.0)
    u_bonus = tl.sum(tl.where(n == 0, u, 0.0))
    note_draw(rows, scales, request, request * D + current, draft_row, num_rejected, law_scale, draft_scale, u_bonus)


def put_first(
    drawn: torch.Tensor,
    tokens: torch.Tensor,
    log_probs: torch.Tensor,
    own: torch.Tensor | None,
    ranks: tuple[float, float],
) -> None:
    """Put drawn [n] int64 in front of tokens [n, K] int64 (last dim dense), and `own` [n] of log_probs [n, K] float32.

    ranks: without `own`, the score of the drawn tokens and what is added to that of the others.
    """
    assert tokens.stride(1) == log_probs.stride(1) == 1, "candidates need a dense last dim"
    (num_rows, k), (accepted, refused) = tokens.shape, ranks
    _put_first_kernel[(num_rows,)](
        drawn.contiguous(),
        tokens,
        log_probs,
        log_probs if own is None else own.contiguous(),
        tokens.stride(0),
        log_probs.stride(0),
        K=k,
        BLOCK_K=next_power_of_2(k),
        ACCEPTED=accepted,
        REFUSED=refused,
        HAS_OWN=own is not None,
        num_warps=1,
    )


def verify_spine(
    probs: torch.Tensor,
    draft_probs: torch.Tensor,
    tokens: torch.Tensor,
    parents: torch.Tensor,
    depths: torch.Tensor,
    num_steps: int,
    uniforms: torch.Tensor,
) -> VerifyOutput:
    """Verify a tree whose first nodes of each depth were drawn from draft_probs. Returns as `walk.verify_greedy`.

    probs [bs, D, V] and draft_probs [bs, S, V] float, tokens, parents, depths [bs, D] int64, uniforms [bs, D] float64.
    """
    verified, shape = empty_output(tokens, num_steps)
    probs, draft_probs, uniforms = probs.contiguous(), draft_probs.contiguous(), uniforms.contiguous()
    tokens, parents, depths = tokens.contiguous(), parents.contiguous(), depths.contiguous()
    bs, vocab, mass = probs.shape[0], probs.shape[2], masses(probs)
    drawn, noted, excluded = empty_notes(tokens), empty_notes(tokens), torch.empty_like(tokens)
    _drawn_kernel[(bs,)](
        probs,
        mass,
        draft_probs,
        masses(draft_probs),
        tokens,
        depths,
        uniforms,
        *drawn,
        **shape,
        S=draft_probs.shape[1],
        V=vocab,
    )
    parts = bonus_parts(probs, draft_probs, excluded, drawn)
    tree = (tokens, parents, depths, uniforms)
    _spine_kernel[(bs,)](
        probs,
        mass,
        draft_probs,
        *tree,
        *drawn,
        parts,
        excluded,
        *noted,
        *verified,
        parts.shape[1],
        **shape,
        V=vocab,
        SLOTS=next_power_of_2(parts.shape[1]),
    )
    draw_bonus(probs, draft_probs, excluded, noted, verified)
    return verified
