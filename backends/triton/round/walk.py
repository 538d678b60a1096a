"""Verification: finds the draft tokens that the target accepts, one program per request.

Twins: `specdec.core.functional.verify.verify_greedy`, `_tree`, `_chain`.
A walk ends after num_steps iterations, whatever the logits are. A law that is not finite marks its request
`invalid`; no program reads another request's row.
"""

import torch
import triton
import triton.language as tl

from specdec.backends.triton.launch.relaunch import early, wait_for_others
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
from specdec.backends.triton.sampling.draws import draw_bonus, masses, note_draw
from specdec.backends.triton.sampling.top import row_max


@triton.jit
def _greedy_kernel(
    best,
    target,
    tokens,
    parents,
    accept_index,
    accept_lens,
    out_tokens,
    out_invalid,
    D: tl.constexpr,
    W: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_W: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_others(PDL, True)
    request = tl.program_id(0).to(tl.int64)
    n, c = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_W)
    is_node = n < D
    token = tl.load(tokens + request * D + n, mask=is_node, other=-1)
    parent = tl.load(parents + request * D + n, mask=is_node, other=-1)
    wanted = tl.load(target + request * D + n, mask=is_node, other=0)
    logit = tl.load(best + request * D + n, mask=is_node, other=0.0).to(tl.float32)
    path = tl.where(c == 0, 0, -1)
    current = 0
    for step in range(1, W):
        want = tl.sum(tl.where(n == current, wanted, 0))
        is_match = (parent == current) & (token == want) & (n > 0)  # the root is its own parent, not its own child
        child = tl.max(tl.where(is_match, n, -1))
        path = tl.where(c == step, child, path)
        current = tl.where(child >= 0, child, current)
    bonus = tl.sum(tl.where(n == current, wanted, 0))
    is_finite = (logit == logit) & (tl.abs(logit) != float("inf"))
    accept_len, invalid = store_output(
        path, token, is_finite, n, c, request, accept_index, accept_lens, out_tokens, out_invalid, W
    )
    tl.debug_barrier()  # the bonus overwrites a -1 that another thread has stored
    tl.store(out_tokens + request * W + accept_len - 1, tl.where(invalid, 0, bonus))


@triton.jit
def _tree_kernel(
    probs,
    mass,
    tokens,
    parents,
    uniforms,
    excluded,
    rows,
    scales,
    accept_index,
    accept_lens,
    out_tokens,
    out_invalid,
    D: tl.constexpr,
    W: tl.constexpr,
    V: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_W: tl.constexpr,
):
    request = tl.program_id(0).to(tl.int64)
    n, c = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_W)
    is_node = n < D
    token = tl.load(tokens + request * D + n, mask=is_node, other=-1)
    parent = tl.load(parents + request * D + n, mask=is_node, other=-1)
    total = tl.load(mass + request * D + n, mask=is_node, other=1.0)
    u = tl.load(uniforms + request * D + n, mask=is_node, other=0.0)
    is_draft = is_node & (n > 0)
    at_parent = tl.load(probs + (request * D + parent) * V + token, mask=is_draft, other=0.0).to(tl.float64)

    root = tl.zeros([], tl.int32)
    path, current = walk_down(tl.where(c == 0, 0, -1), root, 1, at_parent, parent, total, u, is_draft, n, c, W, BLOCK_D)
    num_rejected = exclude(excluded + request * D, token, is_draft & (parent == current))
    store_output(path, token, is_law(total), n, c, request, accept_index, accept_lens, out_tokens, out_invalid, W)
    u_bonus = tl.sum(tl.where(n == 0, u, 0.0))
    note_draw(rows, scales, request, request * D + current, 0, num_rejected, 1.0, 0.0, u_bonus)


