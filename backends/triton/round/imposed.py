"""Imposed acceptance, one program per request. Twin: `specdec.core.functional.verify.impose_acceptance`."""

import torch
import triton
import triton.language as tl

from specdec.backends.triton.launch.relaunch import early, wait_for_others
from specdec.backends.triton.launch.sizes import next_power_of_2
from specdec.backends.triton.round.walk import VerifyOutput


@triton.jit
def _impose_kernel(
    rates,
    draws,
    nodes,
    accept_lens,
    tokens,
    invalid,
    out_index,
    out_lens,
    out_tokens,
    D: tl.constexpr,
    W: tl.constexpr,
    BLOCK_W: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_others(PDL, True)
    request = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, BLOCK_W)
    rate = tl.load(rates + c, mask=c < W - 1, other=-1.0)
    num_kept = tl.sum((tl.load(draws + request) < rate).to(tl.int32))
    num_kept = tl.where(tl.load(invalid + request), 0, num_kept)
    draft = tl.load(nodes + request * D + D - W + 1 + c, mask=c < W - 1, other=-1)
    bonus = tl.load(tokens + request * W + tl.load(accept_lens + request) - 1)
    at = request * W + c
    node = tl.where(c > 0, c + D - W, 0).to(tl.int64)
    tl.store(out_index + at, tl.where(c <= num_kept, node, -1), mask=c < W)
    tl.store(out_tokens + at, tl.where(c < num_kept, draft, tl.where(c == num_kept, bonus, -1)), mask=c < W)
    tl.store(out_lens + request, (num_kept + 1).to(tl.int64))


def impose(verified: VerifyOutput, nodes: torch.Tensor, rates: torch.Tensor, draws: torch.Tensor) -> VerifyOutput:
    """Impose acceptance on `verified`, of trees with tokens `nodes` [bs, D] int64; rates [S] and draws [bs] float64."""
    accept_lens, tokens, invalid = (t.contiguous() for t in verified[1:])
    (bs, width), num_nodes = tokens.shape, nodes.shape[1]
    made = [torch.empty_like(t) for t in (tokens, accept_lens, tokens)]
    _impose_kernel[(bs,)](
        rates,
        draws.contiguous(),
        nodes.contiguous(),
        accept_lens,
        tokens,
        invalid,
        *made,
        D=num_nodes,
        W=width,
        BLOCK_W=next_power_of_2(width),
        num_warps=1,
        **early(),
    )
    return made[0], made[1], made[2], invalid
