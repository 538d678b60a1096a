"""The specification of recurrent layers in torch, `TORCH_RECURRENT`, and its scans.

They read nothing on the host. Scans are computed for sets of nodes at a time. With cum_i the sum of log decays from
the state S to node i,
    u_i = beta_i (v_i - (exp(cum_i) S)^T k_i - sum of exp(cum_i - cum_j) (k_i . k_j) u_j over j before i on its path),
    o_i = (exp(cum_i) S)^T q_i + sum of exp(cum_i - cum_j) (q_i . k_j) u_j over j on its path, i included,
and the fold of a path that ends with e is exp(cum_e) S + sum of exp(cum_e - cum_j) k_j (x) u_j. The nodes of a prefill
are the tokens of a chunk, after which they are folded. No exponent is above 0; between nodes that do not see each other
it is -inf.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from specdec.backends.recurrent.convolution import conv_extend, conv_step, conv_tail, fold_conv, from_start
from specdec.backends.recurrent.state_pool import (
    EPS,
    ConvLayer,
    RecurrentLayer,
    RecurrentOps,
    ScanInputs,
    ScanLayer,
    ScanSpec,
)
from specdec.core.batch import AttentionMetadata
from specdec.core.cache.pool import Commit

# Tokens. Decays by key take a [CHUNK, CHUNK, heads, k_dim] tensor. Decays by element multiply differences of cum, and
# their rounding errors, by rates: with one token per chunk there are no differences.
CHUNK = {"head": 64, "key": 16, "state": 1}
NEVER = float("-inf")


class Nodes(NamedTuple):
    """Nodes as stored in tails: k [bs, n, key_heads, k_dim], u [bs, n, heads, v_dim], g [bs, n, *decay_shape]."""

    k: torch.Tensor
    u: torch.Tensor
    g: torch.Tensor


def _heads(spec: ScanSpec, x: torch.Tensor) -> torch.Tensor:
    """Repeat key heads for the heads that share them: [bs, n, key_heads, k_dim] -> [bs, n, heads, k_dim], fp32."""
    return x.float().repeat_interleave(spec.heads // spec.key_heads, 2)


def _units(spec: ScanSpec, inputs: ScanInputs) -> tuple[ScanInputs, torch.Tensor | float]:
    """Return inputs whose q and k need no normalisation, expanded to key_heads, and output factors [T, heads, 1].

    Writing u = beta (v - S^T c k) under the unit key c k equals writing c u = beta c^2 (v / c - S^T k) under k.
    """
    q, k, v, g, beta, rates, scale = inputs
    q, k = (x.repeat_interleave(spec.key_heads // x.shape[1], 1) for x in (q, k))
    if scale is None:
        return ScanInputs(q, k, v, g, beta, rates), 1.0
    assert beta is not None
    c, of_q = (
        torch.rsqrt(x.float().square().sum(-1) + EPS).repeat_interleave(spec.heads // spec.key_heads, 1) for x in (k, q)
    )
    return ScanInputs(q, k, v.float() / c.unsqueeze(-1), g, beta * c * c), (scale * of_q).unsqueeze(-1)


def _decays(spec: ScanSpec, cum: torch.Tensor, rates: torch.Tensor | None) -> torch.Tensor:
    """Return the log decays of elements of the state, [..., heads, k_dim or 1, v_dim or 1]."""
    if spec.decay == "head":
        return cum[..., None, None]
    return cum.unsqueeze(-1) if rates is None else rates * cum.unsqueeze(-2)


def _sums(g: torch.Tensor, is_in: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return sums of the log decays g [..., n, *decay_shape] of the nodes in the mask `is_in` [..., n]: over all nodes,
    and for each node over those after it."""
    upto = torch.where(is_in.view(*is_in.shape, *[1] * (g.dim() - is_in.dim())), g, 0).cumsum(is_in.dim() - 1)
    cum = upto.select(is_in.dim() - 1, -1)
    return cum, cum.unsqueeze(is_in.dim() - 1) - upto


