"""Synthetic acceptance: rounds accept as many drafts as given rates say, so that untrained heads can be timed.

The text means nothing then. Everything else of a round is done as ever, the real verdict included.
"""

import torch

from specdec.tree import Tree, ancestor_mask
from specdec.verify import Verdict


def impose_acceptance(verdict: Verdict, tree: Tree, rates: torch.Tensor, u: torch.Tensor) -> Verdict:
    """`verdict` with the path replaced: towards the tree's deepest node, draft j kept with probability rates[j-1].

    rates: [S], float64, a_1 >= a_2 >= ...: the share of rounds in which position j is accepted. u: [bs], float64, in
    [0, 1), one draw a round: a_j is the chance that at least j are kept. A tree shallower than a draw keeps its depth.
    The bonus is the verdict's own. Fixed shapes, no host reads.
    """
    width = verdict.tokens.shape[1]
    deepest = tree.depths.argmax(1, keepdim=True)
    is_on_path = ancestor_mask(tree.ancestor_bits.gather(1, deepest), tree.depths.shape[1]).squeeze(1)  # [bs, D]
    nodes = torch.arange(tree.depths.shape[1], device=u.device).expand_as(tree.depths)
    # Node by depth; what is off the path lands in a column that is cut off.
    places = torch.where(is_on_path, tree.depths, width).clamp(max=width)
    path = torch.full_like(nodes[:, :1], -1).repeat(1, width + 1).scatter(1, places, nodes)[:, :width]
    num_kept = torch.minimum((u.unsqueeze(1) < rates).sum(1), tree.depths.gather(1, deepest).squeeze(1))
    num_kept = num_kept.clamp(max=width - 1).masked_fill(verdict.invalid, 0)

    columns = torch.arange(width, device=u.device)
    path = torch.where(columns <= num_kept.unsqueeze(1), path, -1)
    drafts = tree.tokens.gather(1, path.clamp(min=0)).roll(-1, dims=1)
    last = verdict.accept_lens.unsqueeze(1) - 1
    bonus = verdict.tokens.gather(1, last)
    tokens = torch.where(columns < num_kept.unsqueeze(1), drafts, -1)
    tokens = torch.where(columns == num_kept.unsqueeze(1), bonus, tokens)
    return Verdict(path, num_kept + 1, tokens, verdict.invalid)
