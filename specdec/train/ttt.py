"""Training-time test (EAGLE-3): the draft is unrolled over its own states while the tokens are teacher-forced.

Column i starts a draft chain after token i. Its step j takes the embedding of token i+1+j beside the state of step
j-1 (step 0: the target's feature g_i), stands at rotary position i+j, and imitates what the target says of token
i+2+j, its logits at row i+1+j. Step 0 is plain causal over true features; later steps see step 0's keys up to their
own column and their own column's earlier steps: what a draft chain from row i sees in inference.
"""

from collections import defaultdict
from collections.abc import Iterator

import torch
import torch.nn.functional as F

from specdec.backends.rope import Rope, rotate
from specdec.models.draft_head import DraftHead


class TTTAttention:
    """The attend closure of one unrolling: called once a step, in order; remembers the steps' keys and values."""

    def __init__(self) -> None:
        self._keys: dict[int, list[torch.Tensor]] = defaultdict(list)  # by layer
        self._values: dict[int, list[torch.Tensor]] = defaultdict(list)

    def __call__(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rope: Rope | None, layer: int
    ) -> torch.Tensor:
        """q [B, T, Hq, d], k/v [B, T, Hkv, d] -> [B, T, Hq, d]; see `Attend`."""
        if rope is not None:
            q, k = rotate(q, rope), rotate(k, rope)
        keys, values = self._keys[layer], self._values[layer]
        keys.append(k.transpose(1, 2))
        values.append(v.transpose(1, 2))
        if len(keys) > 1:
            return _prefix_and_diagonal(q, keys, values)
        heads_first = (q.transpose(1, 2), keys[0], values[0])
        return F.scaled_dot_product_attention(*heads_first, is_causal=True, enable_gqa=True).transpose(1, 2)


def _prefix_and_diagonal(q: torch.Tensor, keys: list[torch.Tensor], values: list[torch.Tensor]) -> torch.Tensor:
    """q [B, T, Hq, d] over keys[0] causally and over its own column of keys[1:]; keys, values: [B, Hkv, T, d] each.

    Query heads of one KV head are laid side by side as further queries, so K/V are never repeated.
    """
    batch, length, _, dim = q.shape
    num_kv_heads = keys[0].shape[1]
    grouped = q.view(batch, length, num_kv_heads, -1, dim).permute(0, 2, 3, 1, 4) * dim**-0.5  # [B, Hkv, G, T, d]
    prefix = (grouped.flatten(2, 3) @ keys[0].transpose(2, 3)).unflatten(2, (-1, length))  # [B, Hkv, G, T, T]
    hidden = torch.ones(length, length, dtype=torch.bool, device=q.device).triu(1)
    prefix = prefix.float().masked_fill(hidden, float("-inf"))
    diagonal = [(grouped * k.unsqueeze(2)).sum(-1, dtype=torch.float32) for k in keys[1:]]  # [B, Hkv, G, T] each
    weights = torch.cat([prefix, torch.stack(diagonal, -1)], -1).softmax(-1).to(q.dtype)
    out = (weights[..., :length].flatten(2, 3) @ values[0]).unflatten(2, (-1, length))
    for j, v in enumerate(values[1:]):
        out = out + weights[..., length + j, None] * v.unsqueeze(2)
    return out.permute(0, 3, 1, 2, 4).flatten(2, 3)


def unroll(
    head: DraftHead, embed: torch.nn.Module, tokens: torch.Tensor, aux: torch.Tensor, num_steps: int
) -> Iterator[torch.Tensor]:
    """The recycled (pre-norm) state [B, T, h_d] of each of `num_steps` steps, one after the other.

    embed: the target's, frozen. tokens [B, >= T + num_steps] int64, right-padded. aux [B, T, 3*h]: target features.
    """
    batch, length = aux.shape[:2]
    if tokens.shape[1] < length + num_steps:
        raise ValueError(
            f"tokens of width {tokens.shape[1]}: {num_steps} steps over {length} columns look {num_steps} tokens "
            f"ahead; pad to {length + num_steps}"
        )
    with torch.no_grad():
        embeds = embed(tokens).to(aux.dtype)
    attend = TTTAttention()
    hidden = head.fuse(aux)
    positions = torch.arange(length, device=tokens.device).expand(batch, -1)
    for j in range(num_steps):
        hidden = head(embeds[:, 1 + j : 1 + j + length], hidden, head.rope(positions + j), attend)
        yield hidden
