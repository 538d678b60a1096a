"""Trees for sampled requests: a path that is drawn from the draft's own law, its spine, and point masses beside it.

A chain that is drawn accepts sum(min(p, q)) of its tokens, which is more than the best single token's p; a tree of
point masses knows only the latter. So of every node of the spine the first child is drawn from q and accepted with
min(1, p / q); if it is refused, its siblings are tried as point masses on (p - q)+, which is the law that is left: see
`verify.verify_spine` (arXiv 2211.17192; SpecInfer, arXiv 2305.09781, tries all of them as draws). A tree always has the
whole spine, whatever was drawn: to leave out a node for its own value would bias what is emitted.
"""

import math

import torch
from torch import Tensor

ACCEPTED = 0.7  # share of drawn tokens that are accepted, about: what siblings and children are ranked by
KEPT = 1.0  # a score above all log-probabilities
LOG_ACCEPTED, LOG_REFUSED = math.log(ACCEPTED), math.log(1 - ACCEPTED)


def put_first(drawn: Tensor, tokens: Tensor, log_probs: Tensor, own: Tensor | None) -> None:
    """Put drawn [n] int64 in front of tokens [n, K] int64, distinct, and `own` [n] of log_probs [n, K], in place.

    It changes places with the first token if it is among them, else with the last, which is left out for the first.
    own: the log-probability of `drawn`; None: the tokens are children of the spine, and log_probs become `ranked`.
    """
    is_there, last = tokens == drawn.unsqueeze(1), tokens.shape[1] - 1
    place = torch.where(is_there.any(1), is_there.long().argmax(1), last).unsqueeze(1)
    for of, first in ((tokens, drawn), (log_probs, log_probs[:, 0] if own is None else own)):
        of.copy_(torch.cat([first.unsqueeze(1), of.scatter(1, place, of[:, :1])[:, 1:]], 1))
    if own is None:
        log_probs.copy_(ranked(log_probs))


def ranked(log_probs: Tensor) -> Tensor:
    """Return log-probabilities [..., n] of the children of a node of the spine, the drawn one first, as they rank."""
    first = torch.arange(log_probs.shape[-1], device=log_probs.device) == 0
    return torch.where(first, LOG_ACCEPTED, log_probs + LOG_REFUSED)


def firsts(depths: Tensor) -> Tensor:
    """Return which candidates of a tree are nodes of its spine, [N] bool: the first of each of depths [N], ascending.

    `tree.build` takes them with the score `KEPT`.
    """
    return depths != torch.cat([depths.new_zeros(1), depths[:-1]])
