"""Prompts with images as a target's layers take them: embeddings in place of ids. Knows no models."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch


class EmbeddedChunk(NamedTuple):
    """N tokens of a prefill. embeds [N, h]; the others, of all N tokens, as `EmbeddedPrompt` has them."""

    embeds: torch.Tensor
    positions: torch.Tensor | None
    limits: torch.Tensor | None
    is_visual: torch.Tensor | None
    deepstack: Sequence[torch.Tensor]


@dataclass(eq=False)
class EmbeddedPrompt:
    """A prompt of T tokens with images, after its model's vision tower.

    embeds [T, h]. positions [n, T] int64: rotary positions, n a token (mrope); None: a token's own. rope_delta: what is
    added to those of all tokens that follow the prompt. limits [T] int64: the last position that each token sees; None:
    its own. deepstack: [V, h] for each of the first layers, added to its output for the V tokens of is_visual [T].
    keys [T] int64 on the host: everything that K/V depends on besides ids, 0 for text; empty if not needed.
    cuts [T+1] bool on the host: where a piece of its prefill may end; None: anywhere.
    """

    embeds: torch.Tensor
    positions: torch.Tensor | None = None
    rope_delta: int = 0
    limits: torch.Tensor | None = None
    is_visual: torch.Tensor | None = None
    deepstack: Sequence[torch.Tensor] = ()
    keys: np.ndarray = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    cuts: np.ndarray | None = None

    def num_whole(self, start: int, most: int, is_first: bool) -> int:
        """Return the length of a piece from `start` on, at most `most` tokens, that cuts no image whose tokens see each
        other; if there is none, 0, or with `is_first` the length up to the end of the image."""
        if self.cuts is None or start + most >= len(self.cuts):
            return most
        ends = 1 + np.flatnonzero(self.cuts[start + 1 :])
        fitting = ends[ends <= most]
        return int(fitting[-1]) if len(fitting) else int(ends[0]) * is_first

    @property
    def most_seen_ahead(self) -> int:
        """Tokens of the longest piece that cannot be cut."""
        return 1 if self.cuts is None else int(np.diff(np.flatnonzero(self.cuts)).max())


Embed = Callable[[torch.Tensor], torch.Tensor]  # ids [n] int64 -> [n, h]


def pack_embedded(
    pieces: Sequence[tuple[EmbeddedPrompt, int, int]], ids: torch.Tensor, own: torch.Tensor, embed: Embed
) -> EmbeddedChunk:
    """Pack `pieces`, each tokens [start, end) of a prompt and, past its end, of the text that was emitted after it.

    ids, own [N] int64: ids and positions of all of them.
    """
    ends = np.cumsum([end - start for _, start, end in pieces]).tolist()
    parts = [
        _part(prompt, start, ids[at - end + start : at], own[at - end + start : at], embed)
        for (prompt, start, end), at in zip(pieces, ends, strict=True)
    ]
    prompts = [prompt for prompt, _, _ in pieces]
    num_deep = max(len(prompt.deepstack) for prompt in prompts)
    deepstack = [torch.cat([p.deepstack[i] for p in parts if len(p.deepstack)]) for i in range(num_deep)]
    return EmbeddedChunk(
        torch.cat([p.embeds for p in parts]),
        _joined([p.positions for p in parts], own, ends, 1),
        _joined([p.limits for p in parts], own, ends, 0),
        _joined([p.is_visual for p in parts], torch.zeros_like(own, dtype=torch.bool), ends, 0),
        deepstack,
    )


def _part(prompt: EmbeddedPrompt, start: int, ids: torch.Tensor, own: torch.Tensor, embed: Embed) -> EmbeddedChunk:
    """Return the tokens `ids` of a prompt, which stand at `own`; from its T tokens on they are text."""
    part = slice(start, min(start + len(ids), len(prompt.embeds)))
    num = max(part.stop - start, 0)
    embeds, after = prompt.embeds[part], own[num:]
    if num < len(ids):
        embeds = torch.cat([embeds, embed(ids[num:])])
    positions, limits, is_visual = prompt.positions, prompt.limits, prompt.is_visual
    if positions is not None:
        moved = (after + prompt.rope_delta).expand(len(positions), -1)
        positions = torch.cat([positions[:, part], moved], 1)
    if limits is not None:
        limits = torch.cat([limits[part], after])
    if is_visual is None:
        return EmbeddedChunk(embeds, positions, limits, None, ())
    before = int(is_visual[: part.start].sum())
    there = slice(before, before + int(is_visual[part].sum()))
    is_visual = torch.cat([is_visual[part], torch.zeros_like(after, dtype=torch.bool)])
    return EmbeddedChunk(embeds, positions, limits, is_visual, [features[there] for features in prompt.deepstack])


def _joined(
    parts: Sequence[torch.Tensor | None], without: torch.Tensor, ends: Sequence[int], dim: int
) -> torch.Tensor | None:
    """Return `parts` side by side, `without` [N] in the places of those that are None; None if all are."""
    first = next((part for part in parts if part is not None), None)
    if first is None:
        return None
    begins = [0, *ends[:-1]]
    rest = [without[begin:end].expand(*first.shape[:-1], -1) for begin, end in zip(begins, ends, strict=True)]
    return torch.cat([other if part is None else part for part, other in zip(parts, rest, strict=True)], dim)
