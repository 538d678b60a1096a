"""The interface of draft heads to their callers: the draft workers and the trainer.

A head knows neither KV pool nor tree: attention is a callable that the worker or the trainer passes in, so both run the
same arithmetic.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
from torch import nn

from specdec.backends.base import LayerSpec
from specdec.backends.rope import Rope

# attend(q, k, v, rope, layer): q [..., Hq, d], k and v [..., Hkv, d] to [..., Hq, d]; q and k come un-rotated with rope
# tables, so that a backend can rotate them where it stores them, or rotated with None. layer: index in the head.
Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, Rope | None, int], torch.Tensor]


class DraftHead(nn.Module, ABC):
    """A head that reads features of its target. `embed_tokens` and `lm_head` are None if it shares the target's.

    algo: its row in `reach.assembly.algorithms`. aux_layers: target layers whose OUTPUT it reads, low to high, or
    (LAST,). vocab_size V: the target's. num_modules: see `RecyclingHead`.
    """

    algo: str
    aux_layers: tuple[int, ...]
    num_modules: int = 1
    hidden_size: int
    target_hidden_size: int
    vocab_size: int
    embed_tokens: nn.Embedding | None
    lm_head: nn.Linear | None

    @property
    @abstractmethod
    def attention_layers(self) -> Sequence[LayerSpec]:
        """Attention specs of all layers, in call order."""

    @property
    def sinks(self) -> Sequence[torch.Tensor | None]:
        """Attention sinks [Hq] of every layer, or None."""
        return [None] * len(self.attention_layers)

    @property
    def hot_ids(self) -> torch.Tensor:
        """[dv] int64, ascending: target ids of the tokens that the head scores; by default the whole vocabulary."""
        return torch.arange(self.vocab_size, device=self.weight.device)

    @property
    def weight(self) -> torch.Tensor:
        """One of its weights, which gives dtype and device."""
        return next(self.parameters())

    def routed(self) -> AbstractContextManager[None]:
        """Return a context in which its modules run by our ops: experts, of a head that has them."""
        return nullcontext()

    @abstractmethod
    def rope(self, positions: torch.Tensor) -> Rope:
        """Return rotary tables [..., R] for positions [...] int64, in the head's dtype."""

    @property
    @abstractmethod
    def traits(self) -> dict[str, Any]:
        """Return other settings of its files that affect drafting, in plain types."""

    def fuse(self, features: torch.Tensor) -> torch.Tensor:
        """Map the target's features [..., num_aux*h] to the input [..., h_d] that takes a state's place."""
        return features

    @abstractmethod
    def normed(self, state: torch.Tensor, module: int = 0) -> torch.Tensor:
        """Return the output head's input, from the layers' states [..., h_d]."""

    def project(
        self, normed: torch.Tensor, target_head: Callable[[torch.Tensor], torch.Tensor] | None = None
    ) -> torch.Tensor:
        """Map the output head's input [N, h_d] to logits [N, dv], with its own output head or else `target_head`."""
        score: Callable[[torch.Tensor], torch.Tensor] | None = self.lm_head or target_head
        assert score is not None, f"a head of {self.algo!r} without an output head needs the target's"
        return score(normed)


class RecyclingHead(DraftHead):
    """A head of the EAGLE family, fed back its own states.

    A row takes the embedding of token p+1 and a feature of token p, and gives the state that is scored for token p+2
    and takes a feature's place. recycles_normed: whether that is the state after the out norm. num_modules: heads of
    several MTP layers run module min(j, num_modules-1) at draft step j, on states of the previous module; each has an
    attention layer of its own.
    """

    recycles_normed: bool

    @property
    def traits(self) -> dict[str, Any]:
        return {"recycles_normed": self.recycles_normed}

    def forward(
        self, embeds: torch.Tensor, hidden: torch.Tensor, rope: Rope, attend: Attend, module: int = 0
    ) -> torch.Tensor:
        """Return the recycled state [..., h_d].

        embeds [..., h_d]: of token p+1. hidden [..., h_d]: feature or state at p.
        """
        out = self.run_layers(embeds, hidden, rope, attend, module)
        return self.out_norm(module)(out) if self.recycles_normed else out

    @abstractmethod
    def run_layers(
        self, embeds: torch.Tensor, hidden: torch.Tensor, rope: Rope, attend: Attend, module: int
    ) -> torch.Tensor:
        """Run `forward` up to the out norm."""

    @abstractmethod
    def out_norm(self, module: int = 0) -> nn.Module:
        """Return the norm before the output head."""

    def norms_late(self, module: int = 0) -> bool:
        """Return whether the output head's input differs from the recycled state."""
        return not (self.recycles_normed or isinstance(self.out_norm(module), nn.Identity))

    def normed(self, state: torch.Tensor, module: int = 0) -> torch.Tensor:
        return state if self.recycles_normed else self.out_norm(module)(state)


class Markov(Protocol):
    """The previous token's term of a block's logits: its vector of rank r times a row for each scored token."""

    def after(self, tokens: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        """Return vectors [..., r] of tokens [...] int64 that precede the rows of normed states [..., h_d]."""

    def rows(self, places: torch.Tensor) -> torch.Tensor:
        """Return the rows [..., r] of scored tokens, by their places [...] in the head's vocabulary."""

    def bias(self, vectors: torch.Tensor) -> torch.Tensor:
        """Return the term of vectors [n, r] in logits [n, dv]."""


class BlockDraftHead(DraftHead):
    """A head that scores a block of tokens in one pass (DFlash, arXiv 2602.06036).

    block_size B: rows of the blocks that it was trained on, the root's included. mask_token_id: the token of the other
    rows; mask_embedding [h_d]: their embedding, None if it is the token's. causal: whether a row sees only those
    before it. predicts_next: row j predicts the token after its own position (B drafts), else its own (B-1 drafts).
    """

    block_size: int
    mask_token_id: int
    mask_embedding: nn.Parameter | None
    causal: bool
    predicts_next: bool

    @property
    def most_steps(self) -> int:
        """The largest num_steps."""
        return self.block_size - (0 if self.predicts_next else 1)

    def check_steps(self, num_steps: int) -> None:
        """Raise ValueError if its blocks have too few rows for `num_steps`."""
        if num_steps > self.most_steps:
            raise ValueError(
                f"num_steps={num_steps}: the head drafts blocks of {self.block_size} rows; expected at most "
                f"{self.most_steps}, also in auto_steps"
            )

    @property
    @abstractmethod
    def markov(self) -> Markov | None:
        """The term of the previous token; None if there is none."""

    @property
    def traits(self) -> dict[str, Any]:
        names = ("block_size", "causal", "predicts_next")
        return {**{name: getattr(self, name) for name in names}, "markov": self.markov is not None}

    @abstractmethod
    def keys_values(self, fused: torch.Tensor) -> Iterable[tuple[torch.Tensor, torch.Tensor]]:
        """Return the un-rotated k and v [T, Hkv, d] of every layer for tokens of `fuse`d features [T, h_d]."""

    @abstractmethod
    def forward(self, embeds: torch.Tensor, rope: Rope, attend: Attend) -> torch.Tensor:
        """Return the states [..., h_d] of block rows with embeddings [..., h_d], before the out norm."""
