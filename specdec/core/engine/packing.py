"""Packs newly admitted requests and the tokens of a prefill into one copy from host to device each."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from specdec.backends.metadata import MetadataBuilder
from specdec.core.batch import to_device
from specdec.core.cache.tables import SlotTables
from specdec.core.draft.worker import PrefillChunk
from specdec.core.engine.request import Request
from specdec.core.functional.ops import RoundOps
from specdec.core.prefill.whole import Piece
from specdec.core.round.state import MAX_STOP_IDS, EngineState
from specdec.core.text.embedded import Embed, EmbeddedChunk, pack_embedded


def copy_to(device: torch.device, values: np.ndarray) -> torch.Tensor:
    """Return `values`, int64, on the device, without waiting for it."""
    return to_device(torch.from_numpy(values), device)


def pack_requests(requests: Sequence[Request]) -> np.ndarray:
    """Return the constants of `requests`, [n, F] int64, for one copy to the device."""
    return np.array([_numbers_of(r) for r in requests], dtype=np.int64)


def _numbers_of(request: Request) -> tuple[int, ...]:
    """Return the constants of a request, in the order of `EngineState.columns`."""
    no_ids = (-1,) * (MAX_STOP_IDS - len(request.stop_ids))
    rest = request.max_new_tokens - len(request.tokens)
    return (request.num_to_prefill, rest, request.adapter, *request.stop_ids, *no_ids, *request.sampling.bits)


def pack_rows(
    state: EngineState, slot_tables: SlotTables, requests: Sequence[Request], constants: np.ndarray
) -> np.ndarray:
    """Return rows of admitted requests, their `constants` (see `pack_requests`) and pages: [n, 1 + F + P] int64."""
    rows = [r.row for r in requests if r.row is not None]
    assert constants.shape[1] == state.num_admitted, "packed otherwise than EngineState.columns"
    return np.concatenate([np.array(rows)[:, None], constants, slot_tables.pages_of(rows)], 1)


def write_rows(state: EngineState, slot_tables: SlotTables, ops: RoundOps, packed: torch.Tensor) -> None:
    """Write the result of `pack_rows`, on the device, to its rows."""
    ops.admit(packed, state.columns, slot_tables.table, slot_tables.page_size)


def write_rules(state: EngineState, requests: Sequence[Request]) -> None:
    """Write penalties, bans and biases of `requests`, in two copies each; launches nothing if there are none."""
    for r in requests:
        if r.row is not None and (r.sampling.has_processors or r.row in state.processors.used):
            state.processors.fill(r.row, r.prompt_ids, r.sampling, sorted(r.eos_ids))


def write_rest(
    state: EngineState, requests: Sequence[Request], reads_history: bool, rope_deltas: torch.Tensor | None
) -> None:
    """Write state that only some of the admitted `requests` need: rules, tokens with cached K/V, texts, images."""
    write_rules(state, requests)
    if reads_history:
        write_history(state, requests)
    write_texts(state, requests)
    if rope_deltas is not None:
        write_rope_deltas(rope_deltas, requests)


def write_history(state: EngineState, requests: Sequence[Request]) -> None:
    """Write the tokens of `requests` that no prefill will run, since their K/V is cached, to the history."""
    for r in requests:
        if r.row is not None and r.num_cached:
            state.history[r.row, : r.num_cached] = copy_to(state.history.device, r.prompt[: r.num_cached])


def write_texts(state: EngineState, requests: Sequence[Request]) -> None:
    """Write the text so far of those of `requests` that were preempted, and its last token as root."""
    for r in requests:
        if r.row is not None and r.tokens:
            text = copy_to(state.history.device, r.prompt)
            state.history[r.row, : len(r.prompt)] = text
            state.roots[r.row] = text[-1]


def write_rope_deltas(deltas: torch.Tensor, requests: Sequence[Request]) -> None:
    """Write to `deltas` [num_rows] int64 the offsets by which images of `requests` shift later rotary positions."""
    moved = [(r.row, 0 if r.embedded is None else r.embedded.rope_delta) for r in requests if r.row is not None]
    rows, values = copy_to(deltas.device, np.array(moved, dtype=np.int64).reshape(-1, 2).T.copy())
    deltas.index_copy_(0, rows, values)


def rewrite_requests(state: EngineState, slot_tables: SlotTables, ops: RoundOps, requests: Sequence[Request]) -> None:
    """Write `requests` with text, which were taken back, into their rows again, and the last tokens as roots."""
    device = slot_tables.table.device
    write_rows(
        state, slot_tables, ops, copy_to(device, pack_rows(state, slot_tables, requests, pack_requests(requests)))
    )
    write_rules(state, requests)
    last = np.array([[r.row, r.tokens[-1]] for r in requests], dtype=np.int64)
    rows, roots = copy_to(device, last.T.copy())
    state.roots.index_copy_(0, rows, roots)


def rewrite_row(state: EngineState, slot_tables: SlotTables, ops: RoundOps, row: int) -> None:
    """Admit to `row` what it holds already, and no pages: for the dummy row, so that the kernel is compiled."""
    own = [column[row].reshape(-1) for column in state.columns]
    packed = torch.cat([own[0].new_tensor([row]), *own]).unsqueeze(0)
    write_rows(state, slot_tables, ops, packed)


def pack_piece(request: Request, num_tokens: int) -> Piece:
    """Return the next `num_tokens` of a running request's prompt."""
    start, end = request.num_prefilled, request.num_prefilled + num_tokens
    assert request.row is not None
    # Ids one to the left: the token after each prefilled one, the next chunk's first included; an unknown one is 0.
    ids, next_ids = request.prompt[start:end], request.prompt[start + 1 : end + 1]
    return Piece(request.row, start, ids, next_ids, end == request.num_to_prefill)


def pack_images(pieces: Sequence[tuple[Request, int]], chunk: PrefillChunk, embed: Embed) -> EmbeddedChunk | None:
    """Return the embeddings of the chunk of `pieces`, None without images. embed: the target's input embedding."""
    own = [(r.embedded, r.num_prefilled, r.num_prefilled + n) for r, n in pieces if r.embedded is not None]
    assert len(own) in (0, len(pieces)), "prompts with images have prefills of their own"
    return pack_embedded(own, chunk.ids, chunk.metadata.positions, embed) if own else None


def pack_chunk(
    pieces: Sequence[tuple[Request, int]],
    table: torch.Tensor,
    builder: MetadataBuilder,
    into: Sequence[torch.Tensor] | None = None,
) -> PrefillChunk:
    """Return the packed chunk of `pieces` (request, number of tokens), copied to the device at once.

    table [num_rows, width] int32: the slot tables; builder: of the target's backend; into: see its `prefill`.
    """
    packed_pieces = [pack_piece(r, n) for r, n in pieces]
    starts, lens = [p.start for p in packed_pieces], [len(p.ids) for p in packed_pieces]
    ids, next_ids = (np.concatenate(own) for own in zip(*((p.ids, p.next_ids) for p in packed_pieces), strict=True))
    last_rows = np.cumsum(lens) - 1
    parts = [np.array([p.row for p in packed_pieces]), last_rows, np.array(starts), np.array(lens), ids, next_ids]
    packed = copy_to(table.device, np.concatenate(parts))
    rows, last, starts_there, lens_there, ids_there, next_there = packed.split([len(p) for p in parts])
    metadata = builder.prefill(table, rows, starts, lens, (starts_there, lens_there), into)
    return PrefillChunk(replace(metadata, read_rows=last), rows, ids_there, next_there, last)
