"""Training-time test (EAGLE-3; also HASS, FastMTP): the draft unrolled over its own states, on forced tokens.

Column i starts a draft chain after token i. Its step j takes the embedding of token i+1+j and the state of step j-1
(step 0: the target's feature g_i), is at rotary position i+j, and imitates the target's prediction of token i+2+j, its
logits at row i+1+j. Step 0 is plain causal over true features; later steps attend to step 0's keys up to their own
column and to their own column's earlier steps: what a draft chain from row i attends to in inference.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F

from specdec.backends import LayerSpec
from specdec.backends.rope import Rope, rotate
from specdec.core.draft.head import RecyclingHead


class TTTAttention:
    """The `attend` callable of one `unroll`: called once per step and layer, in order; keeps each step's K and V.
    layers: the head's attention layers, in call order; ValueError for layers with sinks."""

    def __init__(self, layers: Sequence[LayerSpec]) -> None:
        if any(spec.has_sinks for spec in layers):
            raise ValueError("the head's attention has sinks: expected none, they cannot be trained yet")
        self._layers = layers
        self._keys: dict[int, list[torch.Tensor]] = defaultdict(list)  # by layer
        self._values: dict[int, list[torch.Tensor]] = defaultdict(list)

    def __call__(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rope: Rope | None, layer: int
    ) -> torch.Tensor:
        """q [B, T, Hq, d], k/v [B, T, Hkv, d] -> [B, T, Hq, d]; see `Attend`."""
        if rope is not None:
            q, k = rotate(q, rope), rotate(k, rope)
        keys, values, spec = self._keys[layer], self._values[layer], self._layers[layer]
        keys.append(k.transpose(1, 2))
        values.append(v.transpose(1, 2))
        if len(keys) > 1 or spec.window or spec.softcap:
            return prefix_and_diagonal(q, keys, values, spec)
        heads_first = (q.transpose(1, 2), keys[0], values[0])
        out = F.scaled_dot_product_attention(*heads_first, is_causal=True, scale=spec.scaling, enable_gqa=True)
        return out.transpose(1, 2)


def prefix_and_diagonal(
    q: torch.Tensor, keys: list[torch.Tensor], values: list[torch.Tensor], spec: LayerSpec
) -> torch.Tensor:
    """Attend with q [B, T, Hq, d] to keys[0] causally, to its own column of keys[1:]; keys, values [B, Hkv, T, d] each.

    Query heads of one KV head are laid out as further queries, so K/V are never repeated.
    """
    batch, length, _, dim = q.shape
    num_kv_heads, step = keys[0].shape[1], len(keys) - 1
    grouped = q.view(batch, length, num_kv_heads, -1, dim).permute(0, 2, 3, 1, 4) * spec.scaling  # [B, Hkv, G, T, d]
    prefix = (grouped.flatten(2, 3) @ keys[0].transpose(2, 3)).unflatten(2, (-1, length)).float()  # [B, Hkv, G, T, T]
    diagonal = [(grouped * k.unsqueeze(2)).sum(-1, dtype=torch.float32) for k in keys[1:]]  # [B, Hkv, G, T] each
    logits = torch.cat([prefix, torch.stack(diagonal, -1)], -1) if diagonal else prefix
    if spec.softcap:
        logits = spec.softcap * (logits / spec.softcap).tanh()
    weights = logits.masked_fill(_hidden(length, step, spec.window, q.device), float("-inf")).softmax(-1).to(q.dtype)
    out = (weights[..., :length].flatten(2, 3) @ values[0]).unflatten(2, (-1, length))
    for j, v in enumerate(values[1:]):
        out = out + weights[..., length + j, None] * v.unsqueeze(2)
    return out.permute(0, 3, 1, 2, 4).flatten(2, 3)


def _hidden(length: int, step: int, window: int | None, device: torch.device) -> torch.Tensor:
    """Return [T, T + step] bool: keys hidden from column i, of step 0's columns and of its own at steps 1..step.

    The query is at position i+step, step 0's column c at c, its own of step s at i+s; a window hides keys further than
    window-1 behind.
    """
    columns = torch.arange(length, device=device)
    ahead = columns - columns.unsqueeze(1)
    behind = torch.arange(step - 1, -1, -1, device=device).expand(length, -1)
    if window is None:
        return torch.cat([ahead > 0, torch.zeros_like(behind, dtype=torch.bool)], -1)
    return torch.cat([(ahead > 0) | (step - ahead >= window), behind >= window], -1)


def unroll(
    head: RecyclingHead, embed: torch.nn.Module, tokens: torch.Tensor, features: torch.Tensor, num_steps: int
) -> Iterator[torch.Tensor]:
    """Yield the recycled state [B, T, h_d] of each of `num_steps` steps, in order.

    embed: the target's frozen embedding, used unless the head has its own. tokens [B, >= T + num_steps] int64,
    right-padded, else ValueError. features [B, T, num_aux*h]: the target's. Step j runs module min(j, num_modules-1).
    """
    batch, length = features.shape[:2]
    if tokens.shape[1] < length + num_steps:
        raise ValueError(
            f"tokens of width {tokens.shape[1]}: {num_steps} steps over {length} columns look {num_steps} tokens "
            f"ahead; pad to {length + num_steps}"
        )
    with torch.no_grad():
        embeds = (head.embed_tokens or embed)(tokens).to(features.dtype)
    attend = TTTAttention(head.attention_layers)
    hidden = head.fuse(features)
    positions = torch.arange(length, device=tokens.device).expand(batch, -1)
    for j in range(num_steps):
        module = min(j, head.num_modules - 1)
        hidden = head(embeds[:, 1 + j : 1 + j + length], hidden, head.rope(positions + j), attend, module)
        yield hidden
