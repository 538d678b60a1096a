"""Causal convolutions over paths of nodes and over packed prefills in torch, which specifies them."""

import torch
import torch.nn.functional as F

from specdec.backends.recurrent.state_pool import ConvInputs, ConvLayer
from specdec.core.batch import AttentionMetadata


def from_start(state: torch.Tensor, prefix_lens: torch.Tensor) -> torch.Tensor:
    """Return state [bs, ...], zeros for requests whose prefix is empty."""
    return torch.where(prefix_lens.view(-1, *[1] * (state.dim() - 1)) > 0, state, 0)


def _convolve(windows: torch.Tensor, inputs: ConvInputs) -> torch.Tensor:
    """Convolve windows [..., kernel, C] to [..., C]."""
    x, weight, bias, is_silu = inputs
    y = (windows.float() * weight.float().T).sum(-2)
    y = (y if bias is None else y + bias.float()).to(x.dtype)
    return F.silu(y) if is_silu else y


def conv_tail(inputs: ConvInputs, layer: ConvLayer, metadata: AttentionMetadata) -> torch.Tensor:
    """See `StatePool.conv`: store x in the tails; windows follow paths up into the state."""
    m, kernel, x = metadata, layer.spec.kernel, inputs.x
    requests = torch.arange(m.num_reqs, device=x.device)
    nodes = torch.arange(m.tail_len - m.q_len, m.tail_len, device=x.device)
    layer.tail[m.rows.unsqueeze(1), nodes] = x.reshape(m.num_reqs, m.q_len, -1).to(layer.tail.dtype)
    state = from_start(layer.state[m.rows], m.prefix_lens)
    given = torch.cat([state, layer.tail[m.rows, : m.tail_len]], 1)
    visible = m.visible_nodes()
    num_below = visible.flip(2).cumsum(2).flip(2).unsqueeze(2)  # of the path's nodes, from each to the query
    back = torch.arange(kernel - 1, -1, -1, device=x.device)
    is_it = visible.unsqueeze(2) & (num_below == back.unsqueeze(1) + 1)
    depth = visible.sum(2, keepdim=True)
    index = torch.where(back < depth, is_it.int().argmax(3) + kernel - 1, (kernel - 2 + depth - back).clamp(min=0))
    windows = given[requests.view(-1, 1, 1), index]
    return _convolve(windows, inputs).view(x.shape)


def conv_step(inputs: ConvInputs, layer: ConvLayer, metadata: AttentionMetadata) -> torch.Tensor:
    """See `StatePool.conv`: run a tail of one node, and fold it at once."""
    out = conv_tail(inputs, layer, metadata)
    fold_conv(layer, metadata.rows, metadata.prefix_lens, torch.zeros_like(metadata.rows).unsqueeze(1))
    return out


def conv_extend(inputs: ConvInputs, layer: ConvLayer, metadata: AttentionMetadata) -> torch.Tensor:
    """See `StatePool.conv`: windows reach back into the row's state; store the last inputs as the new state."""
    m, kept, x = metadata, layer.spec.kernel - 1, inputs.x
    state = from_start(layer.state[m.rows], m.prefix_lens)
    begin, end = m.qo_indptr[:-1].long(), m.qo_indptr[1:].long()

    def inputs_at(request: torch.Tensor, place: torch.Tensor) -> torch.Tensor:
        """Return inputs at places of the packed x; those before the request's first token are in the state."""
        before = place - begin[request]
        old = state[request, (before + kept).clamp(0, kept - 1)]
        return torch.where((before >= 0).unsqueeze(-1), x[place.clamp(0, x.shape[0] - 1)].to(old.dtype), old)

    owners = m.owners()
    request = owners.clamp(max=m.num_reqs - 1).unsqueeze(1)
    places = torch.arange(x.shape[0], device=x.device).unsqueeze(1)
    windows = inputs_at(request, places + torch.arange(-kept, 1, device=x.device))
    y = _convolve(windows, inputs)
    requests = torch.arange(m.num_reqs, device=x.device).unsqueeze(1)
    newest = inputs_at(requests, end.unsqueeze(1) + torch.arange(-kept, 0, device=x.device))
    layer.state[m.rows] = torch.where((end > begin).view(-1, 1, 1), newest, layer.state[m.rows])
    return y.masked_fill((owners == m.num_reqs).unsqueeze(1), 0)


def fold_conv(layer: ConvLayer, rows: torch.Tensor, seq_lens: torch.Tensor, accept_index: torch.Tensor) -> None:
    """Store the last inputs of accepted paths as the state of `rows`; see `Commit`."""
    num = (accept_index >= 0).sum(1, keepdim=True)
    path = layer.tail[rows.unsqueeze(1), accept_index.clamp(min=0)]
    inputs = torch.cat([from_start(layer.state[rows], seq_lens), path], 1)
    newest = num + torch.arange(layer.spec.kernel - 1, device=rows.device)
    folded = inputs[torch.arange(rows.shape[0], device=rows.device).unsqueeze(1), newest]
    layer.state[rows] = torch.where(num.unsqueeze(2) > 0, folded, layer.state[rows])
