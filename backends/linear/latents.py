"""`specdec::latent_queries`, `latent_values`: what lets attention over latents (MLA, arXiv:2405.04434) expand no key.

A key's first columns and its value are products of one latent with a matrix of each head. These products are taken of
the queries in place of the keys, and of what is attended in place of the values. K is summed in order and never split,
so a row's bits are its own. Kernels of ours run them on CUDA in 16 bits, their twins elsewhere.
"""

import torch

from specdec.backends.library import op


@op(
    "latent_queries(Tensor q, Tensor weight, int num_rotary) -> Tensor",
    lambda q, weight, num_rotary: q.new_empty(*q.shape[:2], weight.shape[1] + num_rotary),
    "linear.latents",
)
def latent_queries(q: torch.Tensor, weight: torch.Tensor, num_rotary: int) -> torch.Tensor:
    """Return queries of latents [T, H, R + num_rotary]: of each head the product of its columns before the last
    num_rotary, which stay as they are.

    q: [T, H, N + num_rotary], its last dim dense. weight: [H * (N + V), R], dense, of q's dtype: of each head what
    expands latents to N columns of keys, then to V of values.
    """
    num_keys = q.shape[2] - num_rotary
    keys = weight.view(q.shape[1], -1, weight.shape[1])[:, :num_keys]
    product = torch.bmm(q[..., :num_keys].transpose(0, 1), keys).transpose(0, 1)
    return torch.cat([product, q[..., num_keys:]], -1)


@op(
    "latent_values(Tensor x, Tensor weight, int num_keys) -> Tensor",
    lambda x, weight, num_keys: x.new_empty(*x.shape[:2], weight.shape[0] // x.shape[1] - num_keys),
    "linear.latents",
)
def latent_values(x: torch.Tensor, weight: torch.Tensor, num_keys: int) -> torch.Tensor:
    """Return values [T, H, V] of weighted latents x [T, H, R]; weight: see `latent_queries`, num_keys: its N."""
    values = weight.view(x.shape[1], -1, weight.shape[1])[:, num_keys:]
    return torch.bmm(x.transpose(0, 1), values.transpose(1, 2)).transpose(0, 1).contiguous()