def _read(
    spec: ScanSpec,
    x: torch.Tensor,
    cum: torch.Tensor,
    gap: torch.Tensor,
    state: torch.Tensor,
    k: torch.Tensor,
    sees: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what vectors x [bs, q, heads, k_dim] read from the state, [bs, heads, q, v_dim], and their weights of the
    nodes that they see, [bs, heads, q, n]; for decays by head or by key.

    cum: log decays from the state to x; k: of the nodes [bs, n, heads, k_dim]; gap: log decays from each node to x
    [bs, q, n, *decay_shape].
    """
    at = cum if spec.decay == "key" else cum.unsqueeze(-1)
    from_state = torch.einsum("bihn,bhnp->bhip", x * at.exp(), state)
    decay = torch.where(sees.view(*sees.shape, *[1] * (gap.dim() - 3)), gap, NEVER).exp()
    if spec.decay == "key":
        return from_state, torch.einsum("bihn,bjhn,bijhn->bhij", x, k, decay)
    return from_state, torch.einsum("bihn,bjhn->bhij", x, k) * decay.permute(0, 3, 1, 2)


def run_nodes(
    spec: ScanSpec, inputs: ScanInputs, state: torch.Tensor, old: Nodes, sees: torch.Tensor
) -> tuple[torch.Tensor, Nodes]:
    """Run new nodes after `old` ones and state [bs, heads, k_dim, v_dim]; sees: mask [bs, q, old and new nodes].

    inputs: as `ScanInputs`, but [bs, q, ...]. Returns outputs [bs, q, heads, v_dim] fp32 and the new nodes.
    """
    g, first = inputs.g.float(), old.k.shape[1]
    cum, gap = _sums(torch.cat([old.g, g], 1).unsqueeze(1).expand(-1, g.shape[1], *[-1] * (g.dim() - 1)), sees)
    q, k, v = _heads(spec, inputs.q), _heads(spec, inputs.k), inputs.v.float()
    keys = torch.cat([_heads(spec, old.k), k], 1)
    if inputs.rates is not None:
        us = torch.cat([old.u, v], 1)
        reads = [
            torch.einsum(
                "bhn,bhnp->bhp",
                q[:, i],
                _fold_elements(spec, state, keys, us, cum[:, i], gap[:, i], sees[:, i], inputs.rates),
            )
            for i in range(q.shape[1])
        ]
        return torch.stack(reads, 1), Nodes(inputs.k.float(), v, g)
    u = v.transpose(1, 2)  # [bs, heads, q, v_dim]
    if inputs.beta is not None:
        own = torch.arange(first, sees.shape[2], device=sees.device).unsqueeze(1)
        others = sees & (torch.arange(sees.shape[2], device=sees.device) != own)
        from_state, weights = _read(spec, k, cum, gap, state, keys, others)
        beta = inputs.beta.float().transpose(1, 2).unsqueeze(3)
        known = beta * (u - from_state - weights[..., :first] @ old.u.transpose(1, 2))
        system = torch.eye(u.shape[2], device=u.device) + beta * weights[..., first:]
        u = torch.linalg.solve_triangular(system, known, upper=False, unitriangular=True)
    from_state, weights = _read(spec, q, cum, gap, state, keys, sees)
    new = Nodes(inputs.k.float(), u.transpose(1, 2), g)
    out = from_state + weights @ torch.cat([old.u, new.u], 1).transpose(1, 2)
    return out.transpose(1, 2), new


def _fold_elements(
    spec: ScanSpec,
    state: torch.Tensor,
    keys: torch.Tensor,
    us: torch.Tensor,
    cum: torch.Tensor,
    gap: torch.Tensor,
    sees: torch.Tensor,
    rates: torch.Tensor,
) -> torch.Tensor:
    """Fold the nodes in the mask `sees` [bs, n], decaying elements of the state by rates * cum [bs, heads, v_dim]."""
    out = _decays(spec, cum, rates).exp() * state
    for j in range(keys.shape[1]):
        decay = torch.where(sees[:, j].view(-1, 1, 1, 1), _decays(spec, gap[:, j], rates), NEVER).exp()
        out = out + decay * keys[:, j].unsqueeze(-1) * us[:, j].unsqueeze(-2)
    return out


def fold_nodes(
    spec: ScanSpec, state: torch.Tensor, path: Nodes, num: torch.Tensor, rates: torch.Tensor | None
) -> torch.Tensor:
    """Fold the first num [bs] nodes of a path into state [bs, heads, k_dim, v_dim], which 0 nodes leave unchanged."""
    is_in, keys = torch.arange(path.k.shape[1], device=state.device) < num.unsqueeze(1), _heads(spec, path.k)
    end, gap = _sums(path.g, is_in)
    if rates is not None:
        folded = _fold_elements(spec, state, keys, path.u, end, gap, is_in, rates)
    else:
        decay = torch.where(is_in[..., None, None], _decays(spec, gap, None).squeeze(-1), NEVER).exp()
        written = torch.einsum("bjhn,bjhp->bhnp", decay * keys, path.u)
        folded = _decays(spec, end, None).exp() * state + written
    return torch.where(num.view(-1, 1, 1, 1) > 0, folded, state)


def scan_tail(inputs: ScanInputs, layer: ScanLayer, metadata: AttentionMetadata) -> torch.Tensor:
    """See `StatePool.scan`: run nodes after the row's state and the older nodes of their paths; store them in tails."""
    m, spec = metadata, layer.spec
    first = m.tail_len - m.q_len
    old = Nodes(*(t[m.rows, :first] for t in (layer.k, layer.u, layer.g)))
    tokens = torch.arange(m.num_reqs * m.q_len, device=m.rows.device).view(m.num_reqs, m.q_len)
    given, factors = _units(spec, inputs)
    batch = _taken(given, tokens, _keep_rates(inputs.rates, layer))
    state = from_start(layer.state[m.rows], m.prefix_lens)
    out, new = run_nodes(spec, batch, state, old, m.visible_nodes())
    for tail, value in zip((layer.k, layer.u, layer.g), new, strict=True):
        tail[m.rows.unsqueeze(1), torch.arange(first, m.tail_len, device=tail.device)] = value
    return (out.reshape(inputs.v.shape) * factors).to(inputs.v.dtype)


def _taken(inputs: ScanInputs, tokens: torch.Tensor, rates: torch.Tensor | None) -> ScanInputs:
    q, k, v, g, beta, *_ = inputs
    return ScanInputs(q[tokens], k[tokens], v[tokens], g[tokens], None if beta is None else beta[tokens], rates)


def _keep_rates(rates: torch.Tensor | None, layer: ScanLayer) -> torch.Tensor | None:
    return None if rates is None or layer.rates is None else layer.rates.copy_(rates)


def scan_step(inputs: ScanInputs, layer: ScanLayer, metadata: AttentionMetadata) -> torch.Tensor:
    """See `StatePool.scan`: run a tail of one node, and fold it at once."""
    out = scan_tail(inputs, layer, metadata)
    _fold_scan(layer, metadata.rows, metadata.prefix_lens, torch.zeros_like(metadata.rows).unsqueeze(1))
    return out


def scan_extend(inputs: ScanInputs, layer: ScanLayer, metadata: AttentionMetadata) -> torch.Tensor:
    """See `StatePool.scan`: run every request's tokens after its row's state, and update that."""
    m, spec = metadata, layer.spec
    rates, device, num_tokens = _keep_rates(inputs.rates, layer), m.rows.device, inputs.v.shape[0]
    begin, end = m.qo_indptr[:-1, None].long(), m.qo_indptr[1:, None].long()
    state = from_start(layer.state[m.rows], m.prefix_lens)
    given, factors = _units(spec, inputs)
    out = layer.state.new_zeros(num_tokens + 1, *inputs.v.shape[1:])  # the last entry takes padding
    size = min(CHUNK[spec.decay], m.q_len)
    causal = torch.ones(size, size, dtype=torch.bool, device=device).tril().expand(m.num_reqs, -1, -1)
    empty = Nodes(*(t[m.rows, :0] for t in (layer.k, layer.u, layer.g)))
    for first in range(0, m.q_len, size):
        place = begin + first + torch.arange(size, device=device)
        num = (end - begin - first).clamp(0, size).squeeze(1)
        chunk = _taken(given, place.clamp(max=num_tokens - 1), rates)
        found, nodes = run_nodes(spec, chunk, state, empty, causal)
        out[torch.where(place < end, place, num_tokens)] = found
        state = fold_nodes(spec, state, nodes, num, rates)
    layer.state[m.rows] = torch.where((end > begin).view(-1, 1, 1, 1), state, layer.state[m.rows])
    return (out[:-1] * factors).to(inputs.v.dtype)


def _fold_scan(layer: ScanLayer, rows: torch.Tensor, seq_lens: torch.Tensor, accept_index: torch.Tensor) -> None:
    num, nodes = (accept_index >= 0).sum(1), accept_index.clamp(min=0)
    path = Nodes(*(t[rows.unsqueeze(1), nodes] for t in (layer.k, layer.u, layer.g)))
    folded = fold_nodes(layer.spec, from_start(layer.state[rows], seq_lens), path, num, layer.rates)
    layer.state[rows] = torch.where(num.view(-1, 1, 1, 1) > 0, folded, layer.state[rows])


def folder(layers: Sequence[RecurrentLayer]) -> Commit:
    """Return the function that folds accepted paths into the states of `layers`."""

    def commit(
        slot_table: torch.Tensor, rows: torch.Tensor, seq_lens: torch.Tensor, accept_index: torch.Tensor
    ) -> None:
        for layer in layers:
            if isinstance(layer, ConvLayer):
                fold_conv(layer, rows, seq_lens, accept_index)
            else:
                _fold_scan(layer, rows, seq_lens, accept_index)

    return commit


TORCH_RECURRENT = RecurrentOps("torch", conv_extend, conv_step, conv_tail, scan_extend, scan_step, scan_tail, folder)
