"""The Triton backend: plans and reads lengths on the device, so that whole rounds can be captured. Default on CUDA."""

from types import MappingProxyType
from typing import NamedTuple

import torch
import triton

from specdec.backends.base import AttentionBackend, AttentionCall, Capabilities, LayerSpec
from specdec.backends.triton.attention import AttendAgain, Tiling, attend, padded_dim
from specdec.backends.triton.merge import merge
from specdec.backends.triton.metadata import TRITON_METADATA
from specdec.backends.triton.plan import MERGE_WIDTH, SplitPlan, split_plan
from specdec.backends.triton.relaunch import INTERPRETED, is_aligned
from specdec.backends.triton.store import store_kv
from specdec.batch import AttentionMetadata, ForwardMode

# By rows of a tile: block_m, block_n, warps, stages, resident. Wide: head dims over 64 in 16 bits.
_WIDE_TILINGS = MappingProxyType(
    {16: Tiling(16, 64, 2, 3, 2), 32: Tiling(32, 128, 4, 2, 2), 64: Tiling(64, 64, 4, 3, 2)}
)
_NARROW_TILINGS = MappingProxyType(
    {16: Tiling(16, 64, 2, 3, 4), 32: Tiling(32, 64, 2, 3, 4), 64: Tiling(64, 64, 4, 3, 3)}
)


class _Cut(NamedTuple):
    """What the cutting of a forward's work depends on; layers alike share plan and scratch."""

    window: int
    group: int
    num_kv_heads: int
    v_dim: int
    tiling: Tiling


class TritonBackend(AttentionBackend):
    """Kernels for every path; see `backends.triton.attention`."""

    name = "triton"
    capabilities = Capabilities(
        device_planned=True,
        tree_mask=True,
        sliding_window=True,
        sinks=True,
        softcap=True,
        v_dim_differs=True,
        dtypes=frozenset({torch.float32, torch.bfloat16, torch.float16}),
        max_head_dim=256,
    )
    metadata = TRITON_METADATA
    min_chunk = 256  # keys; shorter pieces cost more in merging than they gain

    def __init__(self) -> None:
        super().__init__()
        self._plans: dict[_Cut, tuple[SplitPlan, tuple[torch.Tensor, torch.Tensor]]] = {}
        self._again: dict[tuple[object, ...], AttendAgain] = {}  # launches of this forward, by what layers share
        self._can_merge: set[tuple[_Cut, torch.dtype]] = set()  # merge kernels that are compiled

    @classmethod
    def unusable_on(cls, device: torch.device) -> str | None:
        if device.type == "cuda" or INTERPRETED:
            return None
        return f"it needs CUDA, the model is on {device.type} (TRITON_INTERPRET=1 runs it there, for tests)"

    @property
    def scratch_bytes(self) -> int:
        """Device bytes of the plans and split tiles of the forward in flight."""
        tensors = [t for p, partials in self._plans.values() for t in (p.items, p.merges, *partials)]
        return sum(t.numel() * t.element_size() for t in tensors)

    def _prepare(self, metadata: AttentionMetadata) -> None:
        self._plans = {}
        self._again = {}

    def store(self, call: AttentionCall, slots: torch.Tensor, q_out: torch.Tensor | None = None) -> torch.Tensor:
        assert call.k is not None and call.v is not None
        pools = call.pool.k[call.layer_id], call.pool.v[call.layer_id]
        return store_kv(call.q, call.k, call.v, *pools, slots, call.rope, q_out)

    def _attend(self, call: AttentionCall) -> None:
        q, out, pool, layer, sinks = call.q, call.out, call.pool, call.layer, call.sinks
        k_pool, v_pool = pool.k[call.layer_id], pool.v[call.layer_id]
        alike = (layer, q.dtype, q.stride(), out.stride(), is_aligned(q, out, k_pool, v_pool, sinks))
        if alike in self._again:
            self._again[alike](q, out, k_pool, v_pool, sinks)
            return
        m = self.planned
        tiling = choose_tiling(m, layer, q.dtype)
        group = layer.num_heads // layer.num_kv_heads
        cut = _Cut(layer.window or 0, group, layer.num_kv_heads, layer.v_dim, tiling)
        plan, partials = self._plan_for(m, cut, layer, q.device)
        if (cut, out.dtype) not in self._can_merge:
            # Short contexts are not split: without this the first long one would compile on live traffic.
            self._can_merge.add((cut, out.dtype))
            merge(out, partials, plan.items.new_full((1, MERGE_WIDTH), -1), m.qo_indptr, layer, tiling.block_m)
        again = attend(q, out, k_pool, v_pool, m, plan, partials, layer, sinks, tiling)
        if again is not None and alike[-1]:
            self._again[alike] = again

    def _plan_for(
        self, m: AttentionMetadata, cut: _Cut, layer: LayerSpec, device: torch.device
    ) -> tuple[SplitPlan, tuple[torch.Tensor, torch.Tensor]]:
        """The plan of layers like `layer`, made on the device once a forward."""
        tiling, group = cut.tiling, cut.group
        if cut not in self._plans:
            most_keys = m.max_prefix + m.tail_len if layer.window is None else layer.window + m.tail_len
            plan = split_plan(
                m.prefix_lens,
                m.qo_indptr,
                first_node=m.tail_len - m.q_len,
                window=cut.window,
                num_tiles=_num_tiles(m, group, tiling.block_m),
                resident=max(1, tiling.resident * _num_processors(device) // layer.num_kv_heads),
                group=group,
                block_m=tiling.block_m,
                block_n=tiling.block_n,
                min_chunk=self.min_chunk,
                may_split=most_keys > self.min_chunk,
            )
            rows = (plan.num_partials, layer.num_kv_heads, tiling.block_m)
            partials = (
                torch.empty(*rows, layer.v_dim, dtype=torch.float32, device=device),
                torch.empty(rows, dtype=torch.float32, device=device),
            )
            self._plans[cut] = (plan, partials)
        return self._plans[cut]


def choose_tiling(m: AttentionMetadata, layer: LayerSpec, dtype: torch.dtype) -> Tiling:
    """The launch shape: by the forward's kind and the layer's shape, never by a live length: nothing is compiled
    on live traffic. Chosen by measurement on an H200 in bf16 (bench/attention_kernels.py)."""
    row_bytes = max(padded_dim(layer.qk_dim), padded_dim(layer.v_dim)) * dtype.itemsize
    rows = m.q_len * (layer.num_heads // layer.num_kv_heads)
    kind = 64 if m.mode is ForwardMode.EXTEND else min(max(16, triton.next_power_of_2(rows)), 64)
    if row_bytes > 256:  # fp32, or head dims over 128
        return Tiling(min(kind, 32), 32, 4, 2, resident=2)
    if m.mode is ForwardMode.EXTEND:
        return Tiling(64, 64, 4, 3, resident=1) if row_bytes > 128 else Tiling(64, 128, 4, 3, resident=1)
    return (_WIDE_TILINGS if row_bytes > 128 else _NARROW_TILINGS)[kind]


def _num_tiles(m: AttentionMetadata, group: int, block_m: int) -> int:
    if m.q_lens is None:
        return m.num_reqs * triton.cdiv(m.q_len * group, block_m)
    return sum(triton.cdiv(n * group, block_m) for n in m.q_lens)


def _num_processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4
