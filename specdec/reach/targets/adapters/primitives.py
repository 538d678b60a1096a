"""transformers' recurrent primitives by name, and the functions that answer each of them by `conv` and `scan`.

An adapter takes a layer id before transformers' own arguments, packed (batch 1), and computes everything around the
recurrence as its primitive does, in the same dtypes. Arguments that only kernels of other packages read are ignored, as
the torch primitives ignore them.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch
import torch.nn.functional as F
from transformers.activations import ACT2FN

from specdec.backends.recurrent import conv, scan


def _packed(x: torch.Tensor) -> torch.Tensor:
    """Return x [1, ...] without its batch dimension."""
    assert x.shape[0] == 1, f"recurrent layers run packed, batch 1; got {x.shape[0]}"
    return x[0]


def _check_stateless(initial_state: torch.Tensor | None, returns_state: bool) -> None:
    if initial_state is not None or returns_state:
        raise ValueError("recurrent layers were given a cache; expected use_cache=False")


def _conv(
    layer_id: int,
    hidden_states: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
    **_: Any,
) -> torch.Tensor:
    """Return [1, C, T] in the dtype of hidden_states [1, C, T]; weight: [C, K], bias: [C]."""
    x = _packed(hidden_states).transpose(0, 1)
    is_silu = activation in ("silu", "swish")
    out = conv(x.to(weight.dtype), weight, bias, layer_id, is_silu)
    if activation is not None and not is_silu:
        out = ACT2FN[activation](out)
    return out.to(hidden_states.dtype).transpose(0, 1).unsqueeze(0)


def _delta_rule(
    layer_id: int,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    chunk_size: int = 64,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Return [1, T, H, P] in query's dtype and no state; query, key: [1, T, G, N], value: [1, T, H, P], G divides H.

    g: [1, T, H], or [1, T, H, N] for Kimi; beta: [1, T, H].
    """
    _check_stateless(initial_state, output_final_state)
    q, k, v, strength = _packed(query), _packed(key), _packed(value), _packed(beta).float()
    scale = q.shape[-1] ** -0.5
    if use_qk_l2norm_in_kernel:
        out = scan(q, k, v, layer_id, _packed(g).float(), strength, None, scale)
    else:
        out = scan(q.float() * scale, k, v, layer_id, _packed(g).float(), strength)
    return out.to(q.dtype).unsqueeze(0), None


def _step_sizes(dt: torch.Tensor, bias: torch.Tensor | None, is_softplus: bool) -> torch.Tensor:
    """Return dt with its bias, which broadcasts, through softplus or not, in dt's dtype."""
    dt = dt if bias is None else dt + bias.to(dt.dtype)
    return F.softplus(dt) if is_softplus else dt


def _mamba2(
    layer_id: int,
    hidden_states: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    chunk_size: int,
    D: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    initial_states: torch.Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    return_final_states: bool = False,
    **_: Any,
) -> torch.Tensor:
    """Return [1, T, H, P] fp32; hidden_states: [1, T, H, P], dt: [1, T, H], A, D, dt_bias: [H], B, C: [1, T, G, N]."""
    _check_stateless(initial_states, return_final_states)
    step = _step_sizes(_packed(dt), dt_bias, dt_softplus)
    step = step.clamp(min=dt_limit[0], max=dt_limit[1]).float()
    x = _packed(hidden_states).float()
    out = scan(_packed(C), _packed(B), x * step.unsqueeze(-1), layer_id, A.float() * step)
    if D is not None:
        out = out + D.unsqueeze(-1) * x
    return out.unsqueeze(0)


def _mamba(
    layer_id: int,
    hidden_states: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor | None = None,
    z: torch.Tensor | None = None,
    delta_bias: torch.Tensor | None = None,
    delta_softplus: bool = False,
    return_last_state: bool = False,
    **_: Any,
) -> torch.Tensor:
    """Return [1, P, T]; hidden_states, dt, z: [1, P, T], A: [P, N], B, C: [1, N, T], D, delta_bias: [P].

    There is a state per channel: one head, whose rates are A.
    """
    _check_stateless(None, return_last_state)
    x, step = _packed(hidden_states).transpose(0, 1), _packed(dt).transpose(0, 1)
    step = _step_sizes(step, delta_bias, delta_softplus).float()
    q, k = (_packed(t).transpose(0, 1).unsqueeze(1).float() for t in (C, B))
    values, rates = (x.float() * step).unsqueeze(1), A.float().transpose(0, 1).unsqueeze(0)
    out = scan(q, k, values, layer_id, step.unsqueeze(1), None, rates).squeeze(1)
    out = out.to(x.dtype).transpose(0, 1).unsqueeze(0)
    if D is not None:
        out = out + hidden_states * D.unsqueeze(-1)
    return out if z is None else out * F.silu(z)


PRIMITIVES: Mapping[str, Callable[..., Any]] = MappingProxyType(
    {
        "causal_conv1d_fn": _conv,
        "torch_chunk_gated_delta_rule": _delta_rule,
        "chunk_kimi_delta_attention": _delta_rule,
        "mamba2_chunk_scan": _mamba2,
        "mamba_selective_scan": _mamba,
    }
)
