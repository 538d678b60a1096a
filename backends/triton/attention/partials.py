"""The pool of partial states: what chunks of split tiles, and of trees, leave for those that fold them."""

from typing import NamedTuple

import torch
import triton


class Partials(NamedTuple):
    """Scratch for states, fp32: acc [num_partials, Hkv, block_m, v_dim] and stats [num_partials, Hkv, block_m, 2],
    maximum and mass."""

    acc: torch.Tensor
    stats: torch.Tensor

    @classmethod
    def empty(cls, num: int, num_kv_heads: int, block_m: int, v_dim: int, device: torch.device) -> "Partials":
        """Return scratch for `num` states a KV head."""
        rows = (num, num_kv_heads, block_m)
        shapes = ((*rows, v_dim), (*rows, 2))
        return cls(*(torch.empty(shape, dtype=torch.float32, device=device) for shape in shapes))


def padded_dim(dim: int) -> int:
    """Return the columns of a tile that holds `dim`: a power of two that `tl.dot` accepts."""
    return max(16, triton.next_power_of_2(dim))
