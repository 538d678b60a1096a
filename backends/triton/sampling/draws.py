"""Sampling from rows of weights in two launches: masses of blocks of the vocabulary, then one block for each request.

Twins: `sample` of `specdec.core.functional.sampling` and the bonus tokens of `verify` beside it. All is float64. One
program sums a block for any batch size, so that a request draws the same in any batch.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from specdec.backends.triton.launch.sizes import cdiv, next_power_of_2

_MAX_BLOCK = 8192  # tokens
_FIELDS = tl.constexpr(4)  # of a block: masses of the law and of its residual, the last token with mass in each


@triton.jit
def _weights(law, law_scale, draft, draft_scale, excluded, num_excluded, v, V: tl.constexpr, HAS_DRAFT: tl.constexpr):
    """Return the law at tokens v and its residual, (law - draft)+ without the excluded tokens. NaN counts as 0.

    If tokens are excluded besides a subtracted draft law, the law returned is (law - draft)+, which has mass then.
    """
    p = tl.load(law + v, mask=v < V, other=0.0).to(tl.float64) * law_scale
    p = tl.where(p > 0, p, 0.0)
    residual = p
    if HAS_DRAFT:
        q = tl.load(draft + v, mask=v < V, other=0.0).to(tl.float64) * draft_scale
        residual = tl.where(q > 0, tl.where(p > q, p - q, 0.0), p)
        p = tl.where(num_excluded > 0, residual, p)
    for i in range(0, num_excluded):
        residual = tl.where(v == tl.load(excluded + i), 0.0, residual)
    return p, residual


@triton.jit
def _store_parts(
    parts,
    law,
    law_scale,
    draft,
    draft_scale,
    excluded,
    num_excluded,
    block,
    V: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_DRAFT: tl.constexpr,
):
    v = block * BLOCK + tl.arange(0, BLOCK)
    p, residual = _weights(law, law_scale, draft, draft_scale, excluded, num_excluded, v, V, HAS_DRAFT)
    own = parts + block * _FIELDS
    tl.store(own, tl.sum(p))
    tl.store(own + 1, tl.sum(residual))
    tl.store(own + 2, tl.max(tl.where(p > 0, v, 0)).to(tl.float64))
    tl.store(own + 3, tl.max(tl.where(residual > 0, v, 0)).to(tl.float64))


@triton.jit
def _draw(
    parts,
    law,
    law_scale,
    draft,
    draft_scale,
    excluded,
    num_excluded,
    u,
    V: tl.constexpr,
    BLOCK: tl.constexpr,
    SLOTS: tl.constexpr,
    HAS_DRAFT: tl.constexpr,
):
    """Sample a token from the residual of one law [V], or from the law if the residual has no mass; 0 if neither has.

    SLOTS: a power of two, at least the number of blocks of BLOCK tokens.
    """
    NUM_BLOCKS: tl.constexpr = (V + BLOCK - 1) // BLOCK
    blocks = tl.arange(0, SLOTS)
    own, is_block = parts + blocks * _FIELDS, blocks < NUM_BLOCKS
    residuals = tl.load(own + 1, mask=is_block, other=0.0)
    has_mass = tl.sum(residuals) > 0
    sums = tl.where(has_mass, residuals, tl.load(own, mask=is_block, other=0.0))
    last = tl.max(tl.load(own + 2 + has_mass.to(tl.int32), mask=is_block, other=0.0)).to(tl.int32)
    ends = tl.cumsum(sums)
    goal = u * tl.sum(sums)
    block = tl.min(tl.where((sums > 0) & (ends > goal), blocks, NUM_BLOCKS - 1))  # where the CDF crosses u
    before = tl.sum(tl.where(blocks < block, sums, 0.0))
    v = block * BLOCK + tl.arange(0, BLOCK)
    p, residual = _weights(law, law_scale, draft, draft_scale, excluded, num_excluded, v, V, HAS_DRAFT)
    weight = tl.where(has_mass, residual, p)
    is_reached = (weight > 0) & (before + tl.cumsum(weight) > goal)
    first = tl.min(tl.where(is_reached, v, V))
    return tl.minimum(first, last).to(tl.int64)  # sums in another order round differently, so none may be reached


@triton.jit
def note_draw(rows, scales, request, law_row, draft_row, num_excluded, law_scale, draft_scale, u):
    """Store the source of a bonus token: the rows of its law and of the draft's, and the number of excluded tokens.

    law_scale, draft_scale: factors that make both sum to one; draft_scale 0: nothing was drafted. u: float64 in [0, 1].
    rows, scales: [bs, 3], int64 and float64.
    """
    tl.store(rows + request * 3, law_row)
    tl.store(rows + request * 3 + 1, draft_row)
    tl.store(rows + request * 3 + 2, num_excluded)
    tl.store(scales + request * 3, law_scale)
    tl.store(scales + request * 3 + 1, draft_scale)
    tl.store(scales + request * 3 + 2, u)


@triton.jit(do_not_specialize=["width"])
def _bonus_parts_kernel(
    laws, drafts, excluded, rows, scales, parts, width, V: tl.constexpr, BLOCK: tl.constexpr, HAS_DRAFT: tl.constexpr
):
    request, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    own_rows, own_scales = rows + request * 3, scales + request * 3
    law, draft = laws + tl.load(own_rows) * V, drafts + tl.load(own_rows + 1) * V
    law_scale, draft_scale, num_excluded = tl.load(own_scales), tl.load(own_scales + 1), tl.load(own_rows + 2)
    own = parts + request * tl.num_programs(1) * _FIELDS
    excluded += request * width
    _store_parts(own, law, law_scale, draft, draft_scale, excluded, num_excluded, block, V, BLOCK, HAS_DRAFT)


@triton.jit(do_not_specialize=["width", "out_width"])
def _bonus_kernel(
    laws,
    drafts,
    excluded,
    rows,
    scales,
    parts,
    accept_lens,
    invalid,
    out,
    width,
    out_width,
    V: tl.constexpr,
    BLOCK: tl.constexpr,
    SLOTS: tl.constexpr,
    HAS_DRAFT: tl.constexpr,
):
    request = tl.program_id(0).to(tl.int64)
    own_rows, own_scales = rows + request * 3, scales + request * 3
    law, draft = laws + tl.load(own_rows) * V, drafts + tl.load(own_rows + 1) * V
    law_scale, draft_scale, num_excluded = tl.load(own_scales), tl.load(own_scales + 1), tl.load(own_rows + 2)
    own = parts + request * ((V + BLOCK - 1) // BLOCK) * _FIELDS
    excluded += request * width
    u = tl.load(own_scales + 2)
    token = _draw(own, law, law_scale, draft, draft_scale, excluded, num_excluded, u, V, BLOCK, SLOTS, HAS_DRAFT)
    at = request * out_width + tl.load(accept_lens + request) - 1
    tl.store(out + at, tl.where(tl.load(invalid + request), 0, token))


@triton.jit
def _parts_kernel(laws, parts, V: tl.constexpr, BLOCK: tl.constexpr):
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    law, own = laws + row * V, parts + row * tl.num_programs(1) * _FIELDS
    _store_parts(own, law, 1.0, law, 0.0, law, 0, block, V, BLOCK, False)


@triton.jit(do_not_specialize=["u_stride"], do_not_specialize_on_alignment=["u"])
def _sample_kernel(
    laws,
    parts,
    u,
    names,
    out,
    u_stride,
    V: tl.constexpr,
    BLOCK: tl.constexpr,
    SLOTS: tl.constexpr,
    HAS_NAMES: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    law, own = laws + row * V, parts + row * ((V + BLOCK - 1) // BLOCK) * _FIELDS
    token = _draw(own, law, 1.0, law, 0.0, law, 0, tl.load(u + row * u_stride), V, BLOCK, SLOTS, False)
    if HAS_NAMES:
        token = tl.load(names + token)
    tl.store(out + row, token)


@triton.jit
def _masses_kernel(laws, masses, V: tl.constexpr, BLOCK: tl.constexpr):
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    v = block * BLOCK + tl.arange(0, BLOCK)
    p = tl.load(laws + row * V + v, mask=v < V, other=0.0).to(tl.float64)
    tl.store(masses + row * tl.num_programs(1) + block, tl.sum(p))


def sample(probs: torch.Tensor, u: torch.Tensor, names: torch.Tensor | None = None) -> torch.Tensor:
    """Sample a token of positive probability per row, [bs] int64, mapped by `names` [V] int64.

    probs [bs, V] >= 0, u [bs] float64 in [0, 1].
    """
    (num_rows, vocab), laws = probs.shape, probs.contiguous()
    shape, slots = _blocks(vocab)
    parts, out = _empty_parts(laws, num_rows, vocab, shape), torch.empty(num_rows, dtype=torch.int64, device=u.device)
    _parts_kernel[(num_rows, parts.shape[1])](laws, parts, V=vocab, **shape)
    inputs = (laws, parts, u, out if names is None else names, out, u.stride(0))
    _sample_kernel[(num_rows,)](*inputs, V=vocab, SLOTS=slots, HAS_NAMES=names is not None, **shape)
    return out


def masses(probs: torch.Tensor) -> torch.Tensor:
    """Return the sums of laws [bs, n, V] (dense), [bs, n] float64."""
    bs, n, vocab = probs.shape
    shape, _ = _blocks(vocab)
    sums = torch.empty(bs, n, cdiv(vocab, shape["BLOCK"]), dtype=torch.float64, device=probs.device)
    _masses_kernel[(bs * n, sums.shape[2])](probs, sums, V=vocab, **shape)
    return sums.sum(-1)


def draw_bonus(
    probs: torch.Tensor,
    draft_probs: torch.Tensor | None,
    excluded: torch.Tensor,
    noted: tuple[torch.Tensor, torch.Tensor],
    verified: tuple[torch.Tensor, ...],
) -> None:
    """Write the bonus tokens into a `VerifyOutput`, 0 where it is invalid; noted: rows and scales of `note_draw`.

    probs [bs, n, V]; draft_probs: of the same V, if a draft's law is subtracted; excluded [bs, width]: tokens.
    """
    parts = bonus_parts(probs, draft_probs, excluded, noted)
    bs, vocab = probs.shape[0], probs.shape[2]
    shape, slots = _blocks(vocab)
    _, accept_lens, tokens, invalid = verified
    inputs = (probs, probs if draft_probs is None else draft_probs, excluded, *noted, parts)
    constants = {"V": vocab, "HAS_DRAFT": draft_probs is not None, "SLOTS": slots, **shape}
    _bonus_kernel[(bs,)](*inputs, accept_lens, invalid, tokens, excluded.shape[1], tokens.shape[1], **constants)


def bonus_parts(
    probs: torch.Tensor,
    draft_probs: torch.Tensor | None,
    excluded: torch.Tensor,
    noted: tuple[torch.Tensor, torch.Tensor],
) -> torch.Tensor:
    """Return the fields of `_store_parts` for each block of the noted rows: [bs, blocks, 4] float64; see
    `draw_bonus`."""
    bs, vocab = probs.shape[0], probs.shape[2]
    shape, _ = _blocks(vocab)
    parts = _empty_parts(probs, bs, vocab, shape)
    inputs = (probs, probs if draft_probs is None else draft_probs, excluded, *noted, parts)
    constants = {"V": vocab, "HAS_DRAFT": draft_probs is not None, **shape}
    _bonus_parts_kernel[(bs, parts.shape[1])](*inputs, excluded.shape[1], **constants)
    return parts


def _blocks(vocab: int) -> tuple[dict[str, Any], int]:
    """Return the launch constants of a vocabulary, tokens and warps per block, and an upper bound of the blocks."""
    block = min(_MAX_BLOCK, next_power_of_2(vocab))
    slots = next_power_of_2(cdiv(vocab, block))
    return {"BLOCK": block, "num_warps": max(1, block // 512)}, slots


def _empty_parts(like: torch.Tensor, bs: int, vocab: int, shape: dict[str, Any]) -> torch.Tensor:
    size = (bs, cdiv(vocab, shape["BLOCK"]), _FIELDS.value)
    return torch.empty(size, dtype=torch.float64, device=like.device)
