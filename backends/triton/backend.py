"""The Triton backend: plans and reads lengths on the device, so that whole rounds can be captured. Default on CUDA."""

from typing import NamedTuple

import torch

from specdec.backends.base import AttentionBackend, AttentionCall, Capabilities, LayerSpec
from specdec.backends.triton.attention.kernel import AttendAgain, attend
from specdec.backends.triton.attention.merge import merge
from specdec.backends.triton.attention.metadata import TRITON_METADATA
from specdec.backends.triton.attention.plan import FEW, MERGE_WIDTH, SplitPlan, most_keys, split_plan
from specdec.backends.triton.attention.store import store_kv
from specdec.backends.triton.attention.tiling import Tiling, choose_tiling, num_tiles
from specdec.backends.triton.launch.relaunch import INTERPRETED, is_aligned
from specdec.core.batch import AttentionMetadata, ForwardMode

FRESH_CHUNK = 2048  # keys: prompts with nothing cached have a tile for every few of them, which fill the GPU


class _Cut(NamedTuple):
    """The key of a split plan; layers alike share plan and scratch."""

    window: int
    group: int
    num_kv_heads: int
    v_dim: int
    tiling: Tiling


class TritonBackend(AttentionBackend):
    """Kernels for every path; see `backends.triton.attention`."""

    name = "triton"
    rehearses = True
    capabilities = Capabilities(
        packed_prefill=True,
        sliding_window=True,
        sinks=True,
        softcap=True,
        v_dim_differs=True,
        v_in_k=False,
        dtypes=frozenset({torch.float32, torch.bfloat16, torch.float16}),
        max_head_dim=256,
        fused_ops=True,
    )
    metadata = TRITON_METADATA
    min_chunk: int | None = None  # keys of the shortest piece of a tile, None for what is best with its tiling

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
            is_causal = m.ancestor_bits is None
            most = most_keys(m.max_prefix + m.tail_len, m.tail_len, cut.window, group, tiling.block_m, is_causal)
            is_fresh = m.mode is ForwardMode.EXTEND and m.max_prefix == 0
            min_chunk = self.min_chunk or (FRESH_CHUNK if is_fresh else tiling.min_chunk)
            plan = split_plan(
                m.prefix_lens,
                m.qo_indptr,
                first_node=m.tail_len - m.q_len,
                window=cut.window,
                num_tiles=num_tiles(m, group, tiling.block_m),
                resident=max(1, tiling.resident * _num_processors(device) // layer.num_kv_heads),
                group=group,
                block_m=tiling.block_m,
                block_n=tiling.block_n,
                min_chunk=min_chunk,
                is_causal=is_causal,
                most=most,
                is_small=m.slot_table.shape[0] <= FEW + 1,  # by the engine's rows: traffic needs no other kernel
            )
            rows = (plan.num_partials, layer.num_kv_heads, tiling.block_m)
            partials = (
                torch.empty(*rows, layer.v_dim, dtype=torch.float32, device=device),
                torch.empty(rows, dtype=torch.float32, device=device),
            )
            self._plans[cut] = (plan, partials)
        return self._plans[cut]


def _num_processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4
