"""Gates, in the epilogue of products or in a kernel after them, with the same bits.

Twins: `specdec.backends.gates.gate_twin` and `apply_gate_twin`.
"""

import torch
import triton
import triton.language as tl

from specdec.backends.triton.launch.relaunch import cached_launch, early_and_leading, is_aligned, wait_for_others
from specdec.backends.triton.launch.sizes import cdiv, next_power_of_2
from specdec.backends.triton.linear.strides import in_rows


@triton.jit
def _activate(gate, ACTIVATION: tl.constexpr):
    """Return the activation of `gate`, both fp32."""
    if ACTIVATION == "silu":
        return gate / (1 + tl.exp(-gate))
    elif ACTIVATION == "sigmoid":
        return 1 / (1 + tl.exp(-gate))
    elif ACTIVATION == "gelu":
        return 0.5 * gate * (1 + tl.erf(gate * 0.7071067811865476))
    else:  # gelu_tanh, by 1 + tanh(u) = 2 / (1 + exp(-2u))
        return gate / (1 + tl.exp(-1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)))


@triton.jit
def gated(gate, up, ACTIVATION: tl.constexpr):
    """Return activation(gate) * up in their dtype, rounded after each step."""
    dtype: tl.constexpr = gate.dtype
    gate, up = gate.to(tl.float32), up.to(tl.float32)
    if ACTIVATION == "swigluoai":
        gate = tl.where(gate > 7, 7.0, gate)  # comparisons keep NaNs
        scaled = (gate * 1.702).to(dtype).to(tl.float32)
        active = gate * (1 / (1 + tl.exp(-scaled))).to(dtype).to(tl.float32)
        up = (tl.where(up > 7, 7.0, tl.where(up < -7, -7.0, up)) + 1).to(dtype).to(tl.float32)
    else:
        active = _activate(gate, ACTIVATION)
    return (active.to(dtype).to(tl.float32) * up).to(dtype)


@triton.jit(do_not_specialize=["inner", "stride_outer", "stride_inner", "up_inner", "up_outer", "up_stride"])
def _gate_kernel(
    gate,
    up,
    out,
    inner,
    stride_outer,
    stride_inner,
    up_inner,
    up_outer,
    up_stride,
    N: tl.constexpr,
    UNIT: tl.constexpr,
    ACTIVATION: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
    LEADS: tl.constexpr,
):
    """Compute a block of columns of one row of out [rows, N]. Row r of gate begins at UNIT * (r // inner * stride_outer
    + r % inner * stride_inner), that of up likewise with up_inner, up_outer and up_stride."""
    row = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    wait_for_others(PDL, LEADS)
    of_gate = (row // inner * stride_outer + row % inner * stride_inner) * UNIT
    of_up = (row // up_inner * up_outer + row % up_inner * up_stride) * UNIT
    left = tl.load(gate + of_gate + n, mask=n < N, other=0.0)
    right = tl.load(up + of_up + n, mask=n < N, other=0.0)
    tl.store(out + row * N + n, gated(left, right, ACTIVATION), mask=n < N)


def apply_gate(gate: torch.Tensor, up: torch.Tensor, activation: str) -> torch.Tensor:
    """See `specdec.backends.linear.apply_gate`."""
    N = gate.shape[-1]
    out = torch.empty(up.shape, dtype=up.dtype, device=up.device)
    num_rows = up.numel() // N
    if not num_rows:
        return out
    (gate, rows), (up, up_rows) = in_rows(gate), in_rows(up if up.shape[-1] == N else up.reshape(-1, N))
    unit = 8 if all(size % 8 == 0 for size in (N, *rows[1:], *up_rows[1:])) else 1
    sizes = [size if i == 0 else size // unit for of in (rows, up_rows) for i, size in enumerate(of)]
    block, starts = min(next_power_of_2(N), 1024), early_and_leading(num_rows)
    grid, args = (num_rows, cdiv(N, block)), (gate, up, out, *sizes)
    constants = {"N": N, "UNIT": unit, "ACTIVATION": activation, "BLOCK": block}
    constants |= {name: starts[name] for name in ("PDL", "LEADS")}
    if is_aligned(gate, up):
        cached_launch(_gate_kernel, 4, launch_pdl=starts["launch_pdl"])(grid, *args, **constants)
    else:
        _gate_kernel[grid](*args, **constants, launch_pdl=starts["launch_pdl"])
    return out


def gate(x: torch.Tensor, activation: str) -> torch.Tensor:
    """See `specdec.backends.linear.gate`; bits equal the gate within `products.product`."""
    left, right = x.reshape(-1, x.shape[-1]).contiguous().chunk(2, -1)
    return apply_gate(left, right, activation).view(*x.shape[:-1], left.shape[1])
