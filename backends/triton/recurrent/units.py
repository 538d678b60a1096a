"""Inputs of gated delta rule scans: decays and strengths; and, for chunked prefills with normalised queries and keys,
the values, strengths and output factors that replace normalising them.

Twins: `recurrent.gates.delta_gates` and `recurrent.reference._units`. Queries and keys stay in 16 bits.
"""

import torch
import triton
import triton.language as tl

from specdec.backends.recurrent.state_pool import ScanInputs
from specdec.backends.triton.launch.relaunch import early, wait_for_others
from specdec.backends.triton.launch.sizes import cdiv, next_power_of_2
from specdec.backends.triton.recurrent.scan import arguments
from specdec.backends.triton.recurrent.tokens import as_units, query_factor

BLOCK_T = 8  # tokens per program


@triton.jit(do_not_specialize=["num_tokens"])
def _units_kernel(
    q, k, v, beta, values, strengths, factors, num_tokens, q_t, q_h, k_t, k_h, v_t, v_h, beta_t, beta_h,
    H: tl.constexpr, GIVEN: tl.constexpr, N: tl.constexpr, P: tl.constexpr, SCALE: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_P: tl.constexpr,
):  # fmt: skip
    """Compute BLOCK_T tokens of a head; see `units`."""
    head = tl.program_id(1)
    given_head = head // (H // GIVEN)
    token = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    n, p, is_token = tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_P), token < num_tokens
    is_key, is_value = is_token[:, None] & (n < N)[None, :], is_token[:, None] & (p < P)[None, :]
    q_n = tl.load(q + token[:, None] * q_t + given_head * q_h + n[None, :], mask=is_key, other=0.0).to(tl.float32)
    k_n = tl.load(k + token[:, None] * k_t + given_head * k_h + n[None, :], mask=is_key, other=0.0).to(tl.float32)
    v_p = tl.load(v + token[:, None] * v_t + head * v_h + p[None, :], mask=is_value, other=0.0).to(tl.float32)
    strength = tl.load(beta + token * beta_t + head * beta_h, mask=is_token, other=0.0).to(tl.float32)
    v_p, strength = as_units(k_n, v_p, strength, 1)
    at = token * H + head
    tl.store(values + at[:, None] * P + p[None, :], v_p, mask=is_value)
    tl.store(strengths + at, strength, mask=is_token)
    tl.store(factors + at, query_factor(q_n, SCALE, 1), mask=is_token)


@triton.jit(do_not_specialize=["num_rows", "a_t", "b_t"], do_not_specialize_on_alignment=["a", "b"])
def _gates_kernel(
    a, b, log_rates, bias, g, beta, num_rows, a_t, b_t,
    H: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Compute ROWS tokens. softplus(x) is x above 20, as in torch, and a series below -3, where 1 + exp(x) loses
    digits."""
    wait_for_others(PDL, True)
    token = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    head = tl.arange(0, BLOCK)[None, :]
    inside = (token < num_rows) & (head < H)
    x = tl.load(a + token * a_t + head, mask=inside, other=0.0).to(tl.float32)
    x += tl.load(bias + head, mask=head < H, other=0.0).to(tl.float32)
    rate = tl.exp(tl.load(log_rates + head, mask=head < H, other=0.0).to(tl.float32))
    e = tl.exp(tl.minimum(x, 20))
    series = e * (1 - e * (1 / 2 - e * (1 / 3 - e * (1 / 4 - e / 5))))
    step = tl.where(x > 20, x, tl.where(x < -3, series, tl.log(1 + e)))
    tl.store(g + token * H + head, -rate * step, mask=inside)
    given = tl.load(b + token * b_t + head, mask=inside, other=0.0)
    strength = (1 / (1 + tl.exp(-given.to(tl.float32)))).to(given.dtype)
    tl.store(beta + token * H + head, strength.to(tl.float32), mask=inside)


def delta_gates(
    a: torch.Tensor, b: torch.Tensor, log_rates: torch.Tensor, bias: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `specdec.backends.recurrent.gates.delta_gates`."""
    a, b = (x if x.stride(1) == 1 else x.contiguous() for x in (a, b))
    num_rows, H = a.shape
    g, beta = torch.empty(2, num_rows, H, dtype=torch.float32, device=a.device)
    block = next_power_of_2(H)
    rows = max(512 // block, 1)
    if num_rows:
        _gates_kernel[(cdiv(num_rows, rows),)](
            a, b, log_rates, bias, g, beta, num_rows, a.stride(0), b.stride(0), H=H, ROWS=rows, BLOCK=block, **early()
        )
    return g, beta


def units(inputs: ScanInputs) -> tuple[ScanInputs, torch.Tensor]:
    """Return inputs whose q and k need no normalisation, and the factors [T, heads] of their outputs."""
    (q, k, v, _, beta, _), strides = arguments(inputs)
    assert q is not None and k is not None and v is not None and beta is not None and inputs.scale is not None
    num_tokens, heads, v_dim = v.shape
    values = torch.empty(v.shape, dtype=torch.float32, device=v.device)
    strengths, factors = torch.empty(2, num_tokens, heads, dtype=torch.float32, device=v.device)
    _units_kernel[(cdiv(num_tokens, BLOCK_T), heads)](
        q, k, v, beta, values, strengths, factors, num_tokens, *strides[:6], *strides[8:10],
        H=heads, GIVEN=q.shape[1], N=q.shape[2], P=v_dim, SCALE=inputs.scale, BLOCK_T=BLOCK_T,
        BLOCK_N=next_power_of_2(q.shape[2]), BLOCK_P=next_power_of_2(v_dim),
    )  # fmt: skip
    return ScanInputs(q, k, values, inputs.g, strengths), factors
