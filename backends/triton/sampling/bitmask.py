"""Packed masks of grammars on logits. Twin: `specdec.core.functional.sampling.constrain`."""

import torch
import triton
import triton.language as tl

_WORDS = 64  # of a mask that a program reads


@triton.jit(do_not_specialize=["vocab", "stride", "num_words"])
def _constrain_kernel(logits, masks, vocab, stride, num_words, WORDS: tl.constexpr):
    at, begin = tl.program_id(0).to(tl.int64), tl.program_id(1) * WORDS
    w = begin + tl.arange(0, WORDS)
    words = tl.load(masks + at * num_words + w, mask=w < num_words, other=-1)
    if tl.min((words == -1).to(tl.int32)) == 1:  # all is allowed, as everywhere for requests without a grammar
        return
    bits = tl.arange(0, 32)
    v = w[:, None] * 32 + bits[None, :]
    is_forbidden = ((words[:, None] >> bits[None, :]) & 1) == 0
    tl.store(logits + at * stride + v, float("-inf"), mask=is_forbidden & (v < vocab))


def constrain(logits: torch.Tensor, masks: torch.Tensor) -> torch.Tensor:
    """Set forbidden tokens of logits [bs, D, V] to -inf, in place; masks [bs, D, W] int32. See the twin."""
    bs, num_nodes, vocab = logits.shape
    num_words = masks.shape[2]
    assert masks.is_contiguous() and logits.stride(2) == 1 and logits.stride(0) == num_nodes * logits.stride(1)
    grid = (bs * num_nodes, triton.cdiv(num_words, _WORDS))
    _constrain_kernel[grid](logits, masks, vocab, logits.stride(1), num_words, WORDS=_WORDS)
    return logits
