"""Specification, in plain Python, of the tables that `backends.flashinfer.tables` writes, and reading them back."""

import torch

from specdec.backends.flashinfer.tables import MIN_CHUNK, Shapes, TableLayout


def tables_reference(shapes: Shapes, kv_lens: list[int]) -> dict[str, list[int]]:
    """Specification, in plain Python, of the tables that `write_tables` leaves in the workspace, by their names there.

    kv_lens: keys of each request, prefix and tail. Entries of items that there are not: request 0, not valid.
    """
    keys = [max(min(n, shapes.span), 1) for n in kv_lens]

    def num_items(chunk: int) -> int:
        return shapes.tiles * sum(-(-n // chunk) for n in keys)

    most = max(MIN_CHUNK, *keys)
    chunk = next(c for c in range(MIN_CHUNK, most + 1) if num_items(c) <= shapes.budget or c == most)
    chunks = [-(-n // chunk) for n in keys]
    items = [(r, t, c) for r, n in enumerate(chunks) for t in range(shapes.tiles) for c in range(n)]
    padding = shapes.grid - len(items)
    o_indptr, merge_indptr = [0], [0]
    for n in chunks:
        o_indptr.append(o_indptr[-1] + shapes.q_len * n)
        for _ in range(shapes.q_len):
            merge_indptr.append(merge_indptr[-1] + n)
    return {
        "request": [r for r, _, _ in items] + [0] * padding,
        "qo_tile": [t for _, t, _ in items] + [0] * padding,
        "kv_tile": [c for _, _, c in items] + [0] * padding,
        "o_indptr": o_indptr,
        "chunk_size": [chunk],
        "num_rows": [shapes.rows],
        "merge_indptr": merge_indptr,
        "is_valid": [1] * len(items) + [0] * padding,
    }


def read_tables(shapes: Shapes, workspace: torch.Tensor) -> dict[str, list[int]]:
    """The tables in a workspace [bytes] uint8, by name, as `tables_reference` gives them. Waits for the device."""
    at, host = TableLayout.of(shapes), workspace.cpu()
    lens = [shapes.grid] * 3 + [shapes.bs + 1, 1, 1, shapes.rows + 1, shapes.grid]
    found = {}
    for name, offset, n in zip(TableLayout._fields, at, lens, strict=False):
        width = 1 if name == "is_valid" else 4
        raw = host[offset : offset + width * n].clone()
        found[name] = (raw if width == 1 else raw.view(torch.int32)).tolist()
    return found
