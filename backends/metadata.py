"""Builders of AttentionMetadata, one for each shape a forward can have. Everything is computed on the device from
device-held lengths; only `prefill_metadata` is ragged and takes host lengths, as it runs outside the round."""

from collections.abc import Sequence

import torch

from specdec.batch import AttentionMetadata, ForwardMode


def slots_at(slot_tables: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """KV slots of `positions` [bs, n] int64 in `slot_tables` [bs, width]: [bs, n]; past the table, the last entry."""
    return slot_tables.gather(1, positions.clamp(0, slot_tables.shape[1] - 1))


def uniform_metadata(
    mode: ForwardMode,
    slot_tables: torch.Tensor,
    prefix_lens: torch.Tensor,
    *,
    q_len: int,
    max_prefix: int,
    first_node: int = 0,
    depths: torch.Tensor | None = None,
    tail_depths: torch.Tensor | None = None,
    ancestor_bits: torch.Tensor | None = None,
) -> AttentionMetadata:
    """Metadata of a forward in which every request has `q_len` new tail nodes, numbered from `first_node`.

    slot_tables [bs, width], prefix_lens [bs] int64; depths [bs, q_len]: distance of each query from the end of the
    prefix (None: its node number, a chain); tail_depths [bs, first_node + q_len]: the same for all tail nodes;
    ancestor_bits [bs, q_len] int64 or None for causal.
    """
    nodes = torch.arange(first_node, first_node + q_len, device=prefix_lens.device)
    start = prefix_lens.unsqueeze(1)
    positions = start + (nodes if depths is None else depths)
    return AttentionMetadata(
        mode=mode,
        slot_tables=slot_tables,
        prefix_lens=prefix_lens,
        positions=positions.expand(slot_tables.shape[0], -1).reshape(-1),
        out_cache_loc=slots_at(slot_tables, start + nodes).view(-1),
        q_len=q_len,
        tail_len=first_node + q_len,
        max_prefix=max_prefix,
        ancestor_bits=ancestor_bits,
        tail_positions=None if tail_depths is None else start + tail_depths,
    )


def prefill_metadata(slot_tables: torch.Tensor, starts: Sequence[int], q_lens: Sequence[int]) -> AttentionMetadata:
    """Metadata of a packed prefill: request i brings the `q_lens[i]` tokens from position `starts[i]` on."""
    device = slot_tables.device
    positions = torch.cat([torch.arange(s, s + n, device=device) for s, n in zip(starts, q_lens, strict=True)])
    owners = torch.repeat_interleave(torch.arange(len(q_lens), device=device), torch.tensor(q_lens, device=device))
    return AttentionMetadata(
        mode=ForwardMode.EXTEND,
        slot_tables=slot_tables,
        prefix_lens=torch.tensor(starts, device=device),
        positions=positions,
        out_cache_loc=slot_tables[owners, positions],
        q_len=max(q_lens),
        tail_len=max(q_lens),
        max_prefix=max(starts),
        q_lens=tuple(q_lens),
    )
