"""`specdec::linear`, `wide_linear`, `gated_linear`, `gate`, `rms_norm`, `add_rms_norm`, ...: batch-invariant layers.

The bits of a row do not depend on the other rows: products sum K in order and never split it; norms have one kernel for
any number of rows. So plain decoding, verification and prefills of any batch compute the same values. CUDA tensors in
bf16 and fp16 run our kernels, others the torch twins. Weights are arguments, so traces and checks of addresses see
them; nothing waits for the host in a capture.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F

from specdec.backends.gates import ACTIVATIONS, apply_gate_twin, gate_twin
from specdec.backends.library import KERNEL_DTYPES, has_triton, op

NORM_ARGUMENTS = "Tensor weight, float eps, float offset, bool is_late"
MOST_PARTS = 3  # weights, such as Q, K and V, whose products are columns of one result


@op("linear(Tensor x, Tensor weight, Tensor? bias=None) -> Tensor", lambda x, weight, *_: _rows(x, weight.shape[0]))
def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Return x @ weight.T + bias [..., N], contiguous, in x's dtype; bias is added before the one rounding.

    x: [..., K], its last dim contiguous. weight: [N, K] with contiguous rows; bias: [N]; both of x's dtype.
    """
    return _product(x, weight, bias)


@op(
    "wide_linear(Tensor x, Tensor weight, Tensor? bias=None) -> Tensor",
    lambda x, weight, *_: _rows(x, weight.shape[0], dtype=torch.float32),
)
def wide_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Return x @ weight.T + bias [..., N] in fp32, unrounded, as MoE routers need it; arguments as in `linear`."""
    if not is_ours(x, weight):
        return F.linear(x.float(), weight.float(), None if bias is None else bias.float())
    from specdec.backends.triton.linear import products

    product = products.product(x.reshape(-1, x.shape[-1]).contiguous(), weight, bias, None, torch.float32)
    return product.view(*x.shape[:-1], product.shape[1])


@op(
    "gated_linear(Tensor x, Tensor weight, Tensor? bias, str activation) -> Tensor",
    lambda x, weight, *_: _rows(x, weight.shape[0] // 2),
)
def gated_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, activation: str) -> torch.Tensor:
    """Return activation(gate) * up [..., I], contiguous, where gate and up are the halves of linear(x, weight, bias).

    weight: [2*I, K], gate's rows first; bias: [2*I] or None. activation: "silu", "gelu" or "gelu_tanh", else
    ValueError. The product, the activation (computed in fp32) and the result are each rounded to x's dtype.
    """
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation={activation!r}: expected one of {', '.join(ACTIVATIONS)}")
    return _product(x, weight, bias, activation)


@op("gate(Tensor x, str activation) -> Tensor", lambda x, _: _rows(x, x.shape[-1] // 2), "linear.gates")
def gate(x: torch.Tensor, activation: str) -> torch.Tensor:
    """Return activation(gate) * up [..., I], contiguous, where gate and up are the halves of x [..., 2*I]. Rounds as
    `gated_linear` does: gate(linear(x, weight, bias)) has its bits."""
    return gate_twin(x, activation)


@op(
    "apply_gate(Tensor gate, Tensor up, str activation) -> Tensor",
    lambda _, up, *rest: _rows(up, up.shape[-1]),
    "linear.gates",
    lambda _, up, *rest: up.dtype in KERNEL_DTYPES,
)
def apply_gate(gate: torch.Tensor, up: torch.Tensor, activation: str) -> torch.Tensor:
    """Return activation(gate) * up, contiguous in the shape of up; rounded after each step.

    gate: of up's dtype and number of elements, in rows [..., N] whose N divides up's last dim; both may be strided,
    such as slices of one product. activation: one of `gated_linear`, or "sigmoid".
    """
    return apply_gate_twin(gate, up, activation)


@op(f"rms_norm(Tensor x, {NORM_ARGUMENTS}) -> Tensor", lambda x, *_: _rows(x, x.shape[-1]), "linear.norms")
def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, offset: float, is_late: bool) -> torch.Tensor:
    """Return the RMS norm of x [..., H] over its last dim, contiguous, in x's dtype; statistics in fp32.

    weight: [H]. is_late: multiply by offset + weight in fp32 and round once (Gemma with offset 1, GPT-OSS with 0);
    else round, then multiply by weight and round again (Llama, Qwen); offset is ignored then. Rows of x may be strided,
    such as heads of one QKV product.
    """
    wide = x.float()
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    if is_late:
        return (normed * (offset + weight.float())).to(x.dtype).contiguous()
    return (normed.to(x.dtype) * weight).to(x.dtype).contiguous()


@op(
    f"add_rms_norm(Tensor x, Tensor residual, {NORM_ARGUMENTS}) -> (Tensor, Tensor)",
    lambda x, *_: (_rows(x, x.shape[-1]), _rows(x, x.shape[-1])),
    "linear.norms",
)
def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, offset: float, is_late: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (`rms_norm` of total, total) where total = x + residual, both [..., H], rounded to x's dtype."""
    total = (x + residual).contiguous()
    return rms_norm.twin(total, weight, eps, offset, is_late), total


