"""The Triton backend: plans and reads lengths on the device, so that whole rounds can be captured. Default on CUDA."""

from typing import NamedTuple

import torch

from specdec.backends.base import AttentionBackend, AttentionCall, Capabilities
from specdec.backends.triton.attention.chunks import most_chunks, tile_span
from specdec.backends.triton.attention.kernel import attend
from specdec.backends.triton.attention.metadata import TRITON_METADATA
from specdec.backends.triton.attention.partials import Partials
from specdec.backends.triton.attention.plan import FEW, SCRATCH_BYTES, SplitPlan, split_plan
from specdec.backends.triton.attention.store import store_kv
from specdec.backends.triton.attention.tiling import Tiling, choose_tiling, num_tiles
from specdec.backends.triton.launch.relaunch import INTERPRETED, Relaunch, is_aligned
from specdec.core.batch import AttentionMetadata


class _Cut(NamedTuple):
    """The key of a split plan; layers with equal keys share plan and scratch."""

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
        v_dim_differs=True,
        max_latent_dim=576,
        dtypes=frozenset({torch.float32, torch.bfloat16, torch.float16}),
        max_head_dim=256,
        fused_ops=True,
        limits=True,
    )
    metadata = TRITON_METADATA
    processors: int | None = None  # multiprocessors that share the work, None for all of the GPU's

    def __init__(self) -> None:
        super().__init__()
        self._plans: dict[_Cut, tuple[SplitPlan, Partials]] = {}
        self._again: dict[tuple[object, ...], tuple[Relaunch, ...]] = {}  # of this forward, by the layer's key

    @classmethod
    def unusable_on(cls, device: torch.device) -> str | None:
        if device.type == "cuda" or INTERPRETED:
            return None
        return f"it needs CUDA, the model is on {device.type} (TRITON_INTERPRET=1 runs it there, for tests)"

    def _prepare(self, metadata: AttentionMetadata) -> None:
        self._plans = {}
        self._again = {}

    def store(self, call: AttentionCall, slots: torch.Tensor, q_out: torch.Tensor | None = None) -> torch.Tensor:
        assert call.k is not None and call.v is not None
        pools = call.pool.k[call.layer_id], call.pool.v[call.layer_id]
        return store_kv(call.q, call.k, call.v, *pools, slots, call.rope, q_out, call.layer.v_in_k)

    def _attend(self, call: AttentionCall) -> None:
        q, out, pool, layer, sinks = call.q, call.out, call.pool, call.layer, call.sinks
        k_pool, v_pool = pool.k[call.layer_id], pool.v[call.layer_id]
        alike = (layer, q.dtype, q.stride(), out.stride(), is_aligned(q, out, k_pool, v_pool, sinks))
        if alike in self._again:
            for launch in self._again[alike]:
                launch(q, out, k_pool, v_pool, sinks)
            return
        m = self.planned
        tiling = choose_tiling(m, layer, q.dtype)
        group = layer.num_heads // layer.num_kv_heads
        cut = _Cut(layer.window or 0, group, layer.num_kv_heads, layer.v_dim, tiling)
        plan, partials = self._plan_for(m, cut, q.device)
        again = attend(q, out, k_pool, v_pool, m, plan, partials, layer, sinks, tiling)
        if again is not None and alike[-1]:
            self._again[alike] = again

    def _plan_for(self, m: AttentionMetadata, cut: _Cut, device: torch.device) -> tuple[SplitPlan, Partials]:
        """Return the plan of layers with this cut, made on the device once per forward."""
        if cut not in self._plans:
            tiling, is_tree = cut.tiling, m.ancestor_bits is not None
            sees_all = is_tree or m.limits is not None
            span = m.tail_len if sees_all else tile_span(cut.group, tiling.block_m)
            max_chunks = most_chunks(m.max_prefix + m.tail_len, m.tail_len, cut.window, span, tiling.block_n)
            partial_bytes = cut.num_kv_heads * tiling.block_m * (cut.v_dim + 2) * 4
            plan = split_plan(
                m.prefix_lens,
                m.qo_indptr,
                limits=m.limits,
                first_node=m.tail_len - m.q_len,
                window=cut.window,
                num_tiles=num_tiles(m, cut.group, tiling.block_m),
                resident=max(1, tiling.resident * (self.processors or _num_processors(device)) // cut.num_kv_heads),
                num_kv_heads=cut.num_kv_heads,
                group=cut.group,
                block_m=tiling.block_m,
                block_n=tiling.block_n,
                is_tree=is_tree,
                max_chunks=max_chunks,
                max_partials=SCRATCH_BYTES // partial_bytes,
                is_small=m.slot_table.shape[0] <= FEW + 1,  # by the engine's rows: live traffic needs no other variant
            )
            partials = Partials.empty(plan.num_partials, cut.num_kv_heads, tiling.block_m, cut.v_dim, device)
            self._plans[cut] = (plan, partials)
        return self._plans[cut]


def _num_processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4
