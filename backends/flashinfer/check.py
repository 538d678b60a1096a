"""Holds the plan's tables of an installed FlashInfer against what this package knows of them, at attach."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from specdec.backends.base import LayerSpec
from specdec.backends.flashinfer.kernels import Kernel
from specdec.backends.flashinfer.tables import NO_WINDOW, Shapes, plan_info, stock_budget, write_tables
from specdec.backends.flashinfer.tables_reference import read_tables

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
    """Return where FlashInfer's own plan for `shapes` differs from ours: "name: theirs, ours". Waits for the device."""
    bs, tail_len = shapes.bs, shapes.q_len
    own = torch.tensor(prefix_lens, dtype=torch.int64, device=device)
    table = torch.zeros(bs, 1 + max(prefix_lens) + tail_len, dtype=torch.int32, device=device)
    tables = write_tables(shapes, own, tail_len, torch.arange(bs, device=device), table)
    # A plan only counts what it would need of the float workspace, which is large: one byte stands for it.
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
    theirs, ours = [int(n) for n in info], plan_info(shapes, 0, 0)
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
        n = num_items if name in ("request", "qo_tile", "kv_tile") else None  # past the items lies anything
        if want[name][:n] != got[name][:n]:
            problems.append(f"{name}: {want[name][:n]}, {got[name][:n]}"[:200])
    return problems


def check_tables(modules: Mapping[Kernel, Any], layers: Sequence[LayerSpec], device: torch.device) -> list[str]:
    """Compare tables for the heads of `layers`, several batch sizes, queries and lengths."""
    generator, problems = torch.Generator().manual_seed(0), []
    processors = torch.cuda.get_device_properties(device).multi_processor_count
    for kernel, module in modules.items():
        if kernel.family == "fa3":
            continue  # planned by FlashInfer itself
        own = {(s.num_heads, s.num_kv_heads) for s in layers if s.qk_dim == kernel.head_dim}
        for num_heads, num_kv_heads in sorted(own):
            for bs, q_len, window in ((1, 1, NO_WINDOW), (3, 4, NO_WINDOW), (5, 40, 700), (2, 8, NO_WINDOW)):
                budget = stock_budget(processors, num_kv_heads)
                shapes = Shapes(bs, q_len, num_heads, num_kv_heads, kernel.head_dim, budget, window)
                lens = torch.randint(0, 9000, (bs,), generator=generator, device="cpu").tolist()
                found = table_problems(module, shapes, lens, device)
                problems += [f"{kernel}, {bs} x {q_len} queries: table {p} (theirs, ours)" for p in found]
    return problems
