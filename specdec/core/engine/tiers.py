"""The tiers of an engine, shapes of rounds with graphs of their own, and the choice of the next round's tier.

With num_steps="auto" a `Policy` chooses, from the times and emitted tokens of rounds, which it learns one launch late.
Otherwise there is one tier. Neither greedy text nor the distribution of sampled text depends on the choice.
"""

from collections.abc import Sequence
from time import perf_counter
from typing import Any, NamedTuple

from specdec.core.config import CATCH_UP, Shape
from specdec.core.engine.policy import CostTable, Policy
from specdec.core.engine.request import Request


class Played(NamedTuple):
    """A launched round: its tier, requests, mean length in tokens of some of them, and launch time (s).

    catch_ups: catch-up forwards of the draft before it. is_timed: whether nothing else was launched since the last one.
    """

    tier: int
    batch: int
    context: int
    start: float
    catch_ups: int
    is_timed: bool


class Tally:
    """Counts of a tier: rounds launched; rounds timed and their seconds; requests that went on, and their tokens."""

    def __init__(self) -> None:
        self.rounds = self.timed = self.requests = self.tokens = 0
        self.seconds = 0.0

    @property
    def facts(self) -> dict[str, Any]:
        """Rounds, ms of one, tokens of a request in one."""
        ms = 1e3 * self.seconds / self.timed if self.timed else None
        return {"rounds": self.rounds, "ms": ms, "tokens": self.tokens / self.requests if self.requests else None}


class Tiers:
    """Picks the tier of each round, and decides when the draft must catch up.

    reads_features: for a draft that must catch up with plain rounds, whether it needs the target's features besides
    tokens; None for other drafts. policy: None with one tier, and until costs are measured; rounds then use the last
    tier. fixed: a tier for all rounds, for measurements that the policy does not see.
    """

    def __init__(self, shapes: Sequence[Shape], reads_features: bool | None):
        self.shapes = tuple(shapes)
        self.policy: Policy | None = None
        self.fixed: int | None = None
        self._reads_features = reads_features
        self._is_disturbed = True
        self._last_arrival = 0.0
        self._num_catch_ups = 0
        self._tallies = [Tally() for _ in shapes]

    def set_costs(self, costs: CostTable) -> None:
        """Pick by measured `costs` from now on."""
        self.policy = Policy(self.shapes, costs)

    def begin(self, requests: Sequence[Request]) -> Played:
        """Decide about the next round, of `requests`, which is about to be launched."""
        batch, context, tier = len(requests), 0, len(self.shapes) - 1
        if self.policy is not None:
            sample = requests[:: 1 + batch // 16]
            context = sum([len(r.prompt_ids) + len(r.tokens) for r in sample]) // len(sample)
            tier = self.policy.choose(batch, context) if self.fixed is None else self.fixed
        catch_ups = 0 if self._reads_features is None else self._count_behind(tier, requests)
        is_timed, self._is_disturbed = not self._is_disturbed and not catch_ups, False
        self._tallies[tier].rounds += 1
        return Played(tier, batch, context, perf_counter(), catch_ups, is_timed)

    def _count_behind(self, tier: int, requests: Sequence[Request]) -> int:
        """Return how often the draft must catch up: to draft, or since features that are kept would be overwritten.

        Where following plain rounds costs too much, these are lost: then the draft has a gap.
        """
        is_plain, most = not self.shapes[tier].num_steps, max([r.num_behind for r in requests])
        if not is_plain and not most:
            return 0
        num = -(-most // CATCH_UP)
        if is_plain:
            num = most // CATCH_UP if self.policy is None or self.policy.keeps_up(len(requests)) else 0
        for request in requests:
            behind = is_plain * (1 + request.num_behind * (not num))
            request.num_behind = min(behind, CATCH_UP) if self._reads_features else behind
        self._num_catch_ups += num
        return num

    def disturb(self) -> None:
        """Record the launch of a prefill: the next round's time includes it."""
        self._is_disturbed = True

    def note_admission(self) -> None:
        if self.policy is not None:
            self.policy.note_admission()

    def end(self, played: Played, requests: Sequence[Request]) -> None:
        """Record the tokens of `requests` from a round whose results have just arrived.

        The device works on a launch after the other, so the round took the time since the last one arrived, or less.
        """
        if self.policy is None or self.fixed is not None:
            return
        now, tally = perf_counter(), self._tallies[played.tier]
        seconds, self._last_arrival = now - max(self._last_arrival, played.start), now
        lens = [r.round_lens[-1] for r in requests if r.is_running and r.round_lens]
        self.policy.note(played.tier, lens)
        tally.requests, tally.tokens = tally.requests + len(lens), tally.tokens + sum(lens)
        if played.is_timed:
            self.policy.note_time(played.tier, played.batch, played.context, 1e3 * seconds)
            tally.timed, tally.seconds = tally.timed + 1, tally.seconds + seconds

    @property
    def facts(self) -> dict[str, Any]:
        """Return the contents of `Report.policy`."""
        policy = self.policy
        if policy is None:
            return {}
        tiers = {
            str(shape): {**tally.facts, "expected_tokens": policy.expected(i), "cost_ms": policy.costs_ms(i)}
            for i, (shape, tally) in enumerate(zip(self.shapes, self._tallies, strict=True))
        }
        num = {"switches": policy.num_switches, "probes": policy.num_probes, "catch_ups": self._num_catch_ups}
        return {"tiers": tiers, **num, "last_switches": list(policy.switches)}
