"""Verification: the drafts that the target accepts and the bonus token; this part makes speculation lossless.

Pure tensor functions on CPU or CUDA: no host sync, loops over depth or nodes only; the specification that the Triton
kernels are compared with. It knows nothing about draft models, caches or requests.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from specdec.core.functional.sampling import sample
from specdec.core.functional.tree import Tree


class VerifyOutput(NamedTuple):
    """Tokens that a round emits, and their path. Columns past `accept_lens` hold -1."""

    accept_index: Tensor  # [bs, S+1], int64; the accepted node of each depth, column 0 is the root
    accept_lens: Tensor  # [bs], int64, 1..S+1: tokens emitted, bonus included (0 only after `trim`)
    tokens: Tensor  # [bs, S+1], int64; the accepted drafts, then the bonus token
    invalid: Tensor  # [bs], bool; the target was not finite at the path's last node: the last token is 0, meaningless


def verify_greedy(logits: Tensor, tree: Tree, num_steps: int) -> VerifyOutput:
    """Accept the nodes whose token is the target's argmax at their accepted parent.

    logits: [bs, D, V], any float dtype, from the target. A node is unusable if it holds NaN or +inf, or only -inf.
    """
    best, target = logits.max(-1)  # [bs, D]
    nodes = torch.arange(tree.tokens.shape[1], device=logits.device)
    current = torch.zeros_like(tree.tokens[:, 0])
    path = [current]
    # Siblings are distinct, so at most one child matches. Once none does, `current` stays and none does again.
    for _ in range(num_steps):
        is_match = (tree.parents == current[:, None]) & (tree.tokens == target.gather(1, current[:, None]))
        is_match &= nodes > 0  # the root is its own parent, not its own child
        child = torch.where(is_match, nodes, -1).amax(-1)
        path.append(child)
        current = torch.where(child >= 0, child, current)
    bonus = target.gather(1, current[:, None])[:, 0]
    return _verified(torch.stack(path, dim=1), bonus, tree, best.isfinite())


def verify_tree(probs: Tensor, tree: Tree, num_steps: int, uniforms: Tensor) -> VerifyOutput:
    """Sample from the target while walking down the tree; the proposals are point masses (they were not drawn).

    At a node with children x1, x2, …, x1 is accepted with p(x1), x2 with p(x2) / (1 - p(x1)), and so on; if all are
    rejected, the bonus token comes from p without them. So the emitted token has law p, whatever the children are.

    probs: [bs, D, V], float, the target's law after each node (`sampling.process_logits`); one-hot rows give the
    greedy walk exactly. uniforms: [bs, D], float64, in [0, 1): column i tests node i, column 0 draws the bonus.
    """
    num_nodes, vocab_size = probs.shape[1:]
    mass = probs.sum(-1, dtype=torch.float64)  # [bs, D]; takes the place of 1 in the formulas
    prob_at_parent = probs.flatten(1).gather(1, tree.parents * vocab_size + tree.tokens).double()  # [bs, D]

    nodes = torch.arange(num_nodes, device=probs.device)
    current = torch.zeros_like(tree.tokens[:, 0])
    path = [current]
    # Once no child is accepted, `current` stays, and its children are rejected again.
    for _ in range(num_steps):
        is_child = (tree.parents == current[:, None]) & (nodes > 0)  # the root is its own parent
        prob = torch.where(is_child, prob_at_parent, 0)
        before = prob.cumsum(1) - prob  # of the siblings tried before each child
        residual = (_row(mass, current)[:, None] - before).clamp(min=0)  # rounding: probability 0 is never accepted
        is_accepted = is_child & (uniforms * residual < prob)
        child = torch.where(is_accepted, nodes, num_nodes).amin(1)
        is_found = child < num_nodes
        path.append(torch.where(is_found, child, -1))
        current = torch.where(is_found, child, current)

    law = _row(probs, current)
    is_rejected = (tree.parents == current[:, None]) & (nodes > 0)
    num_rejections = torch.zeros_like(law, dtype=torch.int64).scatter_add(1, tree.tokens, is_rejected.long())
    bonus = _sample_residual(law.masked_fill(num_rejections > 0, 0), law, uniforms[:, 0])
    return _verified(torch.stack(path, dim=1), bonus, tree, _is_law(mass))


def verify_spine(probs: Tensor, draft_probs: Tensor, tree: Tree, num_steps: int, uniforms: Tensor) -> VerifyOutput:
    """Sample from the target while walking down a tree with a `spine`, whose other nodes are point masses.

    The drawn child of a node of the spine is accepted as in `verify_chain`; at the first one that is not, its siblings
    are tried on (p - q)+ as in `verify_tree`, which goes on from there. probs, uniforms: as there; draft_probs: [bs, S,
    V], float, S >= num_steps, the laws that the spine was drawn from. Where q is not finite, the token is a point mass.
    """
    return verify_tree(_left_by_spine(probs, draft_probs, tree, num_steps, uniforms), tree, num_steps, uniforms)


def verify_chain(probs: Tensor, draft_probs: Tensor, tree: Tree, uniforms: Tensor) -> VerifyOutput:
    """Sample from the target by rejection (Leviathan et al. 2023, Chen et al. 2023); the drafts were drawn from q.

    Draft x is accepted with min(1, p(x) / q(x)); the first rejection draws from (p - q)+, renormalised; if all are
    accepted the bonus comes from p at the last node.

    probs: [bs, S+1, V], float, the target's law after each node. draft_probs: [bs, S, V], float, the law that each
    draft was drawn from. tree: from `tree.chain`. uniforms: [bs, S+1], float64, as in `verify_tree`. One-hot laws are
    exact. Where q is not finite its draft is rejected and the token drawn from p: a broken draft costs speed only.
    """
    drafts = tree.tokens[:, 1:, None]
    # A law of zeros after the last draft: nothing was proposed there, and (p - 0)+ is the bonus token's p.
    draft_probs = torch.nn.functional.pad(draft_probs, (0, 0, 0, 1))
    mass, draft_mass = probs.sum(-1, dtype=torch.float64), draft_probs.sum(-1, dtype=torch.float64)  # [bs, S+1]
    is_proposal = _is_law(draft_mass)

    p = probs[:, :-1].gather(-1, drafts)[..., 0] / mass[:, :-1]
    q = draft_probs[:, :-1].gather(-1, drafts)[..., 0] / draft_mass[:, :-1]
    is_accepted = is_proposal[:, :-1] & (uniforms[:, 1:] * q < p)
    last = is_accepted.long().cumprod(1).sum(1)  # [bs], 0..S, the deepest accepted node

    law = _row(probs, last) / _row(mass, last)[:, None]
    draft_law = _row(draft_probs, last) / _row(draft_mass, last)[:, None]
    draft_law = torch.where(_row(is_proposal, last)[:, None], draft_law, 0)
    bonus = _sample_residual((law - draft_law).clamp(min=0), law, uniforms[:, 0])
    nodes = torch.arange(probs.shape[1], device=probs.device)
    return _verified(torch.where(nodes <= last[:, None], nodes, -1), bonus, tree, _is_law(mass))


def trim(verified: VerifyOutput, stop_ids: Tensor, remaining: Tensor) -> tuple[VerifyOutput, Tensor]:
    """Cut after the first stop token (which is emitted) and at the number of tokens a request may still emit.

    stop_ids: [n_stop] or [bs, n_stop], int64, -1 is padding. remaining: [bs], int64; at most 0 emits nothing.
    Returns the shortened output and finished [bs], bool: a stop token came, `remaining` is used up, or the row is
    invalid; a row that is cut is not invalid any more.
    """
    columns = torch.arange(verified.tokens.shape[1], device=verified.tokens.device)
    # The padding of tokens equals that of stop_ids, but only past accept_lens, where a stop changes nothing.
    is_stop = (verified.tokens[..., None] == (stop_ids if stop_ids.dim() == 1 else stop_ids[:, None])).any(-1)
    num_until_stop = torch.where(is_stop, columns + 1, columns.numel() + 1).amin(1)

    accept_lens = verified.accept_lens.minimum(num_until_stop).minimum(remaining.clamp(min=0))
    finished = (num_until_stop <= accept_lens) | (remaining <= accept_lens) | verified.invalid
    is_past = columns >= accept_lens[:, None]
    trimmed = verified._replace(
        accept_index=verified.accept_index.masked_fill(is_past, -1),
        accept_lens=accept_lens,
        tokens=verified.tokens.masked_fill(is_past, -1),
        invalid=verified.invalid & (accept_lens == verified.accept_lens),
    )
    return trimmed, finished


def _left_by_spine(probs: Tensor, draft_probs: Tensor, tree: Tree, num_steps: int, uniforms: Tensor) -> Tensor:
    """Return laws [bs, D, V] with which `verify_tree` emits what the target would, from a tree with a spine.

    The law after a node of the spine becomes certainty where its drawn child is accepted, and (p - q)+ at the first
    node where it is not.
    """
    depths = torch.arange(num_steps + 1, device=probs.device)
    nodes = (tree.depths.unsqueeze(1) == depths.unsqueeze(1)).long().argmax(2)  # [bs, S+1]: the first of every depth
    above, below = nodes[:, :-1], nodes[:, 1:]
    drawn = tree.tokens.gather(1, below).unsqueeze(2)
    wide = above.unsqueeze(2).expand(-1, -1, probs.shape[2])
    law, draft_law = probs.gather(1, wide), draft_probs[:, :num_steps]
    p, q = law / law.sum(-1, keepdim=True, dtype=torch.float64), draft_law.double()
    mass = q.sum(-1, keepdim=True)
    is_law = _is_law(mass)
    q = torch.where(is_law, q / mass, 0)
    is_accepted = uniforms.gather(1, below).unsqueeze(2) * q.gather(2, drawn) < p.gather(2, drawn)
    num_accepted = (is_accepted & is_law).long().cumprod(1).sum(1, keepdim=True)  # [bs, 1, 1]
    residual = (p - q).clamp(min=0).to(law.dtype)
    residual = torch.where((residual > 0).any(-1, keepdim=True), residual, law)  # without mass: rounding
    certain = torch.zeros_like(law).scatter(2, drawn, 1.0)
    step = depths[:-1, None]
    left = torch.where(step < num_accepted, certain, torch.where(step == num_accepted, residual, law))
    return probs.scatter(1, wide, left)


def _verified(accept_index: Tensor, bonus: Tensor, tree: Tree, is_usable: Tensor) -> VerifyOutput:
    """Assemble the output of a path, which ends at the first node whose law cannot be used, with token 0.

    accept_index: [bs, S+1], int64, -1 past the path; bonus: [bs], int64; is_usable: [bs, D], bool, by node.
    The nodes of the path are the ones whose law was used.
    """
    is_on_path = accept_index >= 0
    is_broken = is_on_path & ~is_usable.gather(1, accept_index.clamp(min=0))
    invalid, num_broken = is_broken.any(1), is_broken.long().cumsum(1)
    columns = torch.arange(accept_index.shape[1], device=accept_index.device)
    accept_index = torch.where(num_broken > is_broken, -1, accept_index)
    accept_lens = (accept_index >= 0).sum(1)

    path_tokens = tree.tokens.gather(1, accept_index.clamp(min=0))
    drafts = path_tokens.roll(-1, dims=1)  # column r is the draft of depth r + 1; the last column is never a draft's
    last = accept_lens[:, None] - 1
    tokens = torch.where(columns < last, drafts, -1)
    tokens = torch.where(columns == last, bonus.masked_fill(invalid, 0)[:, None], tokens)
    return VerifyOutput(accept_index, accept_lens, tokens, invalid)


def _sample_residual(residual: Tensor, law: Tensor, u: Tensor) -> Tensor:
    """Sample from the residual, or from the law if that has no mass. residual, law: [bs, V]; u: [bs]; [bs], int64.

    A residual without mass means a rejection that has probability 0 and came from rounding: any token of the law is
    acceptable, and one drawn from it has at least a positive probability.
    """
    has_mass = (residual > 0).any(-1, keepdim=True)
    return sample(torch.where(has_mass, residual, law), u)


def _is_law(mass: Tensor) -> Tensor:
    """Return whether `mass`, a total of non-negative numbers, is finite, exactly when all of them are, and positive."""
    return mass.isfinite() & (mass > 0)


def _row(values: Tensor, index: Tensor) -> Tensor:
    """Return values[b, index[b]], [bs, ...]; values: [bs, n, ...]; index: [bs], int64."""
    return values[torch.arange(values.shape[0], device=values.device), index]


def impose_acceptance(verified: VerifyOutput, tree: Tree, rates: Tensor, u: Tensor) -> VerifyOutput:
    """Return `verified` with another path: the root and the tree's last nodes, the j-th kept with chance rates[j-1]:
    so untrained heads can be timed. The text is meaningless then; all other work of a round is done as usual.

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
