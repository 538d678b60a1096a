"""Trains block heads on a whole text in one pass: a block after every token (DFlash, arXiv 2602.06036).

Column i has the block whose root is token i+1. Its row j is at position i+1+j; it attends to the target's features up
to token i and to the rows of its own block, as a block does in a round. So draft j of the column imitates the target's
prediction of token i+2+j, like step j of `ttt.unroll`.
"""

from collections.abc import Sequence

import torch

from specdec.backends.rope import Rope, rotate
from specdec.core.draft.head import BlockDraftHead
from specdec.tools.train.ttt import prefix_and_diagonal


def block_states(
    head: BlockDraftHead, embed: torch.nn.Module, tokens: torch.Tensor, features: torch.Tensor, num_steps: int
) -> Sequence[torch.Tensor]:
    """Return the states [B, T, h_d] that score drafts 0..num_steps-1, in order; arguments as in `ttt.unroll`."""
    (batch, length), device = features.shape[:2], tokens.device
    first = 0 if head.predicts_next else 1
    num_rows = num_steps + first
    with torch.no_grad():
        embed = head.embed_tokens or embed
        roots = embed(tokens[:, 1 : 1 + length]).to(features.dtype)
        mask = embed(torch.tensor(head.mask_token_id, device=device)).to(features.dtype)
    masked = (mask if head.mask_embedding is None else head.mask_embedding).expand(batch, num_rows - 1, length, -1)
    embeds = torch.cat([roots.unsqueeze(1), masked], 1)  # [B, rows, T, h_d]
    columns = torch.arange(length, device=device)
    rows = torch.arange(num_rows, device=device).unsqueeze(1)
    attend = _BlockAttention(head, features, head.rope(columns))
    states = head(embeds, head.rope(1 + rows + columns), attend)
    return states[:, first:].unbind(1)


class _BlockAttention:
    """The `attend` callable of one pass: q, k and v [B, rows, T, H, d], beside the keys and values of the context."""

    def __init__(self, head: BlockDraftHead, features: torch.Tensor, rope: Rope):
        self._layers, self._causal = head.attention_layers, head.causal
        context = head.keys_values(head.fuse(features))
        self._context = [(rotate(k, rope).transpose(1, 2), v.transpose(1, 2)) for k, v in context]

    def __call__(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rope: Rope | None, layer: int
    ) -> torch.Tensor:
        if rope is not None:
            q, k = rotate(q, rope), rotate(k, rope)
        own_k, own_v = (list(t.transpose(2, 3).unbind(1)) for t in (k, v))  # [B, Hkv, T, d] each
        context_k, context_v = self._context[layer]
        out = []
        for row in range(q.shape[1]):
            seen = row + 1 if self._causal else q.shape[1]
            keys, values = [context_k, *own_k[:seen]], [context_v, *own_v[:seen]]
            out.append(prefix_and_diagonal(q[:, row], keys, values, self._layers[layer]))
        return torch.stack(out, 1)
