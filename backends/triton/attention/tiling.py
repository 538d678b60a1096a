"""The launch shape of attention, by the kind of forward and of layer, and the number of tiles of a forward."""

from dataclasses import dataclass, replace
from types import MappingProxyType

import torch
import triton

from specdec.backends.base import LayerSpec
from specdec.backends.triton.attention.merge import padded_dim
from specdec.backends.triton.launch.shared_memory import shared_memory
from specdec.core.batch import AttentionMetadata, ForwardMode


@dataclass(frozen=True)
class Tiling:
    """Launch shape of the attention kernel: rows and keys of a tile, warps, software-pipelining depth.

    resident: tiles that a multiprocessor holds at once; keys are split until there are that many.
    min_chunk: keys of the shortest piece; shorter ones cost more in merging than they gain.
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    resident: int
    min_chunk: int = 256


# By rows of a tile: block_m, block_n, warps, stages, resident. Wide: head dims over 64 in 16 bits.
_WIDE_TILINGS = MappingProxyType(
    {16: Tiling(16, 64, 2, 3, 2, min_chunk=128), 32: Tiling(32, 128, 4, 2, 2), 64: Tiling(64, 64, 4, 3, 2)}
)
_NARROW_TILINGS = MappingProxyType(
    {16: Tiling(16, 64, 2, 3, 4, min_chunk=64), 32: Tiling(32, 64, 2, 3, 4), 64: Tiling(64, 64, 4, 3, 3)}
)

_AMPLE = 160 << 10  # bytes of shared memory. An A100 has 163 KB, which every tile fits; an RTX 4090 or 5090 has 99


def choose_tiling(m: AttentionMetadata, layer: LayerSpec, dtype: torch.dtype) -> Tiling:
    """Return the launch shape for the forward's kind and the layer's shape; it never depends on a live length, so
    nothing is compiled on live traffic. Where shared memory is small, a tile has half the keys."""
    tiling = _tiling_of_hopper(m, layer, dtype)
    if shared_memory(m.positions.device) >= _AMPLE:
        return tiling
    return replace(tiling, block_n=max(tiling.block_n // 2, 16))


def _tiling_of_hopper(m: AttentionMetadata, layer: LayerSpec, dtype: torch.dtype) -> Tiling:
    """Chosen by measurement on an H200 in bf16 (docs/results.md, attention)."""
    row_bytes = max(padded_dim(layer.qk_dim), padded_dim(layer.v_dim)) * dtype.itemsize
    rows = m.q_len * (layer.num_heads // layer.num_kv_heads)
    kind = 64 if m.mode is ForwardMode.EXTEND else min(max(16, triton.next_power_of_2(rows)), 64)
    if row_bytes > 256:  # fp32, or head dims over 128
        return Tiling(min(kind, 32), 32, 4, 2, resident=2)
    if m.mode is ForwardMode.EXTEND:
        return Tiling(64, 64, 4, 3, resident=1) if row_bytes > 128 else Tiling(64, 128, 4, 3, resident=1)
    return (_WIDE_TILINGS if row_bytes > 128 else _NARROW_TILINGS)[kind]


def num_tiles(m: AttentionMetadata, group: int, block_m: int) -> int:
    """Return an upper bound of the tiles of a forward, `group` rows per query."""
    if m.is_packed:
        return triton.cdiv(m.positions.shape[0] * group, block_m) + m.num_reqs
    if m.q_lens is None:
        return m.num_reqs * triton.cdiv(m.q_len * group, block_m)
    return sum(triton.cdiv(n * group, block_m) for n in m.q_lens)
