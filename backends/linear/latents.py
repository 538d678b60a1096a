"""`specdec::latent_queries`, `latent_values`: absorbed projections of MLA (arXiv:2405.04434): no key is expanded.

In each head, a matrix maps a latent to the non-rotary columns of a key, and another to the value. These ops apply the
first to queries in place of keys, and the second to attention outputs in place of values. K is summed in order and
never split, so a row's bits do not depend on other rows. CUDA tensors in 16 bits run our kernels, others the twins.
"""

import torch

from specdec.backends.library import op


@op(
    "latent_queries(Tensor q, Tensor weight, int num_rotary) -> Tensor",
    lambda q, weight, num_rotary: q.new_empty(*q.shape[:2], weight.shape[1] + num_rotary),
    "linear.latents",
)
def latent_queries(q: torch.Tensor, weight: torch.Tensor, num_rotary: int) -> torch.Tensor:
    """Return queries [T, H, R + num_rotary] that attend to latents: the first N columns of each head are mapped to R.

    The last num_rotary columns stay as they are. q: [T, H, N + num_rotary], its last dim contiguous. weight:
    [H * (N + V), R] (kv_b_proj), contiguous, of q's dtype: for each head N rows that expand a latent to a key, then V
    rows that expand it to a value.
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
    """Return attention outputs [T, H, V] from weighted sums of latents x [T, H, R]. weight: see `latent_queries`, of
    x's dtype; num_keys: its N."""
    values = weight.view(x.shape[1], -1, weight.shape[1])[:, num_keys:]
    return torch.bmm(x.transpose(0, 1), values.transpose(1, 2)).transpose(0, 1).contiguous()
