"""`specdec::joined_inputs`: the input of a draft head's first layer, normed embeddings and states, in one launch."""

import torch
import torch.nn.functional as F

from specdec.backends.library import KERNEL_DTYPES, op
from specdec.backends.linear import NORM_ARGUMENTS, rms_norm


@op(
    "joined_inputs(Tensor ids, Tensor embedding, Tensor states, Tensor positions, Tensor tables, Tensor state_weight,"
    f" {NORM_ARGUMENTS}) -> (Tensor, Tensor)",
    lambda ids, _, states, positions, tables, *rest: (
        states.new_empty(states.shape[0], 2 * states.shape[1]),
        tables.new_empty(positions.shape[0], *tables.shape[1:]),
    ),
    "linear.inputs",
    lambda ids, _, states, *rest: states.dtype in KERNEL_DTYPES,
)
def joined_inputs(
    ids: torch.Tensor,
    embedding: torch.Tensor,
    states: torch.Tensor,
    positions: torch.Tensor,
    tables: torch.Tensor,
    state_weight: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    offset: float,
    is_late: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the RMS norms of token embeddings and of states, concatenated [T, 2*H], and rope tables [T, 2, R].

    ids, positions: [T] int64; ids below 0 count as 0. embedding: [V, H]; states: [T, H]; weight, state_weight: [H], of
    the two norms, see `rms_norm`; all of one dtype. tables: [N, 2, R], a rope's cosines and sines by position.
    """
    pairs = (F.embedding(ids.clamp(min=0), embedding), weight), (states, state_weight)
    return torch.cat([rms_norm.twin(x, w, eps, offset, is_late) for x, w in pairs], -1), tables[positions]
