"""Attention in plain torch: the reference every other backend is compared to. CPU and CUDA, exact in fp32.

K/V of prefix and tail are gathered into a dense [bs, kv] block and attended under one boolean mask. Positions that a
request does not own (past its prefix, in a block as wide as the longest request's) read the request's own first tail
slot instead, so that NaN in a pool slot never reaches another request's product.
"""

from dataclasses import dataclass, field

import torch
import torch.nn.functional as F

from specdec.backends.base import AttentionBackend, AttentionCall, Capabilities, LayerSpec
from specdec.backends.metadata import TORCH_METADATA, slots_at
from specdec.backends.rope import prepare
from specdec.core.batch import AttentionMetadata, ForwardMode


@dataclass
class _Plan:
    """kv_slots [bs, kv] int64; mask [bs, q, kv] bool; q_pos [bs, q], k_pos [bs, kv] int64; pad [bs, q] int64: rows of
    the packed batch, for prefills only; unpad [T] int64: its inverse."""

    kv_slots: torch.Tensor
    mask: torch.Tensor
    q_pos: torch.Tensor
    k_pos: torch.Tensor
    pad: torch.Tensor | None
    unpad: torch.Tensor | None
    near: dict[tuple[int | None, int | None], torch.Tensor] = field(default_factory=dict)

    def mask_for(self, layer: LayerSpec) -> torch.Tensor:
        """Return the mask of `layer`, made once per forward for all layers with its window and chunk."""
        if layer.sees_all:
            return self.mask
        key = layer.window, layer.chunk
        if key not in self.near:
            self.near[key] = self.mask & (self.k_pos.unsqueeze(1) >= self._first_visible(layer).unsqueeze(2))
        return self.near[key]

    def _first_visible(self, layer: LayerSpec) -> torch.Tensor:
        """Return the first position that each query sees, [bs, q]; 0 or less: all."""
        q_pos = self.q_pos
        first = torch.zeros_like(q_pos) if layer.window is None else q_pos - layer.window + 1
        return first if layer.chunk is None else torch.maximum(first, q_pos - q_pos % layer.chunk)


class TorchBackend(AttentionBackend):
    """Reference attention in plain torch, on CPU and CUDA; exact in fp32."""

    name = "torch"
    capabilities = Capabilities(
        packed_prefill=True,
        v_dim_differs=True,
        max_latent_dim=1 << 16,
        chunks=True,
        limits=True,
        dtypes=frozenset({torch.float64, torch.float32, torch.bfloat16, torch.float16}),
        max_head_dim=1 << 16,
    )
    metadata = TORCH_METADATA

    def __init__(self) -> None:
        super().__init__()
        self._plan: _Plan | None = None

    def _prepare(self, metadata: AttentionMetadata) -> None:
        m, device = metadata, metadata.prefix_lens.device
        prefix = m.prefix_lens.unsqueeze(1)  # [bs, 1]
        tail_index = torch.arange(m.tail_len, device=device)
        prefix_index = torch.arange(m.max_prefix, device=device)
        tail_slots = slots_at(m.slot_table, m.rows, prefix + tail_index)
        if m.mode is ForwardMode.EXTEND:  # a shorter request owns no slots past its tokens
            owned = tail_index < m.qo_indptr.diff().unsqueeze(1)
            tail_slots = torch.where(owned, tail_slots, tail_slots[:, :1])
        in_prefix = prefix_index < prefix  # [bs, max_prefix]
        prefix_slots = m.slot_table[:, : m.max_prefix].index_select(0, m.rows).long()
        prefix_slots = torch.where(in_prefix, prefix_slots, tail_slots[:, :1])
        mask = torch.cat([in_prefix.unsqueeze(1).expand(-1, m.q_len, -1), m.visible_nodes()], 2)
        tail_positions = m.tail_positions if m.tail_positions is not None else prefix + tail_index
        k_pos = torch.cat([prefix_index.expand(m.num_reqs, -1), tail_positions], 1)
        pad, unpad = _ragged_rows(m, device)
        if m.limits is not None:
            ahead = (tail_positions.unsqueeze(1) <= m.limits[pad].unsqueeze(2)) & owned.unsqueeze(1)
            mask = torch.cat([mask[..., : m.max_prefix], ahead], 2)
        q_pos = m.positions[pad] if pad is not None else m.positions.view(m.num_reqs, m.q_len)
        kv_slots = torch.cat([prefix_slots, tail_slots], 1)
        self._plan = _Plan(kv_slots, mask, q_pos, k_pos, pad, unpad)

    def store(self, call: AttentionCall, slots: torch.Tensor, q_out: torch.Tensor | None = None) -> torch.Tensor:
        q, k = call.q, call.k
        assert k is not None and call.v is not None
        if call.rope is not None:
            q, k = prepare(q, k, call.rope)
        call.pool.write(call.layer_id, slots, k, call.v)
        return q if q_out is None else q_out.copy_(q)

    def _attend(self, call: AttentionCall) -> None:
        q, out, pool, layer_id, layer, sinks = call.q, call.out, call.pool, call.layer_id, call.layer, call.sinks
        plan = self._plan
        assert plan is not None
        bs, kv_len = plan.kv_slots.shape
        slots = plan.kv_slots.view(-1)
        keys, values = (
            cache[layer_id].index_select(0, slots).unflatten(0, (bs, kv_len)).transpose(1, 2)
            for cache in (pool.k, pool.v)
        )
        rows = q[plan.pad] if plan.pad is not None else q.unflatten(0, plan.q_pos.shape)  # [bs, q_len, Hq, qk_dim]
        result = _attend(rows, keys, values, plan.mask_for(layer), layer, sinks)
        result = result.reshape(-1, *result.shape[2:])
        out.copy_(result if plan.unpad is None else result[plan.unpad])


