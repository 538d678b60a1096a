"""The draft tree: the tokens that a round proposes, and their parents.

Pure tensor functions on CPU or CUDA with shapes that depend on the configuration alone; the specification that the
Triton kernels are compared with. It knows nothing about models, caches or acceptance.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from specdec.core.batch import ancestor_mask
from specdec.core.config import MAX_TAIL, num_words


class Tree(NamedTuple):
    """The D nodes a request verifies in a round, in creation order: a parent's number is below its children's.

    Siblings hold distinct tokens: `specdec.core.functional.verify` relies on it.
    """

    tokens: Tensor  # [bs, D], int64; node 0 is the root, the request's last emitted token
    parents: Tensor  # [bs, D], int64, node numbers; the root's parent is the root itself, 0
    depths: Tensor  # [bs, D], int64; the root has depth 0
    ancestor_bits: Tensor  # [bs, D, W], int64; bit j % 64 (63: the sign) of word j // 64: an ancestor, or itself, is j


class Frontier(NamedTuple):
    """The K branches that the next draft step extends; `above` numbers their parents in the frontier before."""

    tokens: Tensor  # [bs, K], int64
    scores: Tensor  # [bs, K], float32, cumulative log-probabilities
    names: Tensor  # [bs, K], int64, their numbers as candidates
    bits: Tensor  # [bs, K, W], int64: of the draft's nodes, those that each one sees, itself included
    above: Tensor | None = None  # [bs, K], int64


def chain(root: Tensor, drafts: Tensor) -> Tree:
    """Return the tree of topk = 1: every node is the child of the one before.

    root: [bs], int64, last emitted token. drafts: [bs, S], int64, from the draft, in order. Returns a tree, D = S + 1.
    """
    bs, num_steps = drafts.shape
    assert num_steps < MAX_TAIL, f"num_steps must be below {MAX_TAIL}, got {num_steps}"
    nodes = torch.arange(num_steps + 1, device=drafts.device)
    return Tree(
        tokens=torch.cat([root[:, None], drafts], dim=1),
        parents=(nodes - 1).clamp(min=0).repeat(bs, 1),
        depths=nodes.repeat(bs, 1),
        ancestor_bits=_chain_bits(nodes).repeat(bs, 1, 1),
    )


def best_token(logits: Tensor, names: Tensor | None) -> Tensor:
    """Return the best token of each row, the lower among equals: logits [n, V], float, to [n], int64.

    names: [V], int64, the token id of each index (a draft's hot vocabulary); None: the index itself.
    """
    best = logits.argmax(-1)
    return best if names is None else names[best]


def top_tokens(logits: Tensor, topk: int, names: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the best `topk` tokens of each row: log-probabilities [n, topk], float32, best first, and names, int64.

    logits: [n, V], float; names: as in `best_token`. A row that holds NaN or +inf gives NaN and distinct tokens.
    """
    best = logits.float().log_softmax(-1).topk(topk)
    return best.values, best.indices if names is None else names[best.indices]


def expand(log_probs: Tensor, parent_scores: Tensor, topk: int) -> tuple[Tensor, Tensor]:
    """Do one step of EAGLE-2's growth: score the children, keep the best for the next draft forward.

    log_probs: [bs, K, C], float, from the draft: row k holds the log-probabilities of the C children of parent k.
    parent_scores: [bs, K], float, cumulative log-probabilities of the parents.
    Returns cumulative scores [bs, K*C] (child c of parent k at k*C + c) and the best `topk` of them as indices
    [bs, topk], int64, best first, the earlier first among equals.

    A child's score is never above its parent's, whatever the draft's rounding: `build` relies on it.
    NaN counts as -inf, and so do the descendants of NaN.
    """
    cumulative = _nan_to_minus_inf(parent_scores[:, :, None] + log_probs.clamp(max=0)).flatten(1)
    return cumulative, _best(cumulative, topk)


def grow(
    log_probs: Tensor, tokens: Tensor, frontier: Frontier, own_bits: Tensor, first_name: int, keeps_first: bool = False
) -> tuple[Tensor, Tensor, Frontier]:
    """Make candidates of the children of `frontier`: their scores and parents [bs, K*C], and the next frontier.

    log_probs [bs, K, C], float: see `expand`. tokens [bs, K*C], int64: the children's. own_bits [topk, W], int64: of
    the nodes that the next frontier becomes; there are `topk` of them. first_name: the number of the first child.
    keeps_first: the first child of the first parent is the first of the next frontier, whatever its score.
    """
    num_children = log_probs.shape[2]
    scores, kept = expand(log_probs, frontier.scores, own_bits.shape[0])
    if keeps_first:
        first = torch.arange(scores.shape[1], device=scores.device) == 0
        kept = _best(scores.masked_fill(first, math.inf), own_bits.shape[0])
    above = kept // num_children
    bits = frontier.bits.gather(1, above.unsqueeze(2).expand(-1, -1, own_bits.shape[1])) | own_bits
    parents = frontier.names.repeat_interleave(num_children, 1)
    return scores, parents, Frontier(tokens.gather(1, kept), scores.gather(1, kept), first_name + kept, bits, above)


def build(
    root: Tensor,
    tokens: Tensor,
    log_probs: Tensor,
    parents: Tensor,
    depths: Tensor,
    *,
    num_draft_tokens: int,
    num_steps: int,
) -> Tree:
    """Re-rank all candidates and make a tree of the root and the best D - 1 of them (EAGLE-2, section 4.2).

    root: [bs], int64, last emitted token. The N candidates come from the draft in creation order, so that a
    candidate's parent is an earlier one:
    tokens: [bs, N], int64; siblings distinct.
    log_probs: [bs, N], float, cumulative; a child's is at most its parent's (see `expand`), NaN counts as -inf.
    parents: [bs, N], int64, candidate numbers, or -1 for the children of the root.
    depths: [N], int64, 1..num_steps: the draft step decides it, not the data.
    """
    num_drafts, num_candidates = num_draft_tokens - 1, tokens.shape[1]
    assert 1 <= num_draft_tokens <= MAX_TAIL, f"expected D in 1..{MAX_TAIL}, got {num_draft_tokens}"
    assert num_drafts <= num_candidates, f"expected at least {num_drafts} candidates, got {num_candidates}"

    # Equal scores go to the earlier candidate, hence to a parent before its child: the selection is closed.
    selected = _best(_nan_to_minus_inf(log_probs), num_drafts).sort(dim=1).values  # [bs, D-1], creation order
    nodes = torch.arange(1, num_draft_tokens, device=tokens.device).expand_as(selected)
    node_of_candidate = torch.zeros_like(tokens).scatter(1, selected, nodes)  # 0 for those left out
    parent_candidates = parents.gather(1, selected)
    parent_nodes = node_of_candidate.gather(1, parent_candidates.clamp(min=0)).masked_fill(parent_candidates < 0, 0)

    node_parents = _prepend(parent_nodes, torch.zeros_like(root))
    return Tree(
        tokens=_prepend(tokens.gather(1, selected), root),
        parents=node_parents,
        depths=_prepend(depths[selected], torch.zeros_like(root)),
        ancestor_bits=ancestor_bits(node_parents, num_steps),
    )


def force(draft: Tree, probs: Tensor | None, forced: Tensor) -> None:
    """Write forced tokens [bs, S] int64, -1 past the last, to a path of `draft`, in place.

    The path takes at each depth the child that holds the token already, else the one below which the tree is deepest,
    the first among equals. So siblings stay distinct. probs [bs, S, V], of a chain that was drawn: a forced token is a
    point mass.
    """
    num_nodes = draft.tokens.shape[1]
    nodes = torch.arange(num_nodes, device=forced.device)
    is_below = ancestor_mask(draft.ancestor_bits, num_nodes)  # [bs, D, D]: whether each node is below the others
    reach = torch.where(is_below, draft.depths.unsqueeze(2), 0).amax(1)  # [bs, D]: the depth of the deepest one below
    current = torch.zeros_like(forced[:, :1])
    for step in range(min(forced.shape[1], num_nodes - 1)):
        token = forced[:, step : step + 1]
        is_child = (draft.parents == current) & (nodes > 0) & (token >= 0)
        rank = (draft.tokens == token) * num_nodes + reach
        best = torch.where(is_child, rank * num_nodes + num_nodes - 1 - nodes, -1).amax(1, keepdim=True)
        current = torch.where(best >= 0, num_nodes - 1 - best % num_nodes, -1)  # -1 has no children
        draft.tokens.copy_(torch.where(nodes == current, token, draft.tokens))
    if probs is not None:
        is_token = torch.arange(probs.shape[2], device=forced.device) == forced.unsqueeze(2)
        probs.copy_(torch.where(forced.unsqueeze(2) >= 0, is_token.to(probs.dtype), probs))


def own_bits(nodes: Tensor, num_nodes: int) -> Tensor:
    """Return the words [..., W] int64 in which only the bit of each of `nodes` [...] int64 is set."""
    words = torch.arange(num_words(num_nodes), device=nodes.device)
    return (1 << nodes % 64).unsqueeze(-1).where(nodes.unsqueeze(-1) // 64 == words, 0)


def ancestor_bits(parents: Tensor, num_steps: int) -> Tensor:
    """Return `Tree.ancestor_bits` [bs, D, W] from parents [bs, D], int64, node numbers, none deeper than num_steps."""
    num_nodes = parents.shape[1]
    bits = own_bits(torch.arange(num_nodes, device=parents.device), num_nodes).expand(parents.shape[0], -1, -1)
    jump = parents
    # Pointer jumping: after n turns a node knows the 2**n nearest nodes of its path; the longest has num_steps + 1.
    # The root jumps to itself, so that short paths end there.
    for _ in range(num_steps.bit_length()):
        bits = bits | bits.gather(1, jump.unsqueeze(2).expand_as(bits))
        jump = jump.gather(1, jump)
    return bits


def _chain_bits(nodes: Tensor) -> Tensor:
    """Return the words [D, W] of a chain's `nodes` 0..D-1: each sees itself and all before it."""
    num_seen = nodes.unsqueeze(1) + 1 - 64 * torch.arange(num_words(len(nodes)), device=nodes.device)
    # 2 << (n - 1) is 1 << n, but stays a shift below 64 bits for n = 64: it wraps to 0, and 0 - 1 sets all bits.
    return torch.where(num_seen > 0, (2 << (num_seen.clamp(1, 64) - 1)) - 1, 0)


def _best(scores: Tensor, num: int) -> Tensor:
    """Return the columns of the best `num` scores, best first, the earlier first among equals: [bs, num], int64."""
    return scores.sort(dim=1, descending=True, stable=True).indices[:, :num]


def _nan_to_minus_inf(scores: Tensor) -> Tensor:
    return scores.masked_fill(scores.isnan(), -math.inf)


def _prepend(columns: Tensor, first: Tensor) -> Tensor:
    """Put first [bs] before columns [bs, n]: [bs, n + 1]."""
    return torch.cat([first[:, None], columns], dim=1)
