"""Plain-Python specification of the plan tables that `backends.flashinfer.tables` writes, a reader for workspaces, and
a comparison with FlashInfer's own plan."""

from collections.abc import Sequence
from typing import Any

import torch

from specdec.backends.flashinfer.tables import MIN_CHUNK, NO_WINDOW, Shapes, TableLayout, plan_info, write_tables

INT_FIELDS = (
    "padded_batch_size",
    "total_num_rows",
    "total_num_rows_offset",
    "cta_tile_q",
    "request_indices_offset",
    "qo_tile_indices_offset",
    "kv_tile_indices_offset",
    "merge_indptr_offset",
    "o_indptr_offset",
    "kv_chunk_size_ptr_offset",
    "v_offset",
    "s_offset",
    "block_valid_mask_offset",
    "enable_cuda_graph",
    "split_kv",
)
OURS_TO_CHOOSE = ("v_offset", "s_offset")


def table_problems(module: Any, shapes: Shapes, prefix_lens: Sequence[int], device: torch.device) -> list[str]:
    """Return where FlashInfer's own plan for `shapes` differs from ours: "name: theirs, ours". Synchronises."""
    bs, tail_len = shapes.bs, shapes.q_len
    own = torch.tensor(prefix_lens, dtype=torch.int64, device=device)
    table = torch.zeros(bs, 1 + max(prefix_lens) + tail_len, dtype=torch.int32, device=device)
    tables = write_tables(shapes, own, tail_len, torch.arange(bs, device=device), table)
    # A plan only computes offsets into the float workspace, which is large: one byte stands in for it.
    floats = torch.empty(1, dtype=torch.uint8, device=device).expand(1 << 30)
    ints = torch.empty(8 << 20, dtype=torch.uint8, device=device)
    pinned = torch.empty(8 << 20, dtype=torch.uint8, device="cpu", pin_memory=True)
    lens = torch.tensor([n + tail_len for n in prefix_lens], dtype=torch.int32, device="cpu")
    qo_indptr = torch.arange(bs + 1, dtype=torch.int32, device="cpu") * shapes.q_len
    kv_indptr = torch.nn.functional.pad(lens.cumsum(0), (1, 0)).to(torch.int32)
    window_left = -1 if shapes.window_left == NO_WINDOW else shapes.window_left
    heads, dims = (shapes.num_heads, shapes.num_kv_heads), (shapes.head_dim, shapes.head_dim)
    options = (-1, False, 0, shapes.q_len)  # no fixed split, splits allowed, nothing else on the GPU, uniform queries
    shape = (shapes.rows, bs, *heads, 1, True, *dims, True, window_left)  # pages of 1, under a graph, causal
    info = module.plan(floats, ints, pinned, qo_indptr, kv_indptr, lens, *shape, *options)
    theirs, ours = [int(n) for n in info], plan_info(shapes, 0)
    problems = [
        f"{name}: {a}, {b}"
        for name, a, b in zip(INT_FIELDS, theirs, ours, strict=True)
        if a != b and name not in OURS_TO_CHOOSE
    ]
    if problems or len(theirs) != len(INT_FIELDS):
        return problems or [f"the plan has {len(theirs)} integers, ours {len(ours)}"]
    want, got = read_tables(shapes, ints), read_tables(shapes, tables.workspace)
    num_items = sum(want["is_valid"])
    for name in want:
        n = num_items if name in ("request", "qo_tile", "kv_tile") else None  # past the items there may be anything
        if want[name][:n] != got[name][:n]:
            problems.append(f"{name}: {want[name][:n]}, {got[name][:n]}"[:200])
    return problems


def tables_reference(shapes: Shapes, kv_lens: list[int]) -> dict[str, list[int]]:
    """Specification, in plain Python, of the tables that `write_tables` writes to the workspace, by name.

    kv_lens: keys of each request, prefix and tail. Entries of unused items: request 0, not valid.
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
    """Return the tables of a workspace [bytes] uint8, by name, in the form of `tables_reference`. Synchronises."""
    at, host = TableLayout.of(shapes), workspace.cpu()
    lens = [shapes.grid] * 3 + [shapes.bs + 1, 1, 1, shapes.rows + 1, shapes.grid]
    found = {}
    for name, offset, n in zip(TableLayout._fields, at, lens, strict=False):
        width = 1 if name == "is_valid" else 4
        raw = host[offset : offset + width * n].clone()
        found[name] = (raw if width == 1 else raw.view(torch.int32)).tolist()
    return found
