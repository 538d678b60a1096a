"""FlashInfer's FA2 plan, made on the device: the 15 integers and the tables that its paged kernels read.

Its own `plan()` runs on the host, which would have to wait for lengths that only the device knows. Under a CUDA graph
the integers depend on shapes alone, so they are computed here once; the tables depend on lengths, so one Triton kernel
writes them, inside the graph (FlashInfer 0.6.18: `scheduler.cuh`, `PrefillSplitQOKVIndptr` and `PrefillPlanInfo`).

A tile is `cta` rows of one request (query x head of a KV group); its keys are cut into chunks of equal length, the
shortest that give no more items than `budget`. A kernel recomputes the number of chunks from the request's length and
strides its partial rows by it: tables made for other lengths would give wrong results without an error.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from specdec.backends.triton.launch.relaunch import CachedLaunch

MIN_CHUNK = 128  # keys
NO_WINDOW = 1 << 30


class Shapes(NamedTuple):
    """Settings that a plan depends on besides lengths.

    bs: requests, of q_len queries each. budget: the most items (tile x chunk), unless there are more tiles.
    window_left: keys before its own that a query sees, in the kernel's convention; NO_WINDOW: all.
    """

    bs: int
    q_len: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    budget: int
    window_left: int = NO_WINDOW

    @property
    def cta(self) -> int:
        """Rows of a tile, as FlashInfer chooses them (`utils.cuh`, `FA2DetermineCtaTileQ`)."""
        rows = self.q_len * self.num_heads // self.num_kv_heads
        if rows > 64 and self.head_dim < 256:
            return 128
        return 64 if rows > 16 else 16

    @property
    def tiles(self) -> int:
        """Tiles of one request."""
        return -(-self.q_len * (self.num_heads // self.num_kv_heads) // self.cta)

    @property
    def grid(self) -> int:
        """Capacity of the tables in items; the first dimension of the kernel's grid."""
        return max(self.budget, self.bs * self.tiles)

    @property
    def span(self) -> int:
        """The most keys of a tile under the window."""
        return min(self.window_left + self.cta, NO_WINDOW)

    @property
    def rows(self) -> int:
        """Queries of the whole batch."""
        return self.bs * self.q_len

    @property
    def partial_rows(self) -> int:
        """The most partial rows: every item of a request writes one for each of its queries."""
        return self.q_len * (self.grid // self.tiles)


def stock_budget(num_processors: int, num_kv_heads: int) -> int:
    """Return the items that FlashInfer itself plans for: two blocks per multiprocessor, over all KV heads."""
    return 2 * num_processors // num_kv_heads


def budget_for(bs: int, tiles: int, num_processors: int, num_kv_heads: int) -> int:
    """Return the items that we plan for: FlashInfer's, or more, so that a long request can be split even if tiles alone
    fill the GPU."""
    stock = stock_budget(num_processors, num_kv_heads)
    return max(stock, bs * tiles + stock // 2)


class TableLayout(NamedTuple):
    """Byte offsets of the tables in the int workspace, in FlashInfer's order, and its size."""

    request: int
    qo_tile: int
    kv_tile: int
    o_indptr: int
    chunk_size: int
    num_rows: int
    merge_indptr: int
    is_valid: int
    num_bytes: int

    @classmethod
    def of(cls, shapes: Shapes) -> "TableLayout":
        """Return the layout that FlashInfer's allocator gives the tables of `shapes`."""
        offsets, at = [], 0
        # Only chunk_size is not aligned, so it directly follows o_indptr.
        sizes = [4 * shapes.grid] * 3 + [4 * (shapes.bs + 1), 4, 4, 4 * (shapes.rows + 1), shapes.grid]
        for size, alignment in zip(sizes, (16, 16, 16, 16, 1, 16, 16, 16), strict=True):
            at = -(-at // alignment) * alignment
            offsets.append(at)
            at += size
        return cls._make([*offsets, -(-at // 16) * 16])


def plan_info(shapes: Shapes, s_offset: int) -> list[int]:
    """Return the 15 integers that `paged_run` takes: `PrefillPlanInfo::ToVector`, for a plan under a CUDA graph.

    The float workspace begins with partial outputs; their log-sum-exp begins at byte s_offset.
    """
    at = TableLayout.of(shapes)
    return [
        shapes.grid,
        shapes.rows,
        at.num_rows,
        shapes.cta,
        at.request,
        at.qo_tile,
        at.kv_tile,
        at.merge_indptr,
        at.o_indptr,
        at.chunk_size,
        0,  # v_offset
        s_offset,
        at.is_valid,
        1,  # enable_cuda_graph
        1,  # split_kv
    ]


@triton.jit
def _num_chunks(request, bs, prefix_lens, tail_len, span, chunk):
    """Return the number of chunks of each request, at least 1, and 0 past the batch; and its number of keys."""
    is_request = request < bs
    kv_len = tl.load(prefix_lens + request, mask=is_request, other=0).to(tl.int32) + tail_len
    num_keys = tl.maximum(tl.minimum(kv_len, span), 1)
    return tl.where(is_request, (num_keys + chunk - 1) // chunk, 0), num_keys


@triton.jit(
    do_not_specialize=["bs", "tail_len", "span", "budget", "grid", "table_stride", "num_slots"],
    do_not_specialize_on_alignment=["prefix_lens", "rows"],
)
def _tables_kernel(
    prefix_lens,
    rows,
    request_of,
    qo_tile_of,
    kv_tile_of,
    o_indptr,
    chunk_size,
    num_rows,
    merge_indptr,
    is_valid,
    kv_indptr,
    last_page_len,
    bs,
    tail_len,
    span,
    budget,
    grid,
    table_stride,
    num_slots,
    Q_LEN: tl.constexpr,
    TILES: tl.constexpr,
    SHORTEST: tl.constexpr,
    BLOCK_BS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write the entries of request r in program r; in program bs, unused items and the totals."""
    own = tl.program_id(0)
    lanes = tl.arange(0, BLOCK_BS)
    longest = tl.zeros([], tl.int32)
    for base in range(0, bs, BLOCK_BS):
        _n, num_keys = _num_chunks(base + lanes, bs, prefix_lens, tail_len, span, SHORTEST)
        longest = tl.maximum(longest, tl.max(num_keys))
    low = tl.full([], SHORTEST, tl.int32)
    high = tl.maximum(longest, low)
    while low < high:  # the shortest chunk that gives no more items than the budget
        middle = (low + high) // 2
        num_items = tl.zeros([], tl.int32)
        for base in range(0, bs, BLOCK_BS):
            n, _keys = _num_chunks(base + lanes, bs, prefix_lens, tail_len, span, middle)
            num_items += TILES * tl.sum(n)
        low = tl.where(num_items > budget, middle + 1, low)
        high = tl.where(num_items > budget, high, middle)

    before = tl.zeros([], tl.int32)  # chunks of the requests before
    chunks = tl.zeros([], tl.int32)
    for base in range(0, bs, BLOCK_BS):
        n, _keys = _num_chunks(base + lanes, bs, prefix_lens, tail_len, span, high)
        before += tl.sum(tl.where(base + lanes < own, n, 0))
        chunks += tl.sum(tl.where(base + lanes == own, n, 0))

    item = tl.arange(0, BLOCK)
    first = TILES * before
    if own < bs:
        for base in range(0, TILES * chunks, BLOCK):
            i = base + item
            is_own = i < TILES * chunks
            tl.store(request_of + first + i, own, mask=is_own)
            tl.store(qo_tile_of + first + i, i // chunks, mask=is_own)
            tl.store(kv_tile_of + first + i, i % chunks, mask=is_own)
            tl.store(is_valid + first + i, tl.full([BLOCK], 1, tl.uint8), mask=is_own)
        tl.store(o_indptr + own + 1, Q_LEN * (before + chunks))
        for base in range(0, Q_LEN, BLOCK):
            i = base + item
            tl.store(merge_indptr + own * Q_LEN + i + 1, Q_LEN * before + (i + 1) * chunks, mask=i < Q_LEN)
        row = tl.load(rows + own)
        following = tl.where(
            own + 1 < bs, tl.load(rows + own + 1, mask=own + 1 < bs, other=0) * table_stride, num_slots
        )
        # Pages have one slot, and the slot table is the page list. FlashInfer computes a length as the number of pages
        # minus 1, plus last_page_len, so last_page_len can encode any length, wherever the next row begins.
        kv_len = tl.load(prefix_lens + own) + tail_len
        tl.store(kv_indptr + own, (row * table_stride).to(tl.int32))
        tl.store(last_page_len + own, (kv_len + 1 - (following - row * table_stride)).to(tl.int32))
    else:
        for base in range(first, grid, BLOCK):
            i = base + item
            tl.store(request_of + i, 0, mask=i < grid)
            tl.store(qo_tile_of + i, 0, mask=i < grid)
            tl.store(kv_tile_of + i, 0, mask=i < grid)
            tl.store(is_valid + i, tl.full([BLOCK], 0, tl.uint8), mask=i < grid)
        tl.store(o_indptr, 0)
        tl.store(merge_indptr, 0)
        tl.store(chunk_size, high)
        tl.store(num_rows, bs * Q_LEN)
        tl.store(kv_indptr + bs, num_slots)


_launch = CachedLaunch(_tables_kernel)


class Tables(NamedTuple):
    """workspace [bytes] uint8, see `TableLayout`; kv_indptr [bs + 1], last_page_len [bs] int32, for pages of a slot."""

    workspace: torch.Tensor
    kv_indptr: torch.Tensor
    last_page_len: torch.Tensor


def write_tables(
    shapes: Shapes, prefix_lens: torch.Tensor, tail_len: int, rows: torch.Tensor, slot_table: torch.Tensor
) -> Tables:
    """Write the tables of a forward in one launch, from lengths on the device: prefix_lens and rows [bs] int64.

    slot_table [num_rows, width] int32, less than 2^31 elements: flattened, it is the page list (`kv_indices`).
    Twin: `tests.flashinfer_tables.tables_reference`.
    """
    bs, device, at = shapes.bs, prefix_lens.device, TableLayout.of(shapes)
    workspace = torch.empty(at.num_bytes, dtype=torch.uint8, device=device)
    ints = workspace.view(torch.int32)
    pages = torch.empty(2 * bs + 1, dtype=torch.int32, device=device)
    tables = Tables(workspace, pages[: bs + 1], pages[bs + 1 :])
    stride = slot_table.stride(0)
    _launch(
        (bs + 1,),
        prefix_lens,
        rows,
        *(ints[offset // 4 :] for offset in at[:7]),
        workspace[at.is_valid :],
        tables.kv_indptr,
        tables.last_page_len,
        bs,
        tail_len,
        shapes.span,
        shapes.budget,
        shapes.grid,
        stride,
        slot_table.shape[0] * stride,
        Q_LEN=shapes.q_len,
        TILES=shapes.tiles,
        SHORTEST=MIN_CHUNK,
        BLOCK_BS=64,
        BLOCK=128,
    )
    return tables