@op(
    "gated_rms_norm(Tensor x, Tensor gate, Tensor weight, float eps) -> Tensor",
    lambda x, *_: _rows(x, x.shape[-1]),
    "linear.norms",
)
def gated_rms_norm(x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Return `rms_norm` of x [..., H] (is_late=False) times silu(gate), in x's dtype.

    gate: of x's dtype and number of elements, in any shape. silu and the last product are computed in fp32.
    """
    normed = rms_norm.twin(x, weight, eps, 0.0, False)
    return (normed * F.silu(gate.reshape(x.shape).float())).to(x.dtype)


def _product(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, activation: str | None = None
) -> torch.Tensor:
    if not is_ours(x, weight):
        return product_twin(x, weight, bias, activation)
    from specdec.backends.triton.linear import cublas

    rows = x.reshape(-1, x.shape[-1])
    product = cublas.product(rows if rows.stride(1) == 1 else rows.contiguous(), weight, bias, activation)
    return product.view(*x.shape[:-1], product.shape[1])


def product_twin(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, activation: str | None
) -> torch.Tensor:
    """See `linear`, and `gated_linear` for an activation; rounded as in transformers."""
    product = F.linear(x, weight, bias)
    return product if activation is None else gate_twin(product, activation)


def joined_twin(parts: Sequence[torch.Tensor], bias: Sequence[torch.Tensor], activation: str) -> torch.Tensor:
    """Return `parts` [..., N_i], plus `bias` [N_i] if not empty, concatenated; with an activation, `gate` of that."""
    parts = [part + b for part, b in zip(parts, bias, strict=True)] if bias else parts
    product = torch.cat(list(parts), -1)
    return gate_twin(product, activation) if activation else product


def is_ours(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Return whether our kernel runs the product of `x` and `weight`."""
    return has_kernels(x) and weight.dtype == x.dtype and weight.stride(1) == 1


def has_kernels(x: torch.Tensor) -> bool:
    """Return whether our Triton kernels run on `x`: on CUDA, in 16 bits, with Triton."""
    return x.is_cuda and x.dtype in KERNEL_DTYPES and has_triton()


def aligned_rows(x: torch.Tensor) -> torch.Tensor:
    """Return x [..., K] as rows [M, K], each contiguous and aligned to 16 bytes; copies only if necessary."""
    rows = x.reshape(-1, x.shape[-1])
    is_aligned = rows.data_ptr() % 16 == 0 and rows.stride(0) % 16 == 0 and rows.stride(1) == 1
    return rows if is_aligned else rows.clone(memory_format=torch.contiguous_format)


def _rows(x: torch.Tensor, size: int, **options: Any) -> torch.Tensor:
    """Return an empty tensor with the shape of x, except for the last dim."""
    return x.new_empty(*x.shape[:-1], size, **options)
