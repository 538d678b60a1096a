"""Device functions of verification walks, for one request: steps on point masses and drawn tokens, and the output.

A path has the node of each depth c, -1 past its end; n are a request's nodes.
"""

import torch
import triton
import triton.language as tl

from specdec.backends.triton.launch.sizes import next_power_of_2

# accept_index, accept_lens, tokens, invalid
VerifyOutput = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


@triton.jit
def _at(values, index, n):
    """Return values[index] for vectors in registers: one value per entry of `index`, 0 where the entry is not in n."""
    return tl.sum(tl.where(index[:, None] == n[None, :], values[None, :], 0), 1)


@triton.jit
def store_output(
    path, tokens, is_usable, n, c, request, accept_index, accept_lens, out_tokens, out_invalid, W: tl.constexpr
):
    """Write a path (node at depth c, -1 past it) up to the first unusable law on it; the bonus comes later.

    Returns accept_len and whether the row is invalid.
    """
    is_on_path = (path >= 0) & (c < W)
    usable = _at(is_usable.to(tl.int32), tl.maximum(path, 0), n)
    end = tl.min(tl.where(is_on_path & (usable == 0), c, W))
    invalid = end < W
    path = tl.where((c > end) | (c >= W), -1, path)
    accept_len = tl.sum((path >= 0).to(tl.int32))
    next_node = _at(path, c + 1, c)
    drafts = _at(tokens, tl.maximum(next_node, 0), n)
    at = request * W + c
    tl.store(accept_index + at, path.to(tl.int64), mask=c < W)
    tl.store(out_tokens + at, tl.where(c < accept_len - 1, drafts, -1), mask=c < W)
    tl.store(accept_lens + request, accept_len.to(tl.int64))
    tl.store(out_invalid + request, invalid)
    return accept_len, invalid


@triton.jit
def is_law(mass):
    return (mass > 0) & (mass < float("inf"))


@triton.jit
def walk_down(
    path, current, first_step, at_parent, parent, total, u, is_draft, n, c, W: tl.constexpr, BLOCK_D: tl.constexpr
):
    """Continue a walk from node `current` by steps first_step.. on point masses; return its path and last node.

    at_parent: the mass of each node's token in its parent's law; total: that of each node's law; u: its random number.
    """
    # Once no child is accepted, `current` stays, and its children are rejected again.
    for step in range(first_step, W):
        is_child = is_draft & (parent == current)
        prob = tl.where(is_child, at_parent, 0.0)
        before = tl.cumsum(prob) - prob  # of the siblings tried before each child
        own_mass = tl.sum(tl.where(n == current, total, 0.0))
        residual = tl.maximum(own_mass - before, 0.0)  # rounding: probability 0 is never accepted
        child = tl.min(tl.where(is_child & (u * residual < prob), n, BLOCK_D))
        path = tl.where((c == step) & (child < BLOCK_D), child, path)
        current = tl.where(child < BLOCK_D, child, current)
    return path, current


@triton.jit
def exclude(excluded, token, is_rejected):
    """Write the tokens of the rejected nodes to a request's `excluded`; returns their number."""
    rejected = is_rejected.to(tl.int32)
    tl.store(excluded + tl.cumsum(rejected) - 1, token, mask=is_rejected)
    return tl.sum(rejected)


@triton.jit
def last_drawn(p, q, q_total, u, c, W: tl.constexpr):
    """Return the number of leading drawn tokens that are accepted, and the factor of the draft's law after them.

    For the token at depth c, 1..W-1: p, its probability in the target's law; q, its mass in the draft's, whose total is
    q_total.
    """
    is_draft = (c > 0) & (c < W)
    is_accepted = is_draft & is_law(q_total) & (u * (q / tl.where(is_draft, q_total, 1.0)) < p)
    last = tl.min(tl.where(is_accepted | (c == 0), W, tl.where(is_draft, c, W))) - 1
    next_mass = tl.sum(tl.where(c == last + 1, q_total, 0.0))  # 0 after the last draft, where nothing was proposed
    return last, tl.where(is_law(next_mass), 1.0 / tl.where(is_law(next_mass), next_mass, 1.0), 0.0)


def empty_notes(tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return uninitialised rows and scales for `note_draw`."""
    bs, device = tokens.shape[0], tokens.device
    return torch.empty(bs, 3, dtype=torch.int64, device=device), torch.empty(bs, 3, dtype=torch.float64, device=device)


def empty_output(tokens: torch.Tensor, num_steps: int) -> tuple[VerifyOutput, dict[str, int]]:
    (bs, num_nodes), width, device = tokens.shape, num_steps + 1, tokens.device

    def empty(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.int64, device=device)

    verified = (empty(bs, width), empty(bs), empty(bs, width), torch.empty(bs, dtype=torch.bool, device=device))
    blocks = {"BLOCK_D": next_power_of_2(num_nodes), "BLOCK_W": next_power_of_2(width)}
    return verified, {"D": num_nodes, "W": width, **blocks}
