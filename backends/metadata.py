"""Builders of AttentionMetadata, one for each shape of a forward. They compute on the device from lengths on the
device; only `prefill` takes lengths on the host, as it runs outside the round.

The torch functions specify the kernels of the same names in `triton.attention.metadata`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from specdec.core.batch import AttentionMetadata, ForwardMode, ancestor_mask, ints_to_device


class Placement(NamedTuple):
    """Positions and KV slots of a forward's tokens; the fields are those of AttentionMetadata."""

    positions: torch.Tensor
    out_cache_loc: torch.Tensor
    qo_indptr: torch.Tensor
    tail_positions: torch.Tensor | None = None
    path_slots: torch.Tensor | None = None
    rotary: torch.Tensor | None = None


@dataclass(frozen=True)
class MetadataBuilder:
    """Builds AttentionMetadata on the device, by the torch functions of this module or by their Triton kernels."""

    uniform_placement: Callable[..., Placement]
    prefill_placement: Callable[..., Placement]

    def uniform(
        self,
        mode: ForwardMode,
        slot_table: torch.Tensor,
        rows: torch.Tensor,
        prefix_lens: torch.Tensor,
        *,
        q_len: int,
        max_prefix: int,
        first_node: int = 0,
        depths: torch.Tensor | None = None,
        tail_depths: torch.Tensor | None = None,
        ancestor_bits: torch.Tensor | None = None,
        rope_deltas: torch.Tensor | None = None,
    ) -> AttentionMetadata:
        """Build the metadata of a forward with `q_len` new tail nodes per request, numbered from `first_node`.

        slot_table [num_rows, width] int32; rows, prefix_lens [bs] int64; max_prefix: host upper bound of prefix_lens;
        depths [bs, q_len] int64: distance of each query from the end of the prefix (None: its node number, a chain);
        tail_depths [bs, first_node + q_len] int64: the same for all tail nodes; ancestor_bits [bs, q_len, W] int64, or
        None for a chain, which is causal; rope_deltas [num_rows] int64: offset of a row's rotary positions. ValueError
        for shapes that do not match.
        """
        if q_len < 1 or rows.shape != prefix_lens.shape or rows.dim() != 1:
            raise ValueError(
                f"q_len={q_len}, rows {list(rows.shape)}, prefix_lens {list(prefix_lens.shape)}: expected a q_len of "
                "at least 1, and a row and a length for each request"
            )
        words = ancestor_bits.shape[2:] if ancestor_bits is not None and ancestor_bits.dim() == 3 else (1,)
        for name, given, *expected in (
            ("depths", depths, q_len),
            ("tail_depths", tail_depths, first_node + q_len),
            ("ancestor_bits", ancestor_bits, q_len, *words),
        ):
            if given is not None and given.shape != (len(rows), *expected):
                raise ValueError(f"{name} {list(given.shape)}: expected {[len(rows), *expected]}")
        bits = None if ancestor_bits is None else ancestor_bits.contiguous()
        where = slot_table, rows, prefix_lens
        placement = self.uniform_placement(*where, q_len, first_node, depths, tail_depths, bits, rope_deltas)
        return AttentionMetadata(
            mode=mode,
            slot_table=slot_table,
            rows=rows,
            prefix_lens=prefix_lens,
            q_len=q_len,
            tail_len=first_node + q_len,
            max_prefix=max_prefix,
            ancestor_bits=bits,
            **placement._asdict(),
        )

    def prefill(
        self,
        slot_table: torch.Tensor,
        rows: torch.Tensor,
        starts: Sequence[int],
        q_lens: Sequence[int],
        on_device: Sequence[torch.Tensor] | None = None,
        into: Sequence[torch.Tensor] | None = None,
    ) -> AttentionMetadata:
        """Build the metadata of a packed prefill: request i has the `q_lens[i]` tokens from position `starts[i]` on.

        slot_table [num_rows, width] int32; rows [bs] int64. on_device: starts and q_lens, [bs] int64, if they are
        on the device already. into: two int64 tensors that take positions and out_cache_loc in their first T elements
        if they are long enough; None: new tensors. ValueError for lengths that do not fit rows or slot_table.
        """
        _check_lengths(rows, starts, q_lens, slot_table.shape[1])
        if on_device is None:
            on_device = ints_to_device([list(starts), list(q_lens)], rows.device).unbind()
        longest, num_tokens = max(q_lens), sum(q_lens)
        fits = into is not None and all(t.shape[0] >= num_tokens for t in into)
        placement = self.prefill_placement(slot_table, rows, *on_device, num_tokens, longest, into if fits else None)
        return AttentionMetadata(
            mode=ForwardMode.EXTEND,
            slot_table=slot_table,
            rows=rows,
            prefix_lens=on_device[0],
            q_len=longest,
            tail_len=longest,
            max_prefix=max(starts),
            q_lens=tuple(q_lens),
            starts=tuple(starts),
            **placement._asdict(),
        )

    def packed(
        self,
        slot_table: torch.Tensor,
        rows: torch.Tensor,
        starts: torch.Tensor,
        q_lens: torch.Tensor,
        num_tokens: int,
        max_prefix: int,
    ) -> AttentionMetadata:
        """Build the metadata of a packed prefill of at most `num_tokens` tokens whose lengths only the device knows.

        slot_table [num_rows, width] int32; rows, starts, q_lens [bs] int64 on the device. Request i has the q_lens[i]
        tokens from position starts[i] <= max_prefix on; the tokens after the last request's are padding, at position 0
        in slot 0.
        """
        into = torch.zeros(2, num_tokens, dtype=torch.int64, device=rows.device).unbind()
        placement = self.prefill_placement(slot_table, rows, starts, q_lens, num_tokens, num_tokens, into)
        return AttentionMetadata(
            mode=ForwardMode.EXTEND,
            slot_table=slot_table,
            rows=rows,
            prefix_lens=starts,
            q_len=num_tokens,
            tail_len=num_tokens,
            max_prefix=max_prefix,
            **placement._asdict(),
        )


