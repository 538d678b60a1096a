"""The argument lists of FlashInfer's modules: `paged_run` of each family, over pages of one KV slot.

Page lists are slot numbers; a pool [num_slots, Hkv, d] is viewed as pages [num_slots, 1, Hkv, d]. Unused arguments are
None, 0 or 1. Programmatic dependent launch stays off: the kernels read their tables before they wait for the previous
kernel, which in our graphs is the one that writes the tables.
"""

from typing import Any, NamedTuple

import torch

from specdec.backends.base import AttentionCall
from specdec.backends.triton.launch.ahead import is_rehearsing

CAUSAL, CUSTOM = 1, 2  # MaskMode
_NHD = 0  # layout of pages
_NO_PDL = False


class Paged(NamedTuple):
    """State that the layers of a forward share.

    float_workspace, int_workspace: uint8; info: the plan's integers; qo_indptr, kv_indptr [bs+1], kv_indices,
    last_page_len [bs] int32; mask_mode: CAUSAL or CUSTOM; window_left: of the kernel, -1 for none.
    """

    float_workspace: torch.Tensor
    int_workspace: torch.Tensor
    info: list[int]
    qo_indptr: torch.Tensor
    kv_indptr: torch.Tensor
    kv_indices: torch.Tensor
    last_page_len: torch.Tensor
    mask_mode: int
    window_left: int


def run_fa2(module: Any, paged: Paged, call: AttentionCall) -> None:
    """Run FlashInfer's own FA2 kernel, for chains and prefills."""
    rope_scale = rope_theta = 1.0
    unused = (None,) * 8  # custom mask, ALiBi, items, scales of 4-bit caches
    _run(module, paged, call, *unused, call.layer.softcap or 0.0, call.layer.scaling, rope_scale, rope_theta, 0)


def run_fa3(module: Any, paged: Paged, call: AttentionCall) -> None:
    """Run FlashInfer's Hopper kernel (FA3), for prefills."""
    unused, v_scale = (None,) * 4, 1.0
    _run(module, paged, call, *unused, call.layer.softcap or 0.0, call.layer.scaling, v_scale, 0)


def run_variant(
    module: Any,
    paged: Paged,
    call: AttentionCall,
    tail_len: int,
    ancestor_bits: torch.Tensor | None,
    tail_positions: torch.Tensor | None,
) -> None:
    """Run FA2 with one of our variants, for trees, with one or more words of ancestor bits, and layers with sinks."""
    layer, sinks = call.layer, call.sinks
    sinks = None if sinks is None else sinks.to(call.q.dtype)
    scalars: tuple[float, ...] = (layer.scaling, layer.softcap or 0.0, tail_len, layer.window or 0)
    if ancestor_bits is not None and ancestor_bits.shape[-1] > 1:
        scalars = (*scalars, ancestor_bits.shape[-1])
    _run(module, paged, call, ancestor_bits, tail_positions, sinks, *scalars)


def _run(module: Any, paged: Paged, call: AttentionCall, *extra: Any) -> None:
    assert call.out.is_contiguous(), "FlashInfer writes a dense output"
    if is_rehearsing():  # the tables have not been written
        return
    module.paged_run(
        paged.float_workspace,
        paged.int_workspace,
        paged.info,
        dense_rows(call.q),
        call.pool.k[call.layer_id].unsqueeze(1),
        call.pool.v[call.layer_id].unsqueeze(1),
        paged.qo_indptr,
        paged.kv_indptr,
        paged.kv_indices,
        paged.last_page_len,
        call.out,
        None,  # log-sum-exp
        paged.mask_mode,
        _NHD,
        paged.window_left,
        _NO_PDL,
        *extra,
    )


def dense_rows(q: torch.Tensor) -> torch.Tensor:
    """Return q [T, Hq, d], or a copy if its rows are not aligned to the 16 bytes that the kernels load at once."""
    width = 16 // q.element_size()
    is_aligned = q.data_ptr() % 16 == 0 and all(s % width == 0 for s in q.stride()[:-1]) and q.stride(-1) == 1
    return q if is_aligned else q.contiguous()
