"""`specdec::grouped_mxfp4`, `specdec::grouped_fp8`: `grouped_linear` with experts quantised to MXFP4 or FP8.

A row's bits depend on that row alone. On CUDA kernels run them without waiting for the host.
"""

import torch

from specdec.backends.experts import grouped_linear
from specdec.backends.gates import gate_twin
from specdec.backends.library import op
from specdec.backends.linear.fp8 import dequantised
from specdec.backends.linear.packed import BLOCK, NUM_WORDS

GROUP = 32  # features that share an exponent
VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # of e2m1; the fourth bit is the sign (OCP Microscaling, table 5)
# Layout of the four elements of a half word: j, the bits of sign, exponent and mantissa in bf16, and their rotation to
# the left in bits, of the whole word. Rotating back and masking unpacks them; the last element has two parts.
PLACES = ((0, 0x81C0, 0), (1, 0x81C0, 6), (2, 0x81C0, 28), (3, 0x80C0, 26), (3, 0x0100, 2))
OFFSET, LARGEST = 126, 128  # added to stored exponents; the largest stored exponent that our kernel supports


@op(
    "grouped_mxfp4(Tensor x, Tensor expert_ids, Tensor words, Tensor exponents, Tensor? bias=None, "
    "str activation='') -> Tensor",
    lambda x, expert_ids, words, exponents, bias=None, activation="": x.new_empty(
        expert_ids.numel(), words.shape[2] // (2 if activation else 1)
    ),
    "experts.quantised",
    lambda x, *_: x.dtype == torch.bfloat16,
)
def grouped_mxfp4(
    x: torch.Tensor,
    expert_ids: torch.Tensor,
    words: torch.Tensor,
    exponents: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: str = "",
) -> torch.Tensor:
    """Return the products of tokens with their MXFP4 experts, [T*k, N] in x's dtype; see `experts.grouped_linear`.

    x: [T, K] or [T*k, K], bf16 for the kernel. words [E, B, N, 16], exponents [E, B, N], both int32: from `pack_mxfp4`.
    bias: [E, N] float32 or None. activation: "", or "swigluoai" for [T*k, N / 2]. Sums, bias and gate are in fp32 and
    rounded once, as in the Hub's kernel.
    """
    weight = torch.stack([unpack_mxfp4(*of_one) for of_one in zip(words, exponents, strict=True)])[..., : x.shape[1]]
    return grouped_linear.twin(x.float(), expert_ids, weight, bias, False, activation).to(x.dtype)


@op(
    "grouped_fp8(Tensor x, Tensor row_scales, Tensor expert_ids, Tensor weight, Tensor scales, ScalarType dtype, "
    "str activation='') -> Tensor",
    lambda x, row_scales, expert_ids, weight, scales, dtype, activation="": x.new_empty(
        expert_ids.numel(), weight.shape[1] // (2 if activation else 1), dtype=dtype
    ),
    "experts.quantised",
    lambda *_: True,
)
def grouped_fp8(
    x: torch.Tensor,
    row_scales: torch.Tensor,
    expert_ids: torch.Tensor,
    weight: torch.Tensor,
    scales: torch.Tensor,
    dtype: torch.dtype,
    activation: str = "",
) -> torch.Tensor:
    """Return the products of FP8 tokens with their FP8 experts, [T*k, N] in `dtype`; see `experts.grouped_linear`. x,
    row_scales: from `linear.fp8.quantise`. weight: [E, N, K] e4m3, K a multiple of 128; scales: [E, N / 128, K / 128]
    float32, N / 128 rounded up. activation: "", or "silu" for [T*k, N / 2]."""
    rows = x.float() * row_scales.repeat_interleave(BLOCK, -1)
    experts = torch.stack([dequantised(*of_one) for of_one in zip(weight, scales, strict=True)])
    product = grouped_linear.twin(rows, expert_ids, experts).to(dtype)
    return gate_twin(product, activation) if activation else product


def pack_mxfp4(blocks: torch.Tensor, scales: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Pack one MXFP4 expert: words [B, N, 16] and exponents [B, N], both int32; B = K / 128, rounded up.

    blocks: [N, K / 2] uint8, the lower half of a byte first; scales: [N, K / 32] uint8, exponents biased by 127, at
    most LARGEST. Word 2 * i + q of a block has elements 64 * q + 16 * j + 2 * i in its lower half and the next ones in
    its upper half, for j < 4: see PLACES. A word of exponents has four, a byte each.
    """
    N, rest = blocks.shape[0], -blocks.shape[1] * 2 % BLOCK
    codes = torch.nn.functional.pad(torch.stack([blocks & 15, blocks >> 4], -1).flatten(1), (0, rest)).to(torch.int32)
    low, high = ((codes & 8) << 12 | (codes & 7) << 6).view(N, -1, 2, 4, NUM_WORDS // 2, 2).unbind(-1)
    words = torch.zeros_like(low[:, :, :, 0])
    for j, bits, by in PLACES:
        words |= _rotated((low & bits | (high & bits) << 16)[:, :, :, j], by)
    words = words.permute(1, 0, 3, 2).flatten(2).contiguous()
    shifts = torch.arange(0, 32, 8, dtype=torch.int32, device=blocks.device)
    fields = torch.nn.functional.pad(scales.to(torch.int32) + OFFSET, (0, rest // GROUP)).view(N, -1, 4)
    return words, (fields << shifts).sum(2, dtype=torch.int32).T.contiguous()


def unpack_mxfp4(words: torch.Tensor, exponents: torch.Tensor) -> torch.Tensor:
    """Return the weights [N, 128 * B] fp32 of one expert packed by `pack_mxfp4`."""
    codes, shifts = _codes(words), torch.arange(0, 32, 8, dtype=torch.int32, device=words.device)
    table = torch.tensor([*VALUES, *(-v for v in VALUES)], dtype=torch.float32, device=words.device)
    fields = (exponents.T.unsqueeze(-1) >> shifts & 255).reshape(len(codes), -1)
    return table[codes] * torch.exp2(fields - OFFSET - 127.0).repeat_interleave(GROUP, 1)


def _rotated(words: torch.Tensor, by: int) -> torch.Tensor:
    return words << by | words >> (32 - by) & (1 << by) - 1


def _codes(words: torch.Tensor) -> torch.Tensor:
    """Return the e2m1 codes [N, 128 * B] of words [B, N, 16]."""
    halves = words.new_zeros(*words.shape[:2], 4, NUM_WORDS // 2, 2, 2)  # by j, i, q, and the two elements of a word
    for j, bits, by in PLACES:
        pair = _rotated(words, -by % 32)
        halves[:, :, j] |= torch.stack([pair & bits, pair >> 16 & bits], -1).view_as(halves[:, :, j])
    return (halves >> 12 & 8 | halves >> 6 & 7).permute(1, 0, 4, 2, 3, 5).flatten(1)
