"""The one definition of acceptance length and related metrics, used by the engine, the benches and the trainer."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field


def acceptance_length(num_emitted: int, num_rounds: int) -> float:
    """Return tau: tokens emitted by verify rounds (bonus included, trimmed at EOS and max length) over verify rounds.

    The token sampled from the prefill belongs to no round and is not counted. Returns 0.0 if there are no rounds.
    """
    return num_emitted / num_rounds if num_rounds else 0.0


@dataclass
class AcceptanceStats:
    """Counts of verify rounds and of accepted drafts, of one request or several.

    num_emitted: tokens emitted by the rounds, bonus included. accepted_at[j]: rounds in which draft position j, from 0,
    was accepted and kept (unconditional; non-increasing in j).
    """

    num_rounds: int = 0
    num_emitted: int = 0
    accepted_at: list[int] = field(default_factory=list)

    def add(self, accept_lens: Iterable[int]) -> "AcceptanceStats":
        """Add rounds that emitted `accept_lens` tokens each, bonus included, after trimming; return self."""
        for accept_len, count in Counter(accept_lens).items():
            self.num_rounds += count
            self.num_emitted += count * accept_len
            num_drafts = accept_len - 1
            self.accepted_at += [0] * (num_drafts - len(self.accepted_at))
            for j in range(num_drafts):
                self.accepted_at[j] += count
        return self

    def merge(self, others: Sequence["AcceptanceStats"]) -> "AcceptanceStats":
        """Return a new AcceptanceStats with the counts of self and `others` added up."""
        parts = [self, *others]
        width = max(len(p.accepted_at) for p in parts)
        columns = [sum(p.accepted_at[j] for p in parts if j < len(p.accepted_at)) for j in range(width)]
        return AcceptanceStats(sum(p.num_rounds for p in parts), sum(p.num_emitted for p in parts), columns)

    @property
    def tau(self) -> float:
        """Acceptance length; see `acceptance_length`."""
        return acceptance_length(self.num_emitted, self.num_rounds)

    @property
    def acceptance_at(self) -> list[float]:
        """a_j: share of rounds in which draft position j was accepted. For a chain tau = 1 + sum(a_j)."""
        return [n / self.num_rounds for n in self.accepted_at] if self.num_rounds else []
