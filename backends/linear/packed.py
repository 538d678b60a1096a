"""`specdec::packed_linear`: products with 4-bit weights in our own layout, which kernels unpack in registers.

A block of 128 input features of one output feature is 16 words of 32 bits; see `pack`. A row's bits depend on that row
alone.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from specdec.backends.library import op
from specdec.backends.linear import joined_twin

BLOCK, NUM_WORDS = 128, 16  # features of a block, and the words that hold them
GROUPS = (32, 64)  # supported group sizes, features of one scale, besides multiples of BLOCK
NF4_GROUP = 64  # features of one scale
# The codes of NF4 (QLoRA, arXiv:2305.14314, appendix E), quantiles of a normal distribution.
NF4 = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334),
    *(-0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)
MAGIC = {torch.bfloat16: 128, torch.float16: 1024}  # the first numbers whose last mantissa bit counts ones


@op(
    "packed_linear(Tensor x, Tensor[] words, Tensor[] scales, Tensor[] bias, str activation='') -> Tensor",
    lambda x, words, scales, bias, activation="": x.new_empty(
        *x.shape[:-1], sum(w.shape[1] for w in words) // (2 if activation else 1)
    ),
    "linear.packed",
)
def packed_linear(
    x: torch.Tensor,
    words: Sequence[torch.Tensor],
    scales: Sequence[torch.Tensor],
    bias: Sequence[torch.Tensor],
    activation: str = "",
) -> torch.Tensor:
    """Return x @ W.T + bias [..., sum of N] for one to three 4-bit weights W, whose products are concatenated.

    x: [..., K], bf16 or fp16. words, scales: one for each weight, from `pack` with scales of x's dtype and one group
    size, or from `pack_nf4`. W is rounded to x's dtype. bias: one [N] for each weight, or an empty list. Rounded after
    the product and after the bias. activation: see `fp8_linear`.
    """
    parts = [F.linear(x, unpack(w, s, x.dtype)) for w, s in zip(words, scales, strict=True)]
    return joined_twin(parts, bias, activation)


def takes(N: int, K: int, group: int) -> bool:
    """Return whether `packed_linear` supports weights [N, K] with a scale per `group` features."""
    return N % 16 == 0 and K % BLOCK == 0 and K % group == 0 and (group in GROUPS or group % BLOCK == 0)


def pack(
    values: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Pack the weights (values - zeros) * scales: words [K / 128, N, 16] and scales [K / G, N], both int32.

    values: [N, K] of 0..15; scales: [N, K / G], bf16 or fp16; zeros: [N, K / G], default 8. Words 2 * p and
    2 * p + 1 of a block have elements 16 * j + 2 * p, for j of 0..3 and of 4..7, at bits 4 * (j % 4), and their right
    neighbours 16 bits above them. A scale's word has its bits, and above them those of -(MAGIC + zero).
    """
    zeros = torch.full_like(scales, 8) if zeros is None else zeros.to(scales.dtype)
    offsets = (-(MAGIC[scales.dtype] + zeros.float())).to(scales.dtype)
    bits = [t.contiguous().view(torch.int16).to(torch.int32) for t in (scales, offsets)]
    return words_of(values), (bits[0] & 0xFFFF | bits[1] << 16).view(scales.shape).T.contiguous()


def pack_nf4(values: torch.Tensor, scales: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Pack the weights NF4[values] * scales: words as in `pack`, and scales [K / 64, N] float32.

    values: [N, K] of 0..15; scales: [N, K / 64].
    """
    return words_of(values), scales.float().T.contiguous()


def words_of(values: torch.Tensor) -> torch.Tensor:
    """Return the words [K / 128, N, 16] int32 of values [N, K] in 0..15, in the layout of `pack`."""
    places = values.to(torch.int32).view(len(values), -1, 2, 4, 8, 2).permute(1, 0, 4, 2, 3, 5)
    return (places << _shifts(values.device)).sum((4, 5), dtype=torch.int32).flatten(2)


def values_of(words: torch.Tensor) -> torch.Tensor:
    """Invert `words_of`: return the values [N, K] int32, 0..15."""
    places = words.view(*words.shape[:2], 8, 2, 1, 1) >> _shifts(words.device) & 15
    return places.permute(1, 0, 3, 4, 2, 5).reshape(words.shape[1], -1)


def _shifts(device: torch.device) -> torch.Tensor:
    """Return the bit positions [4, 2] of a word's elements: of four groups of 16, and of two neighbours in each."""
    return torch.arange(0, 32, 4, dtype=torch.int32, device=device).view(2, 4).T


def unpack(words: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the weights [N, K] packed by `pack` or `pack_nf4`, in `dtype`; for `pack` that of its scales."""
    values = values_of(words)
    if scales.dtype == torch.float32:
        codes = torch.tensor(NF4, dtype=torch.float32, device=words.device)[values]
        return (codes * scales.T.repeat_interleave(NF4_GROUP, 1)).to(dtype)
    halves = scales.T.reshape(-1).view(torch.int16).view(dtype).view(len(values), -1, 2).float()
    scale, offset = halves.repeat_interleave(values.shape[1] // scales.shape[0], 1).unbind(-1)
    return ((values.float() + MAGIC[dtype] + offset) * scale).to(dtype)
