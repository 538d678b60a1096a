"""Attention kernels beside SDPA, FlexAttention and FlashInfer on one GPU: `python bench/kernels.py --out DIR`.

Every row is one attention layer of one forward, K/V write included for ours: the median over graph replays in which
as many layers as 256 MB of K/V fill run one after the other, so that nothing is read from a warm cache. The floor is
the K/V that must be read once, over the measured copy rate. The peers get what they like best: SDPA and FlexAttention a
dense K/V without a gather, FlashInfer pages of 16 and a plan that is not timed. Ours is checked against the torch
backend; the tests hold both against float64. The last line is one JSON object.
"""

import argparse
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from specdec.backends import AttentionBackend, LayerSpec, TorchBackend
from specdec.backends.triton.backend import TritonBackend
from specdec.backends.triton.compiles import counted_compiles
from specdec.batch import AttentionMetadata, ForwardMode
from specdec.bench import write_results
from specdec.kv_cache import KVPool

SHAPES = {"8b": LayerSpec(32, 8, 128, 128, 128**-0.5), "135m": LayerSpec(9, 3, 64, 64, 0.125)}
PATHS = ("decode", "verify4", "verify8", "verify16", "verify32", "verify64", "draft_step", "draft_extend", "prefill")
CONTEXTS = (256, 2048, 8192, 32768)
BATCHES = (1, 8, 32)
PREFILL_CHUNK = 2048  # new tokens a request of the prefill rows, at the end of its context
COLD_BYTES = 256 << 20
PAGE = 16
DTYPE = torch.bfloat16
DEVICE = torch.device("cuda")


def main() -> None:
    """Time all cells, print a short table and write the result file."""
    args = _arguments()
    copy_rate = measured_copy_rate()
    rows: list[dict[str, Any]] = []
    with torch.inference_mode():
        for shape in args.shapes:
            warm_up(SHAPES[shape])
        with counted_compiles() as compiled:
            for shape in args.shapes:
                for path, context, batch in cells(args):
                    case = Case(SHAPES[shape], path, context, batch)
                    row = {"what": path, "shape": shape, "batch": batch, "context": context, "q_len": case.q_len}
                    rows.append({**row, **measure(case, copy_rate)})
                    rows[-1].update(peers(case, args, path, context, batch))
                    print(json.dumps(rows[-1]), flush=True)
                    del case
                    torch.cuda.empty_cache()
            ours = [name for name in compiled if "specdec" in name]
    config = {"copy_rate_tb_s": round(copy_rate / 1e12, 3), "compiled_after_warm_up": ours, "dtype": "bfloat16"}
    print_rows(rows)
    if args.out:
        write_results(args.out, "kernels", "-".join(args.shapes), config, rows)
    print(json.dumps({**config, "rows": len(rows)}))


def cells(args: argparse.Namespace) -> Iterator[tuple[str, int, int]]:
    """(path, context, batch) of every row; prefill of one request at a time beyond 2k, as chunks are scheduled."""
    for path in args.paths:
        for context in args.contexts:
            for batch in args.batches:
                if not (path == "prefill" and batch * context > 64 * 8192):
                    yield path, context, batch


