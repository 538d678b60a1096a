"""Cases of bench/attention_kernels.py: one attention layer of one forward; and the timing of a captured call."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from specdec.backends import AttentionBackend, LayerSpec
from specdec.batch import AttentionMetadata, ForwardMode
from specdec.functional.tree import ancestor_bits, ancestor_mask
from specdec.kv_cache import KVPool

SHAPES = {"8b": LayerSpec(32, 8, 128, 128, 128**-0.5), "135m": LayerSpec(9, 3, 64, 64, 0.125)}
# Layers of Gemma-3 1B and 4B and of Gemma-2 9B that slide a window over their keys.
WINDOWED = {
    "gemma-w512": LayerSpec(4, 1, 256, 256, 256**-0.5, window=512),
    "gemma-w1024": LayerSpec(8, 4, 256, 256, 256**-0.5, window=1024),
    "gemma-w4096": LayerSpec(16, 8, 256, 256, 256**-0.5, window=4096, softcap=50.0),
}
LAYERS = {**SHAPES, **WINDOWED}
PATHS = ("decode", "verify4", "verify8", "verify16", "verify32", "verify64", "draft_step", "draft_extend", "prefill")
CONTEXTS = (256, 2048, 8192, 32768)
BATCHES = (1, 8, 32)
WINDOWED_PATHS = ("prompt", "prefill", "decode", "verify8")
PREFILL_CHUNK = 2048  # new tokens a request of the prefill rows, at the end of its context; `prompt` has no prefix
COLD_BYTES = 256 << 20
PAGE = 16
DTYPE = torch.bfloat16
DEVICE = torch.device("cuda")


@dataclass
class Case:
    """Requests of `context` tokens, all but the last q_len in the cache, on shuffled pages of PAGE slots."""

    layer: LayerSpec
    path: str
    context: int
    batch: int
    page: int = PAGE
    like: "Case | None" = None  # a case of the same context and batch, whose pool is used again

    def __post_init__(self) -> None:
        generator = torch.Generator(DEVICE).manual_seed(0)
        pages_each = -(-(self.context + 64) // self.page)
        num_pages = self.batch * pages_each
        order = torch.randperm(num_pages, generator=generator, device=DEVICE).view(self.batch, -1, 1) + 1
        self.tables = (order * self.page + torch.arange(self.page, device=DEVICE)).flatten(1).int()
        self.rows = torch.arange(self.batch, device=DEVICE)
        self.num_layers = max(1, min(32, COLD_BYTES // self._bytes_of(self.batch * self.context)))
        self.pool = self.like.pool if self.like else self._filled_pool((num_pages + 1) * self.page, generator)
        t, s = self.batch * self.q_len, self.layer
        self.q = torch.randn(t, s.num_heads, s.qk_dim, dtype=DTYPE, device=DEVICE, generator=generator)
        self.k = torch.randn(t, s.num_kv_heads, s.qk_dim, dtype=DTYPE, device=DEVICE, generator=generator)
        self.v = torch.randn(t, s.num_kv_heads, s.v_dim, dtype=DTYPE, device=DEVICE, generator=generator)
        self.lens = torch.full((self.batch,), self.prefix, dtype=torch.int64, device=DEVICE)

    def _filled_pool(self, num_slots: int, generator: torch.Generator) -> KVPool:
        pool = KVPool([self.layer.shape] * self.num_layers, num_slots, DTYPE, DEVICE)
        for cache in (*pool.k, *pool.v):
            cache.normal_(generator=generator)
        return pool

    @property
    def q_len(self) -> int:
        """New tokens a request."""
        if self.path.startswith("verify"):
            return int(self.path.removeprefix("verify"))
        prefill = {"prefill": min(self.context, PREFILL_CHUNK), "prompt": self.context}
        return {"decode": 1, "draft_step": 8, "draft_extend": 6, **prefill}[self.path]

    @property
    def first_node(self) -> int:
        """Tail nodes before the new ones: a draft step is the third of a tree with topk 8."""
        return 16 if self.path == "draft_step" else 0

    @property
    def tail_len(self) -> int:
        """Tail nodes, the new ones last."""
        return self.first_node + self.q_len

    @property
    def prefix(self) -> int:
        """Committed tokens a request."""
        return self.context - self.tail_len

    @property
    def kv_bytes(self) -> int:
        """K/V bytes of one layer that must be read."""
        window = self.layer.window or self.context
        return self._bytes_of(self.batch * min(self.context, window + self.q_len - 1))

    def _bytes_of(self, num_keys: int) -> int:
        s = self.layer
        return num_keys * s.num_kv_heads * (s.qk_dim + s.v_dim) * DTYPE.itemsize

    @property
    def flops(self) -> int:
        """Of the two products, causal or tree-shaped pairs within the window only."""
        window = self.layer.window or self.context
        pairs = sum(min(self.context - self.q_len + i + 1, window) for i in range(self.q_len))
        return 2 * self.batch * self.layer.num_heads * pairs * (self.layer.qk_dim + self.layer.v_dim)

    def bits(self) -> torch.Tensor | None:
        """[batch, q_len] ancestor bits of the new nodes, two children a node; None where the path is causal."""
        if self.path in ("decode", "draft_extend", "prefill", "prompt"):
            return None
        nodes = torch.arange(self.tail_len, device=DEVICE)
        bits = ancestor_bits(((nodes - 1).clamp(min=0) // 2).unsqueeze(0), num_steps=self.tail_len.bit_length())
        return bits[:, self.first_node :].repeat(self.batch, 1)

    def plan(self, backend: AttentionBackend, bits: torch.Tensor | None) -> AttentionMetadata:
        """Metadata of this case by the backend's builder."""
        if self.path in ("prefill", "prompt"):
            lens = [self.prefix] * self.batch, [self.q_len] * self.batch
            return backend.metadata.prefill(self.tables, self.rows, *lens)
        mode = ForwardMode.DECODE if self.q_len == 1 else ForwardMode.TARGET_VERIFY
        return backend.metadata.uniform(
            mode,
            self.tables,
            self.rows,
            self.lens,
            q_len=self.q_len,
            max_prefix=self.prefix,
            first_node=self.first_node,
            ancestor_bits=bits,
            **self._depths(bits),
        )

    def _depths(self, bits: torch.Tensor | None) -> dict[str, torch.Tensor]:
        """Depths of the nodes of a tree, which windows go by."""
        if bits is None or self.layer.window is None:
            return {}
        depths = torch.log2(torch.arange(1, self.tail_len + 1, device=DEVICE)).long().expand(self.batch, -1)
        return {"depths": depths[:, self.first_node :].contiguous(), "tail_depths": depths.contiguous()}

    def visible(self) -> torch.Tensor:
        """[q_len, context] bool, the mask of one request; O(D x context), which only the peers need."""
        bits, tail_len = self.bits(), self.tail_len
        if bits is None:
            tail = torch.ones(self.q_len, tail_len, dtype=torch.bool, device=DEVICE).tril()
        else:
            tail = ancestor_mask(bits[0], tail_len)
        return torch.cat([tail.new_ones(self.q_len, self.prefix), tail], 1)


def replay_ms(fn: Callable[[], None], groups: int = 5, group_ms: float = 4.0, warm_ms: float = 40.0) -> float:
    """ms of a captured call: the median over groups of back-to-back replays, after as many as warm the clocks."""
    torch.cuda.synchronize()  # inputs are made on the default stream
    with torch.cuda.stream(torch.cuda.Stream()):
        for _ in range(2):
            fn()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        fn()
    call_ms(graph.replay, 3)
    once = call_ms(graph.replay, 3)
    call_ms(graph.replay, max(3, int(warm_ms / once)))
    num = max(3, int(group_ms / once))
    return sorted(call_ms(graph.replay, num) for _ in range(groups))[groups // 2]


def call_ms(call: Callable[[], object], num: int) -> float:
    """ms a call on the device, over `num` in a row."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(num):
        call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / num


def measured_copy_rate() -> float:
    """Bytes/s of a device-to-device copy, reads and writes counted: the best of 5 runs of 20 copies of 2 GiB."""
    source = torch.empty(2 << 30, dtype=torch.uint8, device=DEVICE).random_()
    target = torch.empty_like(source)
    return 2 * source.numel() / min(call_ms(lambda: target.copy_(source), 20) for _ in range(5)) * 1e3