def _check_lengths(rows: torch.Tensor, starts: Sequence[int], q_lens: Sequence[int], width: int) -> None:
    """Raise ValueError for lengths that do not match `rows` or leave the table's `width`; host numbers only."""
    if not len(starts) == len(q_lens) == rows.shape[0] > 0:
        raise ValueError(
            f"{rows.shape[0]} rows, {len(starts)} starts, {len(q_lens)} q_lens: expected one for each request"
        )
    for start, num in zip(starts, q_lens, strict=True):
        if start < 0 or num < 1 or start + num > width:
            raise ValueError(f"{num} tokens from position {start} on: expected 1 or more within the table's {width}")


def slots_at(slot_table: torch.Tensor, rows: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Return the KV slots [bs, n] of `positions` [bs, n], clamped to the row, in `rows` [bs]; all int64."""
    return slot_table[rows.unsqueeze(1), positions.clamp(0, slot_table.shape[1] - 1)].long()


def uniform_placement(
    slot_table: torch.Tensor,
    rows: torch.Tensor,
    prefix_lens: torch.Tensor,
    q_len: int,
    first_node: int,
    depths: torch.Tensor | None,
    tail_depths: torch.Tensor | None,
    ancestor_bits: torch.Tensor | None,
    rope_deltas: torch.Tensor | None = None,
) -> Placement:
    """Compute the Placement for `MetadataBuilder.uniform`, which describes the arguments."""
    bs, path_slots = rows.shape[0], None
    nodes = torch.arange(first_node, first_node + q_len, device=prefix_lens.device)
    start = prefix_lens.unsqueeze(1)
    positions = start + (nodes if depths is None else depths)
    if ancestor_bits is not None and tail_depths is not None:
        tail = torch.arange(tail_depths.shape[1], device=prefix_lens.device)
        is_seen = ancestor_mask(ancestor_bits, len(tail))
        slots = slots_at(slot_table, rows, start + tail).unsqueeze(1).expand_as(is_seen)
        depths = tail_depths.clamp(max=len(tail)).unsqueeze(1)
        at = torch.where(is_seen, depths, len(tail))  # others go to a column that is cut off
        path_slots = slots.new_zeros(bs, q_len, len(tail) + 1).scatter_(2, at, slots)[..., :-1].int()
    return Placement(
        positions=positions.expand(bs, -1).reshape(-1),
        out_cache_loc=slots_at(slot_table, rows, start + nodes).view(-1),
        qo_indptr=torch.arange(0, (bs + 1) * q_len, q_len, dtype=torch.int32, device=prefix_lens.device),
        tail_positions=None if tail_depths is None else start + tail_depths,
        path_slots=path_slots,
        rotary=None if rope_deltas is None else (positions + rope_deltas[rows].unsqueeze(1)).expand(bs, -1).reshape(-1),
    )


def prefill_placement(
    slot_table: torch.Tensor,
    rows: torch.Tensor,
    starts: torch.Tensor,
    q_lens: torch.Tensor,
    num_tokens: int,
    longest: int,
    into: Sequence[torch.Tensor] | None = None,
) -> Placement:
    """Compute the Placement of a packed prefill; starts, q_lens [bs] int64.

    num_tokens, longest: sum and maximum of q_lens, or host upper bounds: tokens past the sum get position 0 and slot
    0. into: see `MetadataBuilder.prefill`.
    """
    qo_indptr = indptr(q_lens)
    places = torch.arange(num_tokens, dtype=torch.int32, device=q_lens.device)
    owners = torch.searchsorted(qo_indptr[1:], places, right=True)
    is_live = owners < q_lens.numel()
    owners = owners.clamp(max=q_lens.numel() - 1)
    positions = torch.where(is_live, starts[owners] + places - qo_indptr[owners], 0)
    slots = torch.where(is_live, slot_table[rows[owners], positions], 0).long()
    if into is not None:
        positions, slots = (t[:num_tokens].copy_(own) for t, own in zip(into, (positions, slots), strict=True))
    return Placement(positions, slots, qo_indptr)


def indptr(lens: torch.Tensor) -> torch.Tensor:
    """Return the cumulative sums of lens [bs] with a leading 0, [bs + 1] int32: bounds of packed requests."""
    return torch.nn.functional.pad(lens.cumsum(0), (1, 0)).to(torch.int32)


TORCH_METADATA = MetadataBuilder(uniform_placement, prefill_placement)
