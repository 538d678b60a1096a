"""The launch shape of attention, by the kind of forward and of layer, and the number of tiles of a forward."""

from dataclasses import dataclass
from types import MappingProxyType

import torch

from specdec.backends.base import LayerSpec
from specdec.backends.triton.attention.partials import padded_dim
from specdec.backends.triton.launch.shared_memory import shared_memory
from specdec.backends.triton.launch.sizes import cdiv, next_power_of_2
from specdec.core.batch import AttentionMetadata, ForwardMode


@dataclass(frozen=True)
class Tiling:
    """Launch shape of the attention kernel: rows and keys of a tile, warps, software-pipelining depth.

    block_n, the keys of a block, decides the bits of a result: it depends on layer, dtype and GPU only. resident: tiles
    that a multiprocessor holds at once; 0: no tile is split.
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    resident: int

    @property
    def options(self) -> dict[str, int]:
        """Return its compiler options."""
        return {"num_warps": self.num_warps, "num_stages": self.num_stages}


# By rows of a tile: warps, stages, resident. Wide: head dims over 64 in 16 bits.
_WIDE = MappingProxyType({16: (4, 3, 2), 32: (4, 3, 2), 64: (8, 3, 2), 128: (8, 3, 1)})
_NARROW = MappingProxyType({16: (2, 3, 4), 32: (2, 3, 4), 64: (4, 3, 3)})

# Bytes of shared memory that tiles of 128 rows need, and all others. An A100 has 163 KB, an RTX 4090 or 5090 99.
_MOST, _AMPLE = 200 << 10, 160 << 10
PROCESSORS = 132  # multiprocessors of the H200 that prefill tiles were tuned on


def choose_tiling(m: AttentionMetadata, layer: LayerSpec, dtype: torch.dtype) -> Tiling:
    """Return the launch shape for the forward's kind and the layer's shape. The only live property it depends on is
    whether prompts have cached prefixes, so nothing is compiled on live traffic. If shared memory is small, a block has
    half the keys.

    Tuned on an H200 in bf16.
    """
    row_bytes = max(padded_dim(layer.qk_dim), padded_dim(layer.v_dim)) * dtype.itemsize
    shared = shared_memory(m.positions.device)
    rows, most = m.q_len * (layer.num_heads // layer.num_kv_heads), 64
    all_rows, is_fresh = m.positions.shape[0] * layer.num_heads, m.mode is ForwardMode.EXTEND and m.max_prefix == 0
    if m.mode is ForwardMode.EXTEND:  # two tiles per multiprocessor; only a graph's number of tokens is not live
        most = 128 if row_bytes > 128 and shared > _MOST and not is_fresh else 64
        rows = cdiv(all_rows, 2 * PROCESSORS) if m.is_packed else most
        if rows > 32 and not is_fresh:  # keys are split then: the largest tiles read them least often
            rows = most
    if dtype.itemsize > 2 or row_bytes > 256 or shared < _AMPLE:
        most = 32 if row_bytes <= 512 or shared >= _AMPLE else 16  # fp32: one kind of instruction, so equal bits
    if layer.v_in_k:
        is_few = m.mode is not ForwardMode.EXTEND and all_rows <= PROCESSORS
        is_few |= m.is_packed and all_rows <= 8 * PROCESSORS
        return _latent_tiling(is_few, dtype, shared)
    block_m = min(max(16, next_power_of_2(rows)), most)
    block_n = 64 if row_bytes <= 256 else 32
    shape = (4, 2, 2) if row_bytes > 256 else (_WIDE if row_bytes > 128 else _NARROW)[block_m]
    if is_fresh:  # no tile has enough more keys than others to need splitting
        shape = (4, 2, 0)
    return Tiling(block_m, block_n if shared >= _AMPLE else block_n // 2, *shape)


def _latent_tiling(is_few: bool, dtype: torch.dtype, shared: int) -> Tiling:
    """Return the launch shape for layers whose V is in K, up to 512 and 64 columns. is_few: there are so few rows that
    smaller tiles in more programs are faster."""
    is_wide = dtype.itemsize > 2
    block_m = 16 if is_wide or is_few or shared < _AMPLE else 32  # two states in fp32 fill the registers
    block_n = 16 if is_wide else 64 if shared > _MOST else 32
    return Tiling(block_m, block_n, num_warps=8, num_stages=1 if is_wide else 2, resident=1)


def num_tiles(m: AttentionMetadata, group: int, block_m: int) -> int:
    """Return an upper bound of the tiles of a forward, `group` rows per query."""
    if m.is_packed:
        return cdiv(m.positions.shape[0] * group, block_m) + m.num_reqs
    if m.q_lens is None:
        return m.num_reqs * cdiv(m.q_len * group, block_m)
    return sum(cdiv(n * group, block_m) for n in m.q_lens)
