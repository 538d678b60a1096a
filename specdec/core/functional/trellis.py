"""Trees from candidates of every depth: the best paths through a trellis, without further passes of a draft.

A block drafter names K tokens for each depth at once. `transitions` says how likely each is after each of the depth
before; where a head knows no such dependence, all rows are equal (DDTree, arXiv 2604.12989). A path's score is the sum
of its log-probabilities; `walk` finds the best ones, as a best-first search would, for it keeps `width` nodes a depth
and a node's ancestors score no less than it does.
"""

import torch
from torch import Tensor

from specdec.core.functional.ops import RoundOps
from specdec.core.functional.tree import Frontier

MAX_WIDTH = 64  # nodes kept per depth: exact for trees of up to 65 nodes, nearly exact for larger ones


def width_of(num_draft_tokens: int) -> int:
    """Return the number of nodes to keep per depth for a tree of `num_draft_tokens` nodes, root included."""
    return min(MAX_WIDTH, 1 << max(num_draft_tokens - 2, 0).bit_length())


def depths(num_steps: int, topk: int, width: int) -> Tensor:
    """Return the depths [N] int64 of the candidates that `walk` gives."""
    sizes, size = [], min(width, topk)
    for _ in range(num_steps):
        sizes.append(size)
        size = min(width, size * topk)
    return torch.arange(1, num_steps + 1, device="cpu").repeat_interleave(torch.tensor(sizes, device="cpu"))


def transitions(log_probs: Tensor, bias: Tensor | None) -> Tensor:
    """Return log-probabilities [bs, S-1, K, K] of each candidate after each candidate of the depth before.

    log_probs [bs, S, K], float32: of the candidates of each depth by themselves. bias [bs, S-1, K, K], float: what the
    one before (third axis) adds to the logit of each; None adds nothing. The bias of all other tokens counts as 0.
    """
    own = log_probs[:, 1:, None, :]
    if bias is None:
        return own.expand(-1, -1, log_probs.shape[2], -1)
    others = (-own.exp().sum(-1, keepdim=True)).clamp(min=-1 + 1e-6).log1p()
    moved = own + bias.float()
    return moved - torch.logaddexp(moved.logsumexp(-1, keepdim=True), others)


def walk(
    ops: RoundOps, names: Tensor, first: Tensor, moves: Tensor, width: int, has_spine: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """Return tokens, scores and parents [bs, N] of the candidates of a tree, as `tree.build` takes them.

    names [bs, S, K], int64: candidates of each depth, distinct. first [bs, K], float32: log-probabilities of those of
    depth 1, best first. moves [bs, S-1, K, K]: see `transitions`. has_spine: the path of the first candidate of every
    depth is kept and part of the tree, see `spine`.
    """
    bs, num_steps, k = names.shape
    size = min(width, k)
    states = torch.arange(size, device=names.device).expand(bs, -1)
    frontier = Frontier(names[:, 0, :size], first[:, :size], states, states.new_zeros(bs, size, 1))
    tokens, scores, parents = [frontier.tokens], [frontier.scores], [torch.full_like(states, -1)]
    base = 0  # number of the first candidate of the depth before
    for depth in range(1, num_steps):
        children = names[:, depth].repeat(1, size)
        log_probs = moves[:, depth - 1].gather(1, states.unsqueeze(2).expand(-1, -1, k))
        kept = min(width, size * k)
        _, _, frontier = ops.grow(log_probs, children, frontier, states.new_zeros(kept, 1), 0, has_spine)
        assert frontier.above is not None
        states = frontier.names % k
        tokens.append(frontier.tokens)
        scores.append(frontier.scores)
        parents.append(base + frontier.above)
        base, size = base + size, kept
    return torch.cat(tokens, 1), torch.cat(scores, 1), torch.cat(parents, 1)
