"""What the host tells the device, in as few copies as can be: newly admitted requests, and the tokens of a prefill."""

from collections.abc import Sequence

import numpy as np
import torch

from specdec.backends.metadata import MetadataBuilder
from specdec.batch import to_device
from specdec.draft.worker import PrefillChunk
from specdec.kv_cache import SlotTables
from specdec.round_ops import RoundOps
from specdec.scheduler import Request
from specdec.state import EngineState


def copy_to(device: torch.device, values: np.ndarray) -> torch.Tensor:
    """`values`, int64, on the device, without waiting for it."""
    return to_device(torch.from_numpy(values), device)


def write_requests(
    state: EngineState, slot_tables: SlotTables, requests: Sequence[Request], constants: np.ndarray, ops: RoundOps
) -> None:
    """Write `constants` (see `EngineState.pack`) and the slot tables of admitted requests into their rows, in one copy;
    those with penalties, bans or biases take two more each."""
    rows = [r.row for r in requests if r.row is not None]
    packed = np.concatenate([np.array(rows)[:, None], constants, slot_tables.pages_of(rows)], 1)
    table = slot_tables.table
    ops.admit(copy_to(table.device, packed), state.columns, table, slot_tables.page_size)
    state.fill_rules(requests)


def rewrite_row(state: EngineState, slot_tables: SlotTables, ops: RoundOps, row: int) -> None:
    """Admit to `row` what it holds already, and no pages: for the dummy row, so that the kernel is compiled."""
    own = [column[row].reshape(-1) for column in state.columns]
    numbers = [n.double().view(torch.int64) if n.is_floating_point() else n for n in own]
    packed = torch.cat([own[0].new_tensor([row]), *numbers]).unsqueeze(0)
    ops.admit(packed, state.columns, slot_tables.table, slot_tables.page_size)


def pack_chunk(
    pieces: Sequence[tuple[Request, int]],
    table: torch.Tensor,
    builder: MetadataBuilder,
    into: Sequence[torch.Tensor] | None = None,
) -> tuple[PrefillChunk, torch.Tensor]:
    """The packed chunk that `pieces` (request, number of tokens) make, and its ids [T]; one copy brings it over.

    table [num_rows, width] int32: the slot tables; builder: of the target's backend; into: see its `prefill`.
    """
    starts, lens = [r.num_prefilled for r, _ in pieces], [n for _, n in pieces]
    ids = np.concatenate([r.prompt[r.num_prefilled : r.num_prefilled + n] for r, n in pieces])
    last_rows = np.cumsum(lens) - 1
    # Ids one to the left: the token after each prefilled one, the next chunk's first included; unknown ones are 0.
    next_ids = np.append(ids[1:], 0)
    ends = [r.num_prefilled + n for r, n in pieces]
    next_ids[last_rows] = [
        r.prompt_ids[end] if end < len(r.prompt_ids) else 0 for (r, _), end in zip(pieces, ends, strict=True)
    ]
    parts = [np.array([r.row for r, _ in pieces]), last_rows, np.array(starts), np.array(lens), ids, next_ids]
    packed = copy_to(table.device, np.concatenate(parts))
    rows, last, starts_there, lens_there, ids_there, next_there = packed.split([len(p) for p in parts])
    metadata = builder.prefill(table, rows, starts, lens, (starts_there, lens_there), into)
    return PrefillChunk(metadata, rows, next_there, last), ids_there
