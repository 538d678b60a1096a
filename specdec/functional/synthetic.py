"""Synthetic acceptance: rounds accept as many drafts as given rates say, so that untrained heads can be timed.

The text is meaningless then. All other work of a round is done as usual, the real verification included.
"""

import torch

from specdec.functional.tree import Tree
from specdec.functional.verify import VerifyOutput


def impose_acceptance(verified: VerifyOutput, tree: Tree, rates: torch.Tensor, u: torch.Tensor) -> VerifyOutput:
    """Return `verified` with another path: the root and the tree's last nodes, the j-th kept with chance rates[j-1].

    rates: [S], float64, a_1 >= a_2 >= ...: the share of rounds in which position j is accepted. u: [bs], float64, in
    [0, 1), one draw per round. In a tree those nodes are not each other's children, but their K/V is moved like that of
    a real path. The bonus is that of `verified`. Fixed shapes, no host reads.
    """
    width = verified.tokens.shape[1]
    columns = torch.arange(width, device=u.device)
    num_kept = (u.unsqueeze(1) < rates).sum(1).clamp(max=width - 1).masked_fill(verified.invalid, 0).unsqueeze(1)
    nodes = torch.where(columns > 0, columns + tree.tokens.shape[1] - width, 0)
    drafts = tree.tokens[:, nodes].roll(-1, dims=1)
    bonus = verified.tokens.gather(1, verified.accept_lens.unsqueeze(1) - 1)
    tokens = torch.where(columns < num_kept, drafts, torch.where(columns == num_kept, bonus, -1))
    return VerifyOutput(torch.where(columns <= num_kept, nodes, -1), num_kept.squeeze(1) + 1, tokens, verified.invalid)