@dataclass
class Case:
    """Requests of `context` tokens, all but the last q_len in the cache, on shuffled pages of PAGE slots."""

    layer: LayerSpec
    path: str
    context: int
    batch: int
    page: int = PAGE
    pool: KVPool = field(init=False)

    def __post_init__(self) -> None:
        generator = torch.Generator(DEVICE).manual_seed(0)
        pages_each = -(-(self.context + 64) // self.page)
        num_pages = self.batch * pages_each
        order = torch.randperm(num_pages, generator=generator, device=DEVICE).view(self.batch, -1, 1) + 1
        self.tables = (order * self.page + torch.arange(self.page, device=DEVICE)).flatten(1)
        self.num_layers = max(1, min(32, COLD_BYTES // self.kv_bytes))
        num_slots = (num_pages + 1) * self.page
        self.pool = KVPool([self.layer.shape] * self.num_layers, num_slots, DTYPE, DEVICE)
        for cache in (*self.pool.k, *self.pool.v):
            cache.normal_(generator=generator)
        t, s = self.batch * self.q_len, self.layer
        self.q = torch.randn(t, s.num_heads, s.qk_dim, dtype=DTYPE, device=DEVICE, generator=generator)
        self.k = torch.randn(t, s.num_kv_heads, s.qk_dim, dtype=DTYPE, device=DEVICE, generator=generator)
        self.v = torch.randn(t, s.num_kv_heads, s.v_dim, dtype=DTYPE, device=DEVICE, generator=generator)
        self.lens = torch.full((self.batch,), self.prefix, dtype=torch.int64, device=DEVICE)

    @property
    def q_len(self) -> int:
        """New tokens a request."""
        if self.path.startswith("verify"):
            return int(self.path.removeprefix("verify"))
        return {"decode": 1, "draft_step": 8, "draft_extend": 6, "prefill": min(self.context, PREFILL_CHUNK)}[self.path]

    @property
    def first_node(self) -> int:
        """Tail nodes before the new ones: a draft step is the third of a tree with topk 8."""
        return 16 if self.path == "draft_step" else 0

    @property
    def prefix(self) -> int:
        """Committed tokens a request."""
        return self.context - self.q_len - self.first_node

    @property
    def kv_bytes(self) -> int:
        """K/V bytes of one layer that must be read."""
        s = self.layer
        return self.batch * self.context * s.num_kv_heads * (s.qk_dim + s.v_dim) * DTYPE.itemsize

    @property
    def flops(self) -> int:
        """Of the two products, causal or tree-shaped pairs only."""
        pairs = self.q_len * (self.context - self.q_len) + self.q_len * (self.q_len + 1) // 2
        return 2 * self.batch * self.layer.num_heads * pairs * (self.layer.qk_dim + self.layer.v_dim)

    @property
    def parents(self) -> list[int]:
        """A tree for verify and draft-step rows: two children a node."""
        return [max(i - 1, 0) // 2 for i in range(self.first_node + self.q_len)]

    def bits(self) -> torch.Tensor | None:
        """[batch, q_len] ancestor bits of the new nodes; None where the path is causal."""
        if self.path in ("decode", "draft_extend", "prefill"):
            return None
        lines = [1]
        for node, parent in enumerate(self.parents[1:], 1):
            lines.append(lines[parent] | 1 << node)
        signed = [b - (1 << 64) if b >> 63 else b for b in lines[self.first_node :]]
        return torch.tensor([signed] * self.batch, device=DEVICE)

    def plan(self, backend: AttentionBackend, bits: torch.Tensor | None) -> AttentionMetadata:
        """Metadata of this case by the backend's builder."""
        if self.path == "prefill":
            return backend.metadata.prefill_metadata(self.tables, [self.prefix] * self.batch, [self.q_len] * self.batch)
        mode = ForwardMode.DECODE if self.q_len == 1 else ForwardMode.TARGET_VERIFY
        return backend.metadata.uniform_metadata(
            mode,
            self.tables,
            self.lens,
            q_len=self.q_len,
            max_prefix=self.prefix,
            first_node=self.first_node,
            ancestor_bits=bits,
        )

    def visible(self) -> torch.Tensor:
        """[q_len, context] bool, the mask of one request; O(D x context), which only the peers need."""
        bits, columns = self.bits(), torch.arange(self.context, device=DEVICE)
        if bits is None:
            return columns <= self.prefix + torch.arange(self.q_len, device=DEVICE).unsqueeze(1)
        tail = columns - self.prefix
        return (tail < 0) | ((bits[0].unsqueeze(1) >> tail.clamp(min=0)) & 1 == 1)


def measure(case: Case, copy_rate: float) -> dict[str, Any]:
    """Our row: checked, timed, with the floor and the bytes of metadata and scratch."""
    backend, bits, out = TritonBackend(), case.bits(), torch.full_like(case.q, float("nan"))
    metadata = case.plan(backend, bits)

    def layers() -> None:
        backend.plan(metadata)
        for i in range(case.num_layers):
            backend.run(case.q, case.k, case.v, out, case.pool, i, case.layer, None)

    ms = replay_ms(layers) / case.num_layers
    if case.batch * case.context * case.q_len <= 1 << 24:
        check(case, bits, out)
    floor = case.kv_bytes / copy_rate * 1e3
    per_token = [metadata.positions, metadata.out_cache_loc, metadata.qo_indptr, metadata.prefix_lens]
    per_token += [t for t in (bits, metadata.tail_positions) if t is not None]
    return {
        "mode": "triton",
        "ms": round(ms, 5),
        "floor_ms": round(floor, 5),
        "of_copy_rate": round(floor / ms, 3),
        "tflops": round(case.flops / ms / 1e9, 1),
        "metadata_bytes": sum(t.numel() * t.element_size() for t in per_token),
        "scratch_bytes": backend.scratch_bytes,
    }


def check(case: Case, bits: torch.Tensor | None, out: torch.Tensor) -> None:
    """Stop if our last layer differs from the torch backend's by more than bf16 explains."""
    backend, want = TorchBackend(), torch.empty_like(out)
    backend.plan(case.plan(backend, bits))
    backend.run(case.q, case.k, case.v, want, case.pool, case.num_layers - 1, case.layer, None)
    error = float((out.float() - want.float()).norm() / want.float().norm())
    if not error < 1e-2:
        raise SystemExit(f"{case.path} at batch {case.batch}, context {case.context}: relative error {error:.2e}")


def peers(case: Case, args: argparse.Namespace, path: str, context: int, batch: int) -> dict[str, Any]:
    """ms of the other implementations on the same cell; what fails says why."""
    wanted: dict[str, Callable[[Case], float]] = {}
    if path != "prefill" or batch * context <= 8 * 8192:
        wanted["sdpa"] = sdpa_ms
    if "flex" in args.peers and path in ("decode", "verify8") and batch in (1, 32) and context in (2048, 8192):
        wanted["flex"] = flex_ms
    if "flashinfer" in args.peers and not path.startswith("draft"):
        wanted["flashinfer"] = flashinfer_ms
    found: dict[str, Any] = {}
    for name, run in wanted.items():
        try:
            found[f"{name}_ms"] = round(run(case), 5)
        except Exception as error:  # a peer that cannot run a cell is a fact to report, not a reason to stop
            found[f"{name}_error"] = f"{type(error).__name__}: {str(error)[:200]}"
        torch.cuda.empty_cache()
    return found


def _dense(case: Case) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """K and V [batch, Hkv, context, dim] of every layer, contiguous."""
    slots = case.tables[:, : case.context].reshape(-1)

    def one(cache: torch.Tensor) -> torch.Tensor:
        return cache[slots].view(case.batch, case.context, *cache.shape[1:]).transpose(1, 2).contiguous()

    return [(one(k), one(v)) for k, v in zip(case.pool.k, case.pool.v, strict=True)]


def sdpa_ms(case: Case) -> float:
    """The heads of a KV group as further queries under a mask (a decode needs none); flash-attention for prefill."""
    s, dense = case.layer, _dense(case)
    q = case.q.view(case.batch, case.q_len, s.num_heads, -1).transpose(1, 2)
    group = s.num_heads // s.num_kv_heads
    options: dict[str, Any] = {"scale": s.scaling}
    if case.path == "prefill" and case.prefix == 0:
        options.update(is_causal=True, enable_gqa=True)
    else:
        q = q.reshape(case.batch, s.num_kv_heads, group * case.q_len, s.qk_dim).contiguous()
        if case.path != "decode":
            options["attn_mask"] = case.visible().repeat(group, 1)[None, None].expand(case.batch, 1, -1, -1)

    def layers() -> None:
        for k, v in dense:
            torch.nn.functional.scaled_dot_product_attention(q, k, v, **options)

    return replay_ms(layers) / case.num_layers


def flex_ms(case: Case) -> float:
    """FlexAttention, compiled for this very shape, with the block mask made beforehand."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    dense, visible = _dense(case), case.visible()
    q = case.q.view(case.batch, case.q_len, case.layer.num_heads, -1).transpose(1, 2).contiguous()
    mask = create_block_mask(
        lambda b, h, i, j: visible[i, j], None, None, case.q_len, case.context, device=DEVICE, _compile=False
    )
    torch._dynamo.reset()
    compiled = torch.compile(flex_attention, dynamic=False)

    def layers() -> None:
        for k, v in dense:
            compiled(q, k, v, block_mask=mask, scale=case.layer.scaling, enable_gqa=True)

    return replay_ms(layers) / case.num_layers


def flashinfer_ms(case: Case) -> float:
    """Paged K/V in pages of 16; tensor-core decode, fa2 with a packed custom mask for trees, causal prefill."""
    import flashinfer

    s = case.layer
    num_pages = -(-case.context // case.page)
    indices = (case.tables[:, :: case.page][:, :num_pages] // case.page).to(torch.int32).reshape(-1).contiguous()
    kv_indptr = torch.arange(0, (case.batch + 1) * num_pages, num_pages, dtype=torch.int32, device=DEVICE)
    last = torch.full((case.batch,), (case.context - 1) % case.page + 1, dtype=torch.int32, device=DEVICE)
    workspace = torch.empty(512 << 20, dtype=torch.uint8, device=DEVICE)
    if case.path == "decode":
        wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD", use_tensor_cores=True)
        wrapper.plan(
            kv_indptr, indices, last, s.num_heads, s.num_kv_heads, s.qk_dim, case.page,
            q_data_type=DTYPE, kv_data_type=DTYPE, sm_scale=s.scaling,
        )  # fmt: skip
    else:
        backend = "fa2" if case.bits() is not None else "auto"
        wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD", backend=backend)
        qo_indptr = torch.arange(0, (case.batch + 1) * case.q_len, case.q_len, dtype=torch.int32, device=DEVICE)
        mask = {"causal": True}
        if case.bits() is not None:
            mask = {"custom_mask": case.visible().repeat(case.batch, 1).reshape(-1)}
        wrapper.plan(
            qo_indptr, kv_indptr, indices, last, s.num_heads, s.num_kv_heads, s.qk_dim, case.page,
            q_data_type=DTYPE, kv_data_type=DTYPE, sm_scale=s.scaling, **mask,
        )  # fmt: skip
    caches = [
        tuple(c.view(-1, case.page, s.num_kv_heads, s.qk_dim) for c in kv)
        for kv in zip(case.pool.k, case.pool.v, strict=True)
    ]
    out = torch.empty_like(case.q)

    def layers() -> None:
        for cache in caches:
            wrapper.run(case.q, cache, out=out)

    return replay_ms(layers) / case.num_layers


def warm_up(layer: LayerSpec) -> None:
    """Run every path once at the smallest size: what this compiles is all there is to compile."""
    for path in PATHS:
        case = Case(layer, path, 512, 2)
        measure(case, 1.0)


def replay_ms(fn: Callable[[], None], repeats: int = 7) -> float:
    """Median ms of a captured call."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(2):
            fn()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        fn()
    graph.replay()
    times = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return sorted(times)[repeats // 2]


def measured_copy_rate() -> float:
    """Bytes/s of a device-to-device copy, reads and writes counted: the best of 5 runs of 20 copies of 2 GiB."""
    source = torch.empty(2 << 30, dtype=torch.uint8, device=DEVICE).random_()
    target = torch.empty_like(source)
    best = 0.0
    for _ in range(5):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(20):
            target.copy_(source)
        end.record()
        end.synchronize()
        best = max(best, 20 * 2 * source.numel() / (start.elapsed_time(end) / 1e3))
    return best


def print_rows(rows: list[dict[str, Any]]) -> None:
    """One line a cell: ours, the floor, and the peers as multiples of ours."""
    table = Table("path", "shape", "batch", "context", "ms", "of copy rate", "TFLOP/s", "SDPA", "Flex", "FlashInfer")
    for r in rows:
        ratios = [f"{r[k] / r['ms']:.2f}x" if k in r else "-" for k in ("sdpa_ms", "flex_ms", "flashinfer_ms")]
        cells = (r["what"], r["shape"], r["batch"], r["context"])
        table.add_row(*map(str, cells), f"{r['ms']:.4f}", f"{r['of_copy_rate']:.2f}", f"{r['tflops']:.0f}", *ratios)
    Console(width=110).print(table)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES), choices=SHAPES)
    parser.add_argument("--paths", nargs="+", default=list(PATHS), choices=PATHS)
    parser.add_argument("--contexts", nargs="+", type=int, default=list(CONTEXTS))
    parser.add_argument("--batches", nargs="+", type=int, default=list(BATCHES))
    parser.add_argument("--peers", nargs="*", default=["flex", "flashinfer"], choices=("flex", "flashinfer"))
    parser.add_argument("--out", type=Path, default=None, help="folder for the result file")
    return parser.parse_args()


if __name__ == "__main__":
    main()
