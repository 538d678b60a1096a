"""Shapes of drafts in measurements, as command lines and rows write them."""

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from specdec.core.config import EngineConfig
from specdec.tools.measure.shapes import acceptance_rates


class DraftShape(NamedTuple):
    """Shape of a round: S draft steps, K branches, D nodes verified; S = 0 is plain decoding.

    vocab: `EngineConfig.draft_vocab`, None for all tokens.
    """

    steps: int = 0
    topk: int = 1
    width: int = 1
    vocab: int | None = None

    @classmethod
    def parse(cls, text: str) -> "DraftShape":
        """Parse "plain", "S:K:D" or "S:K:D@VOCAB"; "S" and "S:K" take defaults of `EngineConfig` for the rest.
        ValueError describes the mistake."""
        if text == "plain":
            return cls()
        found = re.fullmatch(r"(\d+)(?::(\d+))?(?::(\d+))?(?:@([1-9]\d*))?", text.strip())
        if found is None:
            raise ValueError(
                f"shape {text!r}: expected plain or S:K:D, such as 3:1:4 (a chain) or 5:8:32 (a tree), or S:K:D@VOCAB, "
                "to draft from that many tokens"
            )
        numbers = zip(("num_steps", "topk", "num_draft_tokens"), found.groups(), strict=False)
        given: dict[str, Any] = {name: int(number) for name, number in numbers if number is not None}
        config = EngineConfig(**given)
        if config.num_steps == 0:
            raise ValueError(f"shape {text!r}: it drafts nothing; expected S of at least 1, or plain")
        return cls(config.num_steps, config.topk, config.verify_width, None if found[4] is None else int(found[4]))

    @classmethod
    def of(cls, row: Mapping[str, Any]) -> "DraftShape":
        return cls(row["steps"], row["topk"], row["draft_tokens"], row.get("draft_vocab"))

    @property
    def row(self) -> dict[str, Any]:
        """The keys of a row for it."""
        own = {"steps": self.steps, "topk": self.topk, "draft_tokens": self.width}
        return own if self.vocab is None else {**own, "draft_vocab": self.vocab}

    @property
    def imposed_tau(self) -> float:
        """The expected tau of rounds with imposed acceptance."""
        return 1 + sum(acceptance_rates(self.steps))

    def settings(self, imposed: bool = False) -> dict[str, Any]:
        """Return settings for `attach`. imposed: impose the acceptance of trained drafts, for random weights."""
        if not self.steps:
            return {}
        shape: dict[str, Any] = {"num_steps": self.steps, "topk": self.topk, "num_draft_tokens": self.width}
        shape["draft_vocab"] = self.vocab
        return {**shape, "synthetic_acceptance": acceptance_rates(self.steps)} if imposed else shape

    def __str__(self) -> str:
        of = "" if self.vocab is None else f"@{self.vocab}"
        return f"{self.steps}:{self.topk}:{self.width}{of}" if self.steps else "plain"
