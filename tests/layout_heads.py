"""Heads loaded for tiny targets and run as a worker runs them, compared with a reference that reads only the file."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import torch

from specdec.backends.rope import Rope, rotate
from specdec.core.draft.head import DraftHead
from specdec.reach.heads.load import check_head, load_head
from specdec.reach.targets.shape import TargetShape
from tests import layout_models as lm

CPU = torch.device("cpu")
ROWS, STEPS = 7, 3
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}


@cache
def target(family: str = "llama") -> Any:
    return lm.target_of(family)


def shape_of(model: Any) -> TargetShape:
    return TargetShape(
        hidden_size=model.config.hidden_size,
        vocab_size=model.config.vocab_size,
        num_layers=model.config.num_hidden_layers,
        embed_tokens=model.get_input_embeddings(),
        lm_head=model.get_output_embeddings(),
        model=model,
    )


def load(folder: Path, family: str = "llama", algo: str | None = None, dtype: torch.dtype = torch.float32) -> Any:
    shape = shape_of(target(family))
    head = load_head(folder, shape, dtype, CPU, algo)
    check_head(head, shape, dtype, CPU)
    assert not any(p.is_meta or p.requires_grad for p in head.parameters())
    return head


class Played:
    """A head run as a worker runs it: appends rows, attends over the keys and values of all rows so far."""

    def __init__(self, head: DraftHead):
        self.head, self.length, self.specs = head, 0, head.attention_layers
        self.keys: dict[int, torch.Tensor] = {}
        self.values: dict[int, torch.Tensor] = {}

    def append(self, embeds: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        positions = torch.arange(self.length, self.length + embeds.shape[0])
        self.length += embeds.shape[0]
        return self.head(embeds, hidden, self.head.rope(positions), self.attend)

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rope: Rope | None, layer: int) -> torch.Tensor:
        if rope is not None:
            q, k = rotate(q, rope), rotate(k, rope)
        self.keys[layer] = torch.cat([self.keys[layer], k]) if layer in self.keys else k
        self.values[layer] = torch.cat([self.values[layer], v]) if layer in self.values else v
        spec = self.specs[layer]
        keys, values = (
            x[layer].repeat_interleave(spec.num_heads // spec.num_kv_heads, 1) for x in (self.keys, self.values)
        )
        scores = torch.einsum("qhd,khd->hqk", q, keys) * spec.scaling
        behind = torch.arange(self.length - q.shape[0], self.length)[:, None] - torch.arange(self.length)
        hidden = (behind < 0) | (behind >= (spec.window or self.length))
        return torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, float("-inf")).softmax(-1), values)


@torch.no_grad()
def agree(head: DraftHead, reference: lm.Reference, features: torch.Tensor, fused: torch.Tensor, model: Any) -> None:
    """Check recycled states and logits of a prefill and of recursive steps against the reference."""
    torch.manual_seed(1)
    embedding = head.embed_tokens if head.embed_tokens is not None else model.get_input_embeddings()
    embeds = embedding(torch.randint(3, lm.VOCAB, (ROWS + STEPS,)))
    played = Played(head)
    states = played.append(embeds[:ROWS], head.fuse(features))
    rows = fused
    for step in range(STEPS + 1):
        expected, logits = reference(embeds[: ROWS + step], rows)
        torch.testing.assert_close(states, expected[-len(states) :], atol=2e-5, rtol=2e-5)
        got = head.project(head.normed(states), model.get_output_embeddings())
        torch.testing.assert_close(got, logits[-len(states) :], atol=5e-5, rtol=5e-5)
        if step < STEPS:
            rows = torch.cat([rows, expected[-1:]])
            states = played.append(embeds[ROWS + step : ROWS + step + 1], states[-1:])


def last_states(model: Any) -> torch.Tensor:
    return lm.noise(ROWS, model.config.hidden_size, seed=77, scale=1.0)


def aux_states(num_aux: int = 3) -> torch.Tensor:
    return lm.noise(ROWS, num_aux * lm.HIDDEN, seed=78, scale=1.0)


DEEPSEEK_NORMS = ("enorm", "hnorm", "eh_proj", "shared_head.norm")
MIMO_NORMS = ("token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm")


def combine_tensors(names: tuple[str, str, str, str], *, around: float = 1.0) -> lm.Tensors:
    """Return the norms and the projection before and after the decoder layer."""
    enorm, hnorm, projection, out_norm = names
    norms = {f"{n}.weight": lm.gain(lm.HIDDEN, 80 + i) - 1 + around for i, n in enumerate((enorm, hnorm, out_norm))}
    return {**norms, f"{projection}.weight": lm.noise(lm.HIDDEN, 2 * lm.HIDDEN, seed=85)}


def under(prefix: str, tensors: lm.Tensors) -> lm.Tensors:
    return {f"{prefix}.{name}": tensor for name, tensor in tensors.items()}
