"""Ancestor bits of hand-written trees."""

from collections.abc import Sequence

import torch


def words_of(lines: Sequence[Sequence[int]], num_nodes: int | None = None) -> torch.Tensor:
    """[q, W] int64: the nodes of each of `lines`; W is as wide as `num_nodes` needs (default: the highest node + 1)."""
    num_nodes = num_nodes or max(map(max, lines)) + 1
    words = torch.zeros(len(lines), -(-num_nodes // 64), dtype=torch.int64)
    for query, line in enumerate(lines):
        for node in line:
            words[query, node // 64] |= -(1 << 63) if node % 64 == 63 else 1 << node % 64
    return words
