"""Trees against a naive reference, with ties, NaN, every topk and all 64 bits."""

import math
from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from specdec.core.batch import ancestor_mask
from specdec.core.functional.tree import Tree, build, chain, expand
from tests.ancestors import words_of

VOCAB_SIZE = 12


class Candidates(NamedTuple):
    """A draft's input to `build`, in creation order."""

    tokens: Tensor  # [bs, N], int64
    log_probs: Tensor  # [bs, N], float32
    parents: Tensor  # [bs, N], int64
    depths: Tensor  # [N], int64


def grow(root: Tensor, log_law: Tensor, num_steps: int, topk: int) -> Candidates:
    """EAGLE-2's growth with a draft that knows the last token only. root: [bs]; log_law: [V, V], row: last token."""
    bs = root.shape[0]
    scores, tokens = log_law[root].topk(topk, dim=-1)
    steps = [(tokens, scores, torch.full((bs, topk), -1))]
    frontier = torch.arange(topk).repeat(bs, 1)  # candidate numbers of the nodes that the next step extends
    offset = topk
    for _ in range(1, num_steps):
        child_log_probs, child_tokens = log_law[tokens].topk(topk, dim=-1)  # [bs, K, K]
        cumulative, kept = expand(child_log_probs, scores, topk)
        steps.append((child_tokens.flatten(1), cumulative, frontier.repeat_interleave(topk, dim=1)))
        tokens, scores = child_tokens.flatten(1).gather(1, kept), cumulative.gather(1, kept)
        frontier = offset + kept
        offset += topk * topk
    depths = [torch.full((step[0].shape[1],), depth) for depth, step in enumerate(steps, start=1)]
    all_tokens, log_probs, parents = (torch.cat(parts, dim=1) for parts in zip(*steps, strict=True))
    return Candidates(all_tokens, log_probs, parents, torch.cat(depths))


def naive_build(root: int, tokens: list[int], scores: list[float], parents: list[int], num_draft_tokens: int) -> Tree:
    """One request, in Python. A node whose parent was left out raises KeyError."""
    order = sorted(range(len(tokens)), key=lambda c: (math.inf if math.isnan(scores[c]) else -scores[c], c))
    node_of = {-1: 0}
    row = [(root, 0, 0, [0])]
    for node, candidate in enumerate(sorted(order[: num_draft_tokens - 1]), start=1):
        parent = node_of[parents[candidate]]
        row.append((tokens[candidate], parent, row[parent][2] + 1, [*row[parent][3], node]))
        node_of[candidate] = node
    *columns, lines = zip(*row, strict=True)
    return Tree(*map(torch.tensor, columns), words_of(lines, num_draft_tokens))


LAWS = ("random", "coarse", "certain", "nan", "all nan")


