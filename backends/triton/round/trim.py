"""Ends a round, one program per request: cuts accepted tokens at stop ids and limits, then advances the state.

Twins: `trim`, `emit` and `mail` of `specdec.core.functional.torch_ops.TORCH_OPS`. Only the dummy row may repeat.
"""

import torch
import triton
import triton.language as tl

from specdec.backends.triton.launch.relaunch import cached_launch, early, wait_for_others
from specdec.backends.triton.launch.sizes import cdiv, next_power_of_2
from specdec.backends.triton.round.walk import VerifyOutput


@triton.jit
def _trim_kernel(
    rows,
    stop_ids,
    remaining,
    accept_index,
    accept_lens,
    tokens,
    invalid,
    out_index,
    out_lens,
    out_tokens,
    out_invalid,
    W: tl.constexpr,
    NUM_STOPS: tl.constexpr,
    BLOCK_W: tl.constexpr,
    BLOCK_STOPS: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_others(PDL, True)
    request = tl.program_id(0).to(tl.int64)
    row = tl.load(rows + request)
    c, s = tl.arange(0, BLOCK_W), tl.arange(0, BLOCK_STOPS)
    at = request * W + c
    token = tl.load(tokens + at, mask=c < W, other=-1)
    node = tl.load(accept_index + at, mask=c < W, other=-1)
    stops = tl.load(stop_ids + row * NUM_STOPS + s, mask=s < NUM_STOPS, other=-1)
    left = tl.load(remaining + row)
    # Padding of tokens equals padding of stop ids, but only past accept_lens, where a stop changes nothing.
    is_stop = tl.max((token[:, None] == stops[None, :]).to(tl.int32), 1) > 0
    until_stop = tl.min(tl.where(is_stop & (c < W), c + 1, W + 1)).to(tl.int64)
    accept_len = tl.load(accept_lens + request)
    length = tl.minimum(tl.minimum(accept_len, until_stop), tl.maximum(left, 0))
    is_invalid = tl.load(invalid + request) & (length == accept_len)
    is_over = (until_stop <= length) | (left <= length) | is_invalid
    tl.store(out_index + at, tl.where(c < length, node, -1), mask=c < W)
    tl.store(out_tokens + at, tl.where(c < length, token, -1), mask=c < W)
    tl.store(out_lens + request, length)
    tl.store(out_invalid + request, is_invalid)
    tl.store(remaining + row, tl.where(is_over, 0, left - length))


@triton.jit(do_not_specialize=["width"])
def _emit_kernel(
    rows,
    seq_lens,
    roots,
    remaining,
    history,
    accept_lens,
    tokens,
    invalid,
    out,
    width,
    W: tl.constexpr,
    BLOCK_W: tl.constexpr,
    MOVES: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_others(PDL, False)
    request = tl.program_id(0).to(tl.int64)
    row = tl.load(rows + request)
    c = tl.arange(0, BLOCK_W)
    token = tl.load(tokens + request * W + c, mask=c < W, other=-1)
    length = tl.load(accept_lens + request)
    last = tl.sum(tl.where(c == tl.maximum(length - 1, 0), token, 0))
    tl.store(roots + row, tl.maximum(last, 0))
    start = tl.load(seq_lens + row)
    if MOVES:
        tl.store(seq_lens + row, start + length)
        start += 1
    is_kept = (c < W) & (token >= 0) & (start + c < width)
    tl.store(history + row * width + start + c, token.to(tl.int32), mask=is_kept)
    at = out + request * (W + 3)
    tl.store(at + c, token, mask=c < W)
    tl.store(at + W, length)
    tl.store(at + W + 1, tl.load(invalid + request).to(tl.int64))
    tl.store(at + W + 2, (tl.load(remaining + row) == 0).to(tl.int64))


@triton.jit(do_not_specialize=["num"], do_not_specialize_on_alignment=["results"])
def _mail_kernel(results, host, num, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(host + i, tl.load(results + i, mask=i < num), mask=i < num)


def trim(verified: VerifyOutput, rows: torch.Tensor, stop_ids: torch.Tensor, remaining: torch.Tensor) -> VerifyOutput:
    """Cut `verified` of `rows` [bs] at stop ids and limits.

    stop_ids [num_rows, num_stops] int64, -1 padded; remaining [num_rows] int64 is lowered, to 0 for finished rows.
    """
    given = [t.contiguous() for t in verified]
    made = [torch.empty_like(t) for t in given]
    bs, width = given[2].shape
    _trim_kernel[(bs,)](
        rows,
        stop_ids,
        remaining,
        *given,
        *made,
        W=width,
        NUM_STOPS=stop_ids.shape[1],
        BLOCK_W=next_power_of_2(width),
        BLOCK_STOPS=next_power_of_2(stop_ids.shape[1]),
        num_warps=1,
        **early(),
    )
    return made[0], made[1], made[2], made[3]


def emit(
    verified: VerifyOutput,
    rows: torch.Tensor,
    seq_lens: torch.Tensor,
    roots: torch.Tensor,
    remaining: torch.Tensor,
    history: torch.Tensor,
    moves: bool,
) -> torch.Tensor:
    """Return the results of `verified`, already trimmed, for the host, [bs, W+3] int64.

    Updates `roots` [num_rows] int64 and, if `moves`, `seq_lens` in place; tokens go to history [num_rows, width] int32.
    """
    given = [t.contiguous() for t in verified[1:]]
    bs, width = given[1].shape
    out = torch.empty(bs, width + 3, dtype=torch.int64, device=rows.device)
    _emit_kernel[(bs,)](
        rows,
        seq_lens,
        roots,
        remaining,
        history,
        *given,
        out,
        history.shape[1],
        W=width,
        BLOCK_W=next_power_of_2(width),
        MOVES=moves,
        num_warps=1,
        **early(),
    )
    return out


def mail(results: torch.Tensor, host: torch.Tensor) -> None:
    """Write results [n, W+3] int64 to `host`, dense, in pinned memory; a CUDA copy between two graphs takes 6 µs
    longer."""
    num, block = results.numel(), 256
    cached_launch(_mail_kernel, num_warps=1)((cdiv(num, block),), results.contiguous(), host, num, BLOCK=block)
