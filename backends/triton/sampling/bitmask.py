"""Packed masks of grammars on logits. Twins: `constrain` and `guided` in `specdec.core.functional.sampling`."""

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from specdec.backends.triton.launch.sizes import cdiv

if TYPE_CHECKING:
    from specdec.core.functional.sampling import Guide

_WORDS = 64  # of a mask, per program
_TOKENS = 1024  # of a draft's vocabulary, per program


@triton.jit(do_not_specialize=["vocab", "stride", "num_words"])
def _constrain_kernel(logits, masks, vocab, stride, num_words, WORDS: tl.constexpr):
    at, begin = tl.program_id(0).to(tl.int64), tl.program_id(1) * WORDS
    w = begin + tl.arange(0, WORDS)
    words = tl.load(masks + at * num_words + w, mask=w < num_words, other=-1)
    if tl.min((words == -1).to(tl.int32)) == 1:  # all allowed, as for requests without a grammar
        return
    bits = tl.arange(0, 32)
    v = w[:, None] * 32 + bits[None, :]
    is_forbidden = ((words[:, None] >> bits[None, :]) & 1) == 0
    tl.store(logits + at * stride + v, float("-inf"), mask=is_forbidden & (v < vocab))


@triton.jit(do_not_specialize=["dv", "row_stride", "node_stride", "forced_stride", "num_words"])
def _guided_kernel(
    out, logits, forced, masks, names, num_nodes, dv, row_stride, node_stride, forced_stride, num_words,
    STEP: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0).to(tl.int64)
    row, node = at // num_nodes, at % num_nodes
    v = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    is_token = v < dv
    name = tl.load(names + v, mask=is_token, other=0)
    token = tl.load(forced + row * forced_stride + STEP)
    is_next = token < 0
    if STEP > 0:
        is_next &= tl.load(forced + row * forced_stride + STEP - 1) >= 0
    words = tl.load(masks + row * num_words + name // 32, mask=is_token & is_next, other=-1)
    is_allowed = (words >> (name % 32).to(tl.int32)) & 1 != 0
    is_allowed = tl.where(token >= 0, name == token, is_allowed)
    own = tl.load(logits + row * row_stride + node * node_stride + v, mask=is_token, other=0)
    tl.store(out + at * dv + v, tl.where(is_allowed, own.to(tl.float32), -3e4), mask=is_token)


def guided(logits: torch.Tensor, guide: "Guide", step: int, names: torch.Tensor) -> torch.Tensor:
    """Return the logits [bs, n, dv] of draft step `step` with forbidden tokens masked; names [dv]. See the twin."""
    bs, num_nodes, dv = logits.shape
    forced, masks = guide.forced, guide.masks
    assert logits.stride(2) == 1 and forced.stride(1) == 1 and masks.is_contiguous() and names.is_contiguous()
    out = torch.empty(bs, num_nodes, dv, dtype=logits.dtype, device=logits.device)
    strides = (logits.stride(0), logits.stride(1), forced.stride(0), masks.shape[1])
    grid = (bs * num_nodes, cdiv(dv, _TOKENS))
    _guided_kernel[grid](out, logits, forced, masks, names, num_nodes, dv, *strides, STEP=step, TOKENS=_TOKENS)
    return out


def constrain(logits: torch.Tensor, masks: torch.Tensor) -> torch.Tensor:
    """Set forbidden tokens of logits [bs, D, V] to -inf, in place; masks [bs, D, W] int32. See the twin."""
    bs, num_nodes, vocab = logits.shape
    num_words = masks.shape[2]
    assert masks.is_contiguous() and logits.stride(2) == 1 and logits.stride(0) == num_nodes * logits.stride(1)
    grid = (bs * num_nodes, cdiv(num_words, _WORDS))
    _constrain_kernel[grid](logits, masks, vocab, logits.stride(1), num_words, WORDS=_WORDS)
    return logits
