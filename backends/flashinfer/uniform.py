"""Decode-shaped forwards on FlashInfer's FA2 kernels: draft steps, draft-extend, verify and decode, chains and trees.

One kernel per forward and kind of layer (`tables`) writes everything that depends on lengths, so that a round stays one
CUDA graph: nothing is planned on the host.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from specdec.backends.base import AttentionCall, LayerSpec
from specdec.backends.flashinfer.calls import CAUSAL, CUSTOM, Paged, run_fa2, run_variant
from specdec.backends.flashinfer.kernels import Kernel, kernel_for, uniform_family
from specdec.backends.flashinfer.tables import NO_WINDOW, Shapes, budget_for, plan_info, write_tables
from specdec.core.batch import AttentionMetadata


class LayerKind(NamedTuple):
    """The key of a layer's tables; layers with equal keys share them."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    window_left: int  # of the kernel, NO_WINDOW for none
    mask_mode: int


def kind_of(layer: LayerSpec, m: AttentionMetadata) -> LayerKind:
    """Return the kind of a layer in a forward: its table key with window and mask mode.

    A chain is causal. A tree is causal, too, with its ancestor bits applied on top, if the kernel applies the variant's
    mask to every tile with a tail key; it does so only from the first tile that causality cuts. That holds if one tile
    has all queries, the tail has no nodes before them, and there is no window, by which a node would see keys farther
    back than its index says. Otherwise the variant's mask is applied to every tile, and the window begins early enough
    for a node of any depth.
    """
    group = layer.num_heads // layer.num_kv_heads
    shapes = Shapes(m.num_reqs, m.q_len, layer.num_heads, layer.num_kv_heads, layer.qk_dim, 0)
    is_tree = m.ancestor_bits is not None
    is_causal = not is_tree or (m.q_len == m.tail_len and layer.window is None and m.q_len * group <= shapes.cta)
    window_left = NO_WINDOW
    if layer.window is not None:
        window_left = layer.window - 1 + (m.tail_len if is_tree else 0)
    return LayerKind(layer.num_heads, layer.num_kv_heads, layer.qk_dim, window_left, CAUSAL if is_causal else CUSTOM)


class UniformAttention:
    """The tables of the current forward, one set per kind of layer, and the modules that run with them."""

    def __init__(self, modules: Mapping[Kernel, Any], device: torch.device):
        self._modules = modules
        self._num_processors = torch.cuda.get_device_properties(device).multi_processor_count
        self._planned: dict[LayerKind, Paged] = {}

    def begin(self) -> None:
        """Discard the tables of the previous forward."""
        self._planned = {}

    def attend(self, m: AttentionMetadata, call: AttentionCall) -> None:
        """Attend in one layer of forward `m`, whose K and V are stored."""
        kind, words = kind_of(call.layer, m), 0 if m.ancestor_bits is None else m.ancestor_bits.shape[-1]
        if kind not in self._planned:
            self._planned[kind] = self._plan(m, kind, call.q)
        paged, family = self._planned[kind], uniform_family(call.layer, words)
        module = self._modules[kernel_for(family, call.layer, call.q.dtype)]
        if family == "fa2":
            run_fa2(module, paged, call)
        else:
            run_variant(module, paged, call, m.tail_len, m.ancestor_bits, m.tail_positions)

    def _plan(self, m: AttentionMetadata, kind: LayerKind, q: torch.Tensor) -> Paged:
        """Write a kind's tables, and allocate its partial outputs."""
        shapes = Shapes(m.num_reqs, m.q_len, kind.num_heads, kind.num_kv_heads, kind.head_dim, 0, kind.window_left)
        budget = budget_for(m.num_reqs, shapes.tiles, self._num_processors, kind.num_kv_heads)
        shapes = shapes._replace(budget=budget)
        tables = write_tables(shapes, m.prefix_lens, m.tail_len, m.rows, m.slot_table)
        num_values = shapes.partial_rows * kind.num_heads
        v_bytes = num_values * kind.head_dim * q.element_size()
        return Paged(
            torch.empty(v_bytes + 4 * num_values, dtype=torch.uint8, device=q.device),
            tables.workspace,
            plan_info(shapes, v_bytes),
            m.qo_indptr,
            tables.kv_indptr,
            m.slot_table,
            tables.last_page_len,
            kind.mask_mode,
            -1 if kind.window_left == NO_WINDOW else kind.window_left,
        )
