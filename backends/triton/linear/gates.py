"""Gates within products and after them, with the same bits.

Twin: `specdec.backends.gates.gate_twin`.
"""

import torch
import triton
import triton.language as tl

from specdec.backends.triton.launch.relaunch import CachedLaunch


@triton.jit
def _activate(gate, ACTIVATION: tl.constexpr):
    """Return the activation of `gate`, both fp32."""
    if ACTIVATION == "silu":
        return gate / (1 + tl.exp(-gate))
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


@triton.jit
def _gate_kernel(product, out, N: tl.constexpr, ACTIVATION: tl.constexpr, BLOCK: tl.constexpr):
    """A block of columns of one row of out [rows, N], from product [rows, 2 * N]."""
    row = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    gate = tl.load(product + row * 2 * N + n, mask=n < N, other=0.0)
    up = tl.load(product + row * 2 * N + N + n, mask=n < N, other=0.0)
    tl.store(out + row * N + n, gated(gate, up, ACTIVATION), mask=n < N)


_run_gate = CachedLaunch(_gate_kernel)


def gate(product: torch.Tensor, activation: str) -> torch.Tensor:
    """Return activation(gate) * up of the halves of product [M, 2*N], with the bits of `product`'s own: [M, N]."""
    num_rows, N = product.shape[0], product.shape[1] // 2
    out = torch.empty(num_rows, N, dtype=product.dtype, device=product.device)
    _run_gate((num_rows, triton.cdiv(N, 1024)), product, out, N=N, ACTIVATION=activation, BLOCK=1024)
    return out
