"""Norms of embeddings beside those of states, and rope tables by position. Twin: `backends.linear.inputs`."""

from typing import Any

import torch
import triton
import triton.language as tl

from specdec.backends.triton.launch.relaunch import early_and_leading, wait_for_others
from specdec.backends.triton.launch.sizes import cdiv, next_power_of_2
from specdec.backends.triton.linear.norms import NUM_WARPS, WIDE, normalised


@triton.jit(do_not_specialize=["num_rows"], do_not_specialize_on_alignment=["ids", "positions"])
def _inputs_kernel(
    ids,
    embedding,
    states,
    positions,
    tables,
    state_weight,
    weight,
    out,
    rows_of_tables,
    num_rows,
    eps,
    offset,
    H: tl.constexpr,
    R: tl.constexpr,
    LATE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_R: tl.constexpr,
    PDL: tl.constexpr,
    LEADS: tl.constexpr,
):
    """Write ROWS rows of the embeddings' half, the states' half, or the rope tables, by the second program id."""
    part = tl.program_id(1)
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    h, r = tl.arange(0, BLOCK), tl.arange(0, BLOCK_R)
    of_embeds = tl.load(weight + h, mask=(h < H) & (part == 0), other=0.0)
    of_states = tl.load(state_weight + h, mask=(h < H) & (part == 1), other=0.0)
    wait_for_others(PDL, LEADS)
    is_row = row < num_rows
    if part == 2:
        position = tl.load(positions + row, mask=is_row, other=0)
        is_entry = is_row[:, None] & (r < R)[None, :]
        found = tl.load(tables + position[:, None] * R + r[None, :], mask=is_entry, other=0.0)
        tl.store(rows_of_tables + row[:, None] * R + r[None, :], found, mask=is_entry)
    else:
        token = tl.maximum(tl.load(ids + row, mask=is_row, other=0), 0)
        inside = is_row[:, None] & (h < H)[None, :]
        embed = tl.load(embedding + token[:, None] * H + h[None, :], mask=inside & (part == 0), other=0.0)
        state = tl.load(states + row[:, None] * H + h[None, :], mask=inside & (part == 1), other=0.0)
        scale = tl.where(part == 0, of_embeds, of_states)
        normed = normalised(tl.where(part == 0, embed, state), scale, eps, offset, H, LATE)
        tl.store(out + (2 * row[:, None] + part) * H + h[None, :], normed, mask=inside)


def joined_inputs(
    ids: torch.Tensor, embedding: torch.Tensor, states: torch.Tensor, *others: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `specdec.backends.linear.inputs.joined_inputs`."""
    positions, tables, state_weight, weight, eps, offset, is_late = others
    (num_rows, H), R = states.shape, tables[0].numel()
    out = torch.empty(num_rows, 2 * H, dtype=states.dtype, device=states.device)
    rope = torch.empty(num_rows, *tables.shape[1:], dtype=tables.dtype, device=tables.device)
    block = next_power_of_2(H)
    together = max(WIDE // block, 1)  # as in `norms`
    if num_rows:
        tensors = ids, embedding, states, positions, tables
        _inputs_kernel[(cdiv(num_rows, together), 3)](
            *(t.contiguous() for t in tensors), state_weight, weight, out, rope, num_rows, eps, offset,
            H=H, R=R, LATE=is_late, ROWS=together, BLOCK=block, BLOCK_R=next_power_of_2(R),
            num_warps=NUM_WARPS, **early_and_leading(num_rows),
        )  # fmt: skip
    return out, rope