def _ragged_rows(m: AttentionMetadata, device: torch.device) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Return index maps between the packed batch and [bs, q_len]: padding of [bs, q_len] repeats a request's last row
    and is dropped; padding of the packed batch takes a row of some request."""
    if m.mode is not ForwardMode.EXTEND:
        return None, None
    lens, starts = m.qo_indptr.diff().long(), m.qo_indptr[:-1].long()
    columns = torch.arange(m.q_len, device=device)
    pad = (starts.unsqueeze(1) + torch.minimum(columns, lens.unsqueeze(1) - 1)).clamp(0, m.positions.shape[0] - 1)
    owners = m.owners().clamp(max=m.num_reqs - 1)
    places = torch.arange(m.positions.shape[0], device=device)
    return pad, owners * m.q_len + (places - starts[owners]).clamp(max=m.q_len - 1)


def _attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor, layer: LayerSpec, sinks: torch.Tensor | None
) -> torch.Tensor:
    """Return attention [bs, q, Hq, v_dim] of q [bs, q, Hq, qk_dim], k/v [bs, Hkv, kv, dim], mask [bs, q, kv] bool.

    Query heads of one KV head become additional queries, so K/V are never repeated.
    """
    q_len, group = q.shape[1], q.shape[2] // layer.num_kv_heads
    grouped = q.unflatten(2, (layer.num_kv_heads, group)).permute(0, 2, 3, 1, 4).flatten(2, 3)
    wide_mask = mask.unsqueeze(1).expand(-1, group, -1, -1).flatten(1, 2).unsqueeze(1)  # [bs, 1, group*q, kv]
    if layer.softcap is None and sinks is None:
        result = F.scaled_dot_product_attention(grouped, k, v, attn_mask=wide_mask, scale=layer.scaling)
    else:
        logits = grouped @ k.transpose(2, 3) * layer.scaling
        if layer.softcap is not None:
            logits = torch.tanh(logits / layer.softcap) * layer.softcap
        logits = logits.masked_fill(~wide_mask, float("-inf"))
        if sinks is not None:
            per_head = sinks.view(1, layer.num_kv_heads, -1, 1, 1).expand(q.shape[0], -1, -1, q_len, -1)
            logits = torch.cat([logits, per_head.flatten(2, 3).to(logits.dtype)], -1)
        result = logits.softmax(-1, dtype=torch.float32)[..., : k.shape[2]].to(q.dtype) @ v
    return result.unflatten(2, (group, q_len)).permute(0, 3, 1, 2, 4).flatten(2, 3)