@triton.jit
def _chain_kernel(
    probs,
    mass,
    draft_probs,
    draft_mass,
    tokens,
    uniforms,
    rows,
    scales,
    accept_index,
    accept_lens,
    out_tokens,
    out_invalid,
    W: tl.constexpr,
    V: tl.constexpr,
    BLOCK_W: tl.constexpr,
):
    request = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, BLOCK_W)
    is_node, is_draft = c < W, (c > 0) & (c < W)
    token = tl.load(tokens + request * W + c, mask=is_node, other=-1)
    total = tl.load(mass + request * W + c, mask=is_node, other=1.0)
    u = tl.load(uniforms + request * W + c, mask=is_node, other=0.0)
    # Draft c was drawn from law c-1 and is judged by the target's law after node c-1.
    q_total = tl.load(draft_mass + request * (W - 1) + c - 1, mask=is_draft, other=0.0)
    p_total = tl.load(mass + request * W + c - 1, mask=is_draft, other=1.0)
    p = tl.load(probs + (request * W + c - 1) * V + token, mask=is_draft, other=0.0).to(tl.float64) / p_total
    q = tl.load(draft_probs + (request * (W - 1) + c - 1) * V + token, mask=is_draft, other=0.0).to(tl.float64)
    last, next_scale = last_drawn(p, q, q_total, u, c, W)  # the deepest accepted node
    path = tl.where(c <= last, c, -1)
    store_output(path, token, is_law(total), c, c, request, accept_index, accept_lens, out_tokens, out_invalid, W)
    law_mass = tl.sum(tl.where(c == last, total, 0.0))
    law_scale = 1.0 / tl.where(is_law(law_mass), law_mass, 1.0)
    u_bonus = tl.sum(tl.where(c == 0, u, 0.0))
    draft_row = request * (W - 1) + tl.minimum(last, W - 2)
    note_draw(rows, scales, request, request * W + last, draft_row, 0, law_scale, next_scale, u_bonus)


def verify_greedy(logits: torch.Tensor, tokens: torch.Tensor, parents: torch.Tensor, num_steps: int) -> VerifyOutput:
    """Verify a chain or tree by argmax. logits [bs, D, V], tokens and parents [bs, D] int64.

    Returns accept_index [bs, S+1], accept_lens [bs], tokens [bs, S+1], all int64, and invalid [bs] bool.
    """
    best, target = row_max(logits.flatten(0, 1))
    verified, shape = empty_output(tokens, num_steps)
    _greedy_kernel[(tokens.shape[0],)](
        best, target, tokens.contiguous(), parents.contiguous(), *verified, **shape, num_warps=1, **early()
    )
    return verified


def verify_tree(
    probs: torch.Tensor, tokens: torch.Tensor, parents: torch.Tensor, num_steps: int, uniforms: torch.Tensor
) -> VerifyOutput:
    """Verify a tree by sampling. probs [bs, D, V] float, tokens and parents [bs, D] int64, uniforms [bs, D] float64.

    Returns as verify_greedy.
    """
    verified, shape = empty_output(tokens, num_steps)
    probs, excluded, noted = probs.contiguous(), torch.empty_like(tokens), empty_notes(tokens)
    inputs = (tokens.contiguous(), parents.contiguous(), uniforms.contiguous())
    _tree_kernel[(tokens.shape[0],)](
        probs, masses(probs), *inputs, excluded, *noted, *verified, **shape, V=probs.shape[-1]
    )
    draw_bonus(probs, None, excluded, noted, verified)
    return verified


def verify_chain(
    probs: torch.Tensor, draft_probs: torch.Tensor, tokens: torch.Tensor, uniforms: torch.Tensor
) -> VerifyOutput:
    """Verify a chain that was sampled from draft_probs. Returns as verify_greedy.

    probs [bs, S+1, V] and draft_probs [bs, S, V] float, tokens [bs, S+1] int64, uniforms [bs, S+1] float64.
    """
    width = tokens.shape[1]
    verified, shape = empty_output(tokens, width - 1)
    probs, draft_probs, tokens, noted = (*(x.contiguous() for x in (probs, draft_probs, tokens)), empty_notes(tokens))
    _chain_kernel[(tokens.shape[0],)](
        probs,
        masses(probs),
        draft_probs,
        masses(draft_probs),
        tokens,
        uniforms.contiguous(),
        *noted,
        *verified,
        W=width,
        V=probs.shape[-1],
        BLOCK_W=shape["BLOCK_W"],
    )
    draw_bonus(probs, draft_probs if width > 1 else None, tokens, noted, verified)
    return verified