def log_law(kind: str, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    law = torch.randn(VOCAB_SIZE, VOCAB_SIZE, generator=generator).mul(2).log_softmax(-1)
    if kind == "coarse":  # many equal scores, along a path as well as between paths
        return law.round()
    if kind == "certain":  # children that tie with their parents
        return torch.where(torch.rand(law.shape, generator=generator) < 0.5, 0.0, law)
    if kind == "nan":
        return torch.where(torch.rand(law.shape, generator=generator) < 0.1, math.nan, law)
    return torch.full_like(law, math.nan) if kind == "all nan" else law


@settings(max_examples=150, deadline=None)
@given(
    topk=st.integers(1, 8),
    num_steps=st.integers(1, 8),
    size=st.integers(1, 64),
    kind=st.sampled_from(LAWS),
    seed=st.integers(0, 999),
)
def test_build_equals_the_naive_tree(topk: int, num_steps: int, size: int, kind: str, seed: int) -> None:
    root = torch.tensor([3, 0, 7])
    candidates = grow(root, log_law(kind, seed), num_steps, topk)
    num_draft_tokens = min(size, candidates.tokens.shape[1] + 1)
    tree = build(root, *candidates, num_draft_tokens=num_draft_tokens, num_steps=num_steps)

    for row in range(3):
        expected = naive_build(
            int(root[row]),
            candidates.tokens[row].tolist(),
            candidates.log_probs[row].tolist(),
            candidates.parents[row].tolist(),
            num_draft_tokens,
        )
        for field, got, want in zip(Tree._fields, tree, expected, strict=True):
            assert got[row].tolist() == want.tolist(), field

    nodes = torch.arange(num_draft_tokens)
    assert (tree.parents[:, 1:] < nodes[1:]).all() and (tree.parents[:, 0] == 0).all()
    assert (tree.depths[:, 1:] == tree.depths.gather(1, tree.parents)[:, 1:] + 1).all()
    mask = ancestor_mask(tree.ancestor_bits, num_draft_tokens)
    assert torch.equal(mask.sum(-1), tree.depths + 1)


@pytest.mark.parametrize("num_steps", [0, 1, 2, 5, 62, 63, 64, 127, 130, 255])
def test_chain_is_the_tree_of_topk_1(num_steps: int) -> None:
    root = torch.tensor([4, 5])
    drafts = torch.arange(2 * num_steps).view(2, num_steps)
    tree = chain(root, drafts)
    built = build(
        root,
        tokens=drafts,
        log_probs=torch.zeros(2, num_steps),
        parents=torch.arange(-1, num_steps - 1).repeat(2, 1),
        depths=torch.arange(1, num_steps + 1),
        num_draft_tokens=num_steps + 1,
        num_steps=num_steps,
    )
    for field, got, want in zip(Tree._fields, tree, built, strict=True):
        assert torch.equal(got, want), field
        assert got.dtype == torch.int64 and got.is_contiguous()
    causal = torch.ones(num_steps + 1, num_steps + 1, dtype=torch.bool).tril()
    assert torch.equal(ancestor_mask(tree.ancestor_bits, num_steps + 1), causal.expand(2, -1, -1))


def test_expand_keeps_the_earliest_of_equals_and_never_lifts_a_child_above_its_parent() -> None:
    parent_scores = torch.tensor([[-1.0, -1.0, math.nan]])
    log_probs = torch.tensor([[[-1.0, 1e-7], [0.0, math.nan], [0.0, 0.0]]])
    cumulative, kept = expand(log_probs, parent_scores, topk=4)
    assert cumulative.tolist() == [[-2.0, -1.0, -1.0, -math.inf, -math.inf, -math.inf]]
    assert kept.tolist() == [[1, 2, 0, 3]]


def test_ancestor_mask_has_64_bits_a_word() -> None:
    bits = torch.tensor([[[-1, -1], [0, 2], [-(1 << 63), 0], [1 << 62, 0], [5, -(1 << 63)]]])
    mask = ancestor_mask(bits, 128)
    assert mask.sum(-1).tolist() == [[128, 1, 1, 1, 3]]
    assert mask[0, 1, 65] and mask[0, 2, 63] and mask[0, 3, 62] and mask[0, 4, 0] and mask[0, 4, 2] and mask[0, 4, 127]


def test_no_value_reaches_the_host() -> None:
    """Tensors on `meta` have no values: `.item()`, `if tensor` and data-dependent shapes would raise."""
    candidates = grow(torch.tensor([0, 1]), log_law("random", 0), num_steps=3, topk=2)
    root = torch.empty(2, dtype=torch.int64, device="meta")
    tree = build(root, *(part.to("meta") for part in candidates), num_draft_tokens=6, num_steps=3)
    assert ancestor_mask(tree.ancestor_bits, 6).shape == (2, 6, 6)
    assert chain(root, tree.tokens).tokens.shape == (2, 7)
    assert expand(torch.empty(2, 3, 3, device="meta"), torch.empty(2, 3, device="meta"), 3)[1].shape == (2, 3)
