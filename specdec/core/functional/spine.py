"""Trees for sampled requests: a path that is drawn from the draft's own law, its spine, and point masses beside it.

A chain that is drawn accepts sum(min(p, q)) of its tokens, which is more than the best single token's p; a tree of
point masses knows only the latter. So of every node of the spine the first child is drawn from q and accepted with
min(1, p / q); if it is refused, its siblings are tried as point masses on (p - q)+, which is the law that is left
(arXiv 2211.17192; SpecInfer, arXiv 2305.09781, tries all of them as draws). A tree always has the whole spine, whatever
was drawn: to leave out a node for its own value would bias what is emitted.
"""

import math

import torch
from torch import Tensor

from specdec.core.functional.tree import Tree

ACCEPTED = 0.7  # share of drawn tokens that are accepted, about: what siblings and children are ranked by
LOG_ACCEPTED, LOG_REFUSED = math.log(ACCEPTED), math.log(1 - ACCEPTED)


def put_first(drawn: Tensor, tokens: Tensor, *values: tuple[Tensor, Tensor]) -> list[Tensor]:
    """Return tokens [bs, n] int64, distinct, with drawn [bs] in front, and each of `values` in the same order.

    It changes places with the first token if it is among them, else with the last, which is left out for the first.
    values: pairs of [bs, n] and what belongs to `drawn` [bs].
    """
    is_there, last = tokens == drawn.unsqueeze(1), tokens.shape[1] - 1
    place = torch.where(is_there.any(1), is_there.long().argmax(1), last).unsqueeze(1)
    pairs = ((tokens, drawn), *values)
    return [torch.cat([own.unsqueeze(1), of.scatter(1, place, of[:, :1])[:, 1:]], 1) for of, own in pairs]


def ranked(log_probs: Tensor) -> Tensor:
    """Return log-probabilities [..., n] of the children of a node of the spine, the drawn one first, as they rank."""
    first = torch.arange(log_probs.shape[-1], device=log_probs.device) == 0
    return torch.where(first, LOG_ACCEPTED, log_probs + LOG_REFUSED)


def kept(scores: Tensor) -> Tensor:
    """Return the scores [bs, n] of candidates that `tree.build` takes; the first, a node of the spine, is above all."""
    first = torch.arange(scores.shape[1], device=scores.device) == 0
    return scores.masked_fill(first, 1.0)


def decide(probs: Tensor, draft_probs: Tensor, tree: Tree, num_steps: int, uniforms: Tensor) -> Tensor:
    """Return laws [bs, D, V] with which `verify.verify_tree` emits what the target would, from a tree with a spine.

    The law after a node of the spine becomes certainty where its drawn child is accepted, and (p - q)+ at the first
    node where it is not. probs, uniforms: as there; draft_probs: [bs, S, V], float, the laws that the spine was drawn
    from. Where q is not finite, its token counts as a point mass.
    """
    depths = torch.arange(num_steps + 1, device=probs.device)
    nodes = (tree.depths.unsqueeze(1) == depths.unsqueeze(1)).long().argmax(2)  # [bs, S+1]: the first of every depth
    above, below = nodes[:, :-1], nodes[:, 1:]
    drawn = tree.tokens.gather(1, below).unsqueeze(2)
    wide = above.unsqueeze(2).expand(-1, -1, probs.shape[2])
    law, draft_law = probs.gather(1, wide), draft_probs[:, :num_steps]
    p, q = law / law.sum(-1, keepdim=True, dtype=torch.float64), draft_law.double()
    mass = q.sum(-1, keepdim=True)
    is_law = mass.isfinite() & (mass > 0)
    q = torch.where(is_law, q / mass, 0)
    is_accepted = uniforms.gather(1, below).unsqueeze(2) * q.gather(2, drawn) < p.gather(2, drawn)
    num_accepted = (is_accepted & is_law).long().cumprod(1).sum(1, keepdim=True)  # [bs, 1, 1]
    residual = (p - q).clamp(min=0).to(law.dtype)
    residual = torch.where((residual > 0).any(-1, keepdim=True), residual, law)  # without mass: rounding
    certain = torch.zeros_like(law).scatter(2, drawn, 1.0)
    step = depths[:-1, None]
    left = torch.where(step < num_accepted, certain, torch.where(step == num_accepted, residual, law))
    return probs.scatter(1, wide, left)
