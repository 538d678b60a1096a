"""A tree in the form that forwards take, for checks of kernels."""

from typing import NamedTuple

import torch


class Tail(NamedTuple):
    """The number of nodes of a forward, and of 64-bit words of ancestor bits per node; 0: a chain."""

    num_nodes: int
    num_words: int


class SampleTree(NamedTuple):
    """depths [n] and bits [n, W], both int64, None for a chain; path: from the root to the last node."""

    depths: torch.Tensor | None
    bits: torch.Tensor | None
    path: tuple[int, ...]


def sample_tree(tail: Tail, device: torch.device) -> SampleTree:
    """Return a binary tree, or a chain, of a tail's nodes."""
    paths: list[tuple[int, ...]] = []
    for node in range(tail.num_nodes):
        parent = (node - 1) // 2 if tail.num_words else node - 1
        paths.append((*(paths[parent] if node else ()), node))
    if not tail.num_words:
        return SampleTree(None, None, paths[-1])
    depths = torch.tensor([len(path) - 1 for path in paths], device=device)
    words = [[_word([n % 64 for n in path if n // 64 == w]) for w in range(tail.num_words)] for path in paths]
    return SampleTree(depths, torch.tensor(words, device=device), paths[-1])


def _word(bits: list[int]) -> int:
    """Return the int64 with these bits set; bit 63 is the sign."""
    return sum(1 << n for n in bits) - (1 << 64 if 63 in bits else 0)
