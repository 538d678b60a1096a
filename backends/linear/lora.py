"""`specdec::lora`: adds LoRA products (arXiv 2106.09685) to linear ones, each row with its own adapter (multi-LoRA);
`lora_linear`: both products.

`adapter_scope` holds the adapter number of each row of the current forward, 0 for none. A row's bits depend on that row
and its adapter alone: K is summed in chunks, in order within a chunk and over chunks.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from specdec.backends.library import op
from specdec.backends.linear import gate, has_kernels, is_ours, linear
from specdec.backends.op import adapters_in_scope

MAX_RANK = 128
RANKS = (16, 32, 64, MAX_RANK)  # supported by the kernels; other ranks are padded with zeros


@op(
    "lora(Tensor x, Tensor y, Tensor[] a, Tensor[] b, Tensor[] scales) -> Tensor",
    lambda x, y, *_: y.new_empty(y.shape),
)
def lora(
    x: torch.Tensor,
    y: torch.Tensor,
    a: Sequence[torch.Tensor],
    b: Sequence[torch.Tensor],
    scales: Sequence[torch.Tensor],
) -> torch.Tensor:
    """Return y + scale * x @ A.T @ B.T [..., N], with A, B and scale of each row's adapter; rows without one stay y.

    x: [..., K], y: [..., N], their last dims contiguous. The columns of y have one to three parts of N_i columns, such
    as Q, K and V; for each part, in order: a [n, R, K] and b [n, N_i, R], contiguous, of x's dtype; scales [n] float32.
    n: adapters; entry i belongs to adapter number i + 1. R: one of RANKS, the same for all parts. x @ A.T is rounded to
    x's dtype, and so is the sum, once.
    """
    rows, wide = x.reshape(-1, x.shape[-1]), y.reshape(-1, y.shape[-1])
    adapters = adapters_in_scope()(len(rows))
    if not has_kernels(x) or any(t.dtype != x.dtype for t in (y, *a, *b)):
        return lora_twin(rows, wide, a, b, scales, adapters).view(y.shape)
    from specdec.backends.triton.linear.lora import lora as by_kernels

    return by_kernels(rows, wide, a, b, scales, adapters).view(y.shape)


@op(
    "lora_linear(Tensor x, Tensor weight, Tensor? bias, Tensor[] a, Tensor[] b, Tensor[] scales, str activation='')"
    " -> Tensor",
    lambda x, weight, bias, a, b, scales, activation="": x.new_empty(
        *x.shape[:-1], weight.shape[0] // (2 if activation else 1)
    ),
)
def lora_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    a: Sequence[torch.Tensor],
    b: Sequence[torch.Tensor],
    scales: Sequence[torch.Tensor],
    activation: str = "",
) -> torch.Tensor:
    """Return lora(x, linear(x, weight, bias), a, b, scales) [..., N], or `gate` of it with an activation, [..., N / 2].

    Has the bits of the separate ops. Few rows take two launches if parts begin at multiples of the product's tiles, and
    gate and up are parts.
    """
    rows = x.reshape(-1, x.shape[-1])
    if is_ours(x, weight) and all(t.dtype == x.dtype for t in (*a, *b)):
        from specdec.backends.triton.linear import adapted

        adapters = adapters_in_scope()(len(rows))
        taken = adapted.lora_linear(rows, weight, bias, a, b, scales, activation, adapters)
        if taken is not None:
            return taken.view(*x.shape[:-1], taken.shape[1])
    y = lora(x, linear(x, weight, bias), a, b, scales)
    return gate(y, activation) if activation else y


def lora_twin(
    x: torch.Tensor,
    y: torch.Tensor,
    a: Sequence[torch.Tensor],
    b: Sequence[torch.Tensor],
    scales: Sequence[torch.Tensor],
    adapters: torch.Tensor,
) -> torch.Tensor:
    """See `lora`; x [T, K], y [T, N], adapters [T] int64."""
    out, begin = y.clone(), 0
    for of_a, of_b, of_scale in zip(a, b, scales, strict=True):
        part = out[:, begin : begin + of_b.shape[1]]
        for i in range(len(of_a)):
            is_own = (adapters == i + 1).unsqueeze(1)
            if x.is_cuda or is_own.any():  # a graph cannot read `is_own`
                low = F.linear(x, of_a[i])
                added = F.linear(low.float(), of_b[i].float()) * of_scale[i]
                part.copy_(torch.where(is_own, (part.float() + added).to(y.dtype), part))
        begin += of_b.shape[1]
    return out
