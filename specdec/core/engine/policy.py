"""The choice of a shape for each round: the one with the most expected tokens a ms. Pure: costs and accepted drafts in,
an index out; it knows no device and no requests.

Expected tokens come from the drafts that the shape in use had accepted lately, by position; those of another shape from
the same, as a model of trees and chains says, and corrected by what it accepted when it was tried. A shape that might
pay is tried from time to time: a probe, which costs a small share of the time.
"""

from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from math import log
from typing import NamedTuple

from specdec.core.config import CATCH_UP, Shape

MARGIN = 1.03  # another shape must be better by this
IN_A_ROW = 2  # in so many decisions, one after the other
SLIGHTLY, LONG = 1.01, 48  # or by this, in so many
STAY = 8  # rounds that a shape stays at least, and after which its acceptance is out of date
PROBE = 4  # requests whose rounds make a probe, which has two rounds at most; a round of so many counts as 4
PROBE_SHARE = 0.01  # of the tokens, that probes may cost
SHORTEST_WAIT = 16  # rounds between probes
FOLLOW_SHARE = 0.01  # of the time of plain rounds, that letting the draft follow them may take
SLOW, FAST = 512, 24  # drafts judged that averages remember, and that a first guess is worth
CHANGED, ODDS = 6.0, 8.0  # log-likelihood of odds that many times higher, or lower, from which on they count as changed
PRIOR = 0.6  # share of drafts accepted before any was judged
GAIN = 1.7  # a tree accepts a token as so many independent chains would, before it is measured
NUM_SWITCHES = 8  # the last ones, which the report shows


class CostTable(NamedTuple):
    """Measured ms of a round: rows[bucket][context][shape], of batches up to `bucket`, at the two `contexts` (tokens).

    catch_up: bucket -> ms until a draft that has not followed plain rounds can draft again.
    """

    rows: Mapping[int, tuple[Sequence[float], Sequence[float]]]
    contexts: tuple[int, int]
    catch_up: Mapping[int, float]


class Accepted:
    """Drafts that were judged and accepted lately, by position: of all chains together, or of a tree.

    Begins with `weight` drafts in all that were accepted with `chances` [num_steps].
    """

    def __init__(self, chances: Sequence[float], weight: float):
        self.judged = [weight / len(chances) for _ in chances]
        self.hits = [weight / len(chances) * chance for chance in chances]
        self._changes = {ODDS: (0.0, 0, 0), 1 / ODDS: (0.0, 0, 0)}  # how likely each is, drafts and hits since it began

    def add(self, lens: Sequence[int], num_steps: int) -> None:
        """Count the requests of a round with `num_steps` positions, which emitted `lens` tokens each."""
        ends = [0] * (num_steps + 1)
        for emitted, count in Counter(lens).items():
            ends[min(emitted - 1, num_steps)] += count
        places, going = len(self.judged), len(lens)
        judged, hits = [0] * places, [0] * places
        for j, end in enumerate(ends[:-1]):
            judged[j] = going
            going -= end
            hits[j] = going
        share = min(max(sum(self.hits) / sum(self.judged), 0.02), 0.98)
        keep = max(0.0, 1 - sum(judged) / SLOW)
        self.judged = [keep * old + new for old, new in zip(self.judged, judged, strict=True)]
        self.hits = [keep * old + new for old, new in zip(self.hits, hits, strict=True)]
        self._follow_change(share, sum(judged), sum(hits))

    def _follow_change(self, share: float, num_judged: int, num_hits: int) -> None:
        """Forget the past where the last drafts are accepted with other odds (CUSUM: Page, Biometrika 41, 1954)."""
        for odds, (likely, judged, hits) in self._changes.items():
            other = share * odds / (1 - share + share * odds)
            likely += num_hits * log(other / share) + (num_judged - num_hits) * log((1 - other) / (1 - share))
            judged, hits = judged + num_judged, hits + num_hits
            self._changes[odds] = (likely, judged, hits) if likely > 0 else (0.0, 0, 0)
            if likely > CHANGED:
                total, lately = sum(self.judged), (hits + 1) / (judged + 2)
                self.judged = [min(judged, total) / total * old for old in self.judged]
                self.hits = [lately * judged for judged in self.judged]
                self._changes = dict.fromkeys(self._changes, (0.0, 0, 0))
                return

    def chances(self, num_steps: int) -> list[float]:
        """Return the chance of each position to be accepted if the one before is; past the last, that of the last."""
        found, chance = [], sum(self.hits) / sum(self.judged)
        for judged, hits in zip(self.judged, self.hits, strict=True):
            chance = min((hits + 2 * chance) / (judged + 2), 1.0)
            found.append(chance)
        return (found + [chance] * num_steps)[:num_steps]


class Policy:
    """Chooses among `shapes`, of which the first is plain decoding.

    index: the shape in use. switches: the last ones, in words; num_switches: all of them.
    """

    def __init__(self, shapes: Sequence[Shape], costs: CostTable):
        self.shapes, self._costs = tuple(shapes), costs
        self._buckets = sorted(costs.rows)
        self._bucket = 0
        self._kinds = [i if s.topk > 1 else 0 for i, s in enumerate(self.shapes)]  # all chains are one kind
        deepest = max(s.num_steps for s in self.shapes)
        self._accepted = [Accepted([PRIOR] * deepest, FAST / 2) for _ in self.shapes]  # of each kind
        self._source = 0  # the kind whose accepted drafts the others are judged by
        self._trial: int | None = None  # another one that drafted since
        self._tried = [(FAST / 2, FAST / 2) for _ in self.shapes]  # drafts accepted, and those expected, of each tree
        self._expected: list[float] = []  # tokens of a round of each, as known by now
        self._slower: dict[tuple[int, int], float] = {}  # (bucket, shape): measured ms over those of the table
        self._round = self._since = 0  # rounds; the one of the last switch
        self._last = [0] * len(self.shapes)  # the last round of each shape
        self._noted = 0  # the round in which drafts were judged last
        self._num_better = self._num_ahead = 0  # decisions in a row in which another shape was better, or slightly so
        self._probe, self._left = 0, 0  # a shape that is tried, and for how many rounds yet
        self._until_probe = SHORTEST_WAIT
        self.index = 0
        self.switches: deque[str] = deque(maxlen=NUM_SWITCHES)
        self.num_switches = self.num_probes = 0

    def choose(self, batch: int, context: int) -> int:
        """Return the index of the shape for the next round of `batch` requests with `context` tokens each."""
        bucket, pace = self._bucket_of(batch), min(batch, PROBE)
        rates = self._rates(bucket, context)
        best = max(range(len(rates)), key=rates.__getitem__)
        self._num_better = self._num_better + pace if rates[best] > MARGIN * rates[self.index] else 0
        self._num_ahead = self._num_ahead + pace if rates[best] > SLIGHTLY * rates[self.index] else 0
        self._round += 1
        if bucket != self._bucket:
            self._bucket, self._left = bucket, 0
            self._switch(best, rates, f"batches of up to {bucket}")
        elif self._num_better >= IN_A_ROW and pace * (self._round - self._since) > STAY:
            self._switch(best, rates, "better in two decisions" if pace == 1 else "better")
        elif self._num_ahead >= LONG:
            self._switch(best, rates, "slightly better for long")
        elif not self._left:
            self._maybe_probe(rates, batch)
        chosen = self._probe if self._left else self.index
        self._left = max(0, self._left - 1)
        self._last[chosen] = self._round
        return chosen

    def note(self, index: int, lens: Sequence[int]) -> None:
        """Take note of a round of `shapes[index]`: the tokens of each request that goes on after it, bonus included."""
        if not index or not lens:
            return
        kind, is_stale, self._noted = self._kinds[index], self._round - self._noted > STAY, self._round
        if is_stale or kind not in (self._source, self._trial):  # it begins with what could be expected
            self._accepted[kind] = Accepted(self._chances(index, len(self._accepted[kind].judged)), FAST / 4)
            self._trial = kind
        if is_stale or kind == self._source or self._round - self._last_of(self._source) > STAY:
            self._source, self._trial = kind, None
        else:
            self._compare(index, len(lens), sum(lens) - len(lens))
        self._accepted[kind].add(lens, self.shapes[index].num_steps)
        self._expected = []

    def _last_of(self, kind: int) -> int:
        """Return the last round of a kind of shapes."""
        return max(last for i, last in enumerate(self._last) if i and self._kinds[i] == kind)

    def _compare(self, index: int, num: int, hits: float) -> None:
        """Take note of the drafts that a trial had accepted, and of those that its model had let expect."""
        tree, modelled = self._kinds[index], num * self._modelled(index)
        if tree:
            modelled /= self._bias(self._source)
        else:  # a chain, which the source is compared with
            tree, hits, modelled = self._source, modelled, hits
        weight = min(1.0, FAST / max(modelled, 1.0))  # many requests are one trial: acceptance may have changed
        hits, modelled = weight * hits, weight * modelled
        keep = max(0.0, 1 - modelled / SLOW)
        old_hits, old_modelled = self._tried[tree]
        self._tried[tree] = keep * old_hits + hits, keep * old_modelled + modelled

    def note_time(self, index: int, batch: int, context: int, ms: float) -> None:
        """Take note of the measured time of a round."""
        bucket = self._bucket_of(batch)
        ratio = ms / self._cost(bucket, index, context)
        known = self._slower.get((bucket, index), 1.0)
        self._slower[bucket, index] = known + 0.1 * (min(max(ratio, known / 2), 2 * known) - known)

    def keeps_up(self, batch: int) -> bool:
        """Return whether the draft follows plain rounds of `batch` requests, which costs little where products of few
        rows wait for weights, or only catches up if it is to draft."""
        bucket = self._bucket_of(batch)
        plain = self._costs.rows[bucket][0][0]
        return self._costs.catch_up[bucket] <= FOLLOW_SHARE * CATCH_UP * plain

    def note_admission(self) -> None:
        """Take note that a request was admitted: its text may be of another kind."""
        self._until_probe //= 2

    def expected(self, index: int) -> float:
        """Return the tokens that a request can expect of a round of `shapes[index]`."""
        if not self._expected:
            own, places = self._bias(self._source), range(len(self.shapes))
            self._expected = [1 + self._modelled(i) * self._bias(self._kinds[i]) / own for i in places]
        return self._expected[index]

    def _modelled(self, index: int) -> float:
        """Return the drafts that a round has accepted by the source's chances, trees and chains as the model says."""
        path, total = 1.0, 0.0
        for chance in self._chances(index, self.shapes[index].num_steps):
            path *= chance
            total += path
        return total

    def _chances(self, index: int, num_steps: int) -> list[float]:
        gain = (GAIN if self._kinds[index] else 1.0) / (GAIN if self._source else 1.0)
        chances = self._accepted[self._source].chances(num_steps)
        return chances if gain == 1 else [1 - (1 - chance) ** gain for chance in chances]

    def _bias(self, kind: int) -> float:
        """Return what trees of a kind have accepted over what chains and the model had let expect."""
        hits, wanted = self._tried[kind]
        return hits / wanted

    def _bucket_of(self, batch: int) -> int:
        return self._buckets[min(bisect_left(self._buckets, batch), len(self._buckets) - 1)]

    def _cost(self, bucket: int, index: int, context: int) -> float:
        """Return ms of a round by the table, on a line through both contexts."""
        short, long = (costs[index] for costs in self._costs.rows[bucket])
        near, far = self._costs.contexts
        return short + (long - short) * max(context - near, 0) / max(far - near, 1)

    def costs_ms(self, index: int) -> dict[int, float]:
        """Return ms of a round of `shapes[index]` by bucket of batches, in a short context, as measured by now."""
        near = self._costs.contexts[0]
        return {b: self._cost(b, index, near) * self._slower.get((b, index), 1.0) for b in self._buckets}

    def _rates(self, bucket: int, context: int) -> list[float]:
        """Expected tokens of a request a ms, of each shape."""
        places = range(len(self.shapes))
        slower = [self._slower.get((bucket, i)) for i in places]
        unknown = min([1.0, *(s for s in slower if s is not None)])  # so that it is tried rather than not
        costs = [self._cost(bucket, i, context) * (slower[i] or unknown) for i in places]
        if not self.index:  # until the draft has caught up, which is worth it for a while only
            costs[1:] = [cost + self._costs.catch_up[bucket] / (2 * STAY) for cost in costs[1:]]
        return [self.expected(i) / cost for i, cost in zip(places, costs, strict=True)]

    def _maybe_probe(self, rates: Sequence[float], batch: int) -> None:
        """Begin a probe if it is time for one of a shape that might be better."""
        self._until_probe -= 1
        if self._until_probe > 0:
            return
        self._until_probe = SHORTEST_WAIT
        mine, tokens = rates[self.index], [self.expected(i) for i in range(len(rates))]
        costs = [n / rate for n, rate in zip(tokens, rates, strict=True)]  # ms
        others = [i for i in range(1, len(rates)) if i != self.index]
        others = [i for i in others if (self.shapes[i].num_steps + 1) / costs[i] > MARGIN * mine]
        if not others:
            return
        index = min(others, key=(self._last if self.index else costs).__getitem__)
        num_rounds = 1 if batch >= PROBE else 2
        lost = num_rounds * max(0.0, mine * costs[index] - tokens[index])
        lost += 0.0 if self.index else mine * self._costs.catch_up[self._bucket]
        if lost <= PROBE_SHARE * tokens[self.index] * (self._round - self._last[index]):
            self._probe, self._left = index, num_rounds
            self.num_probes += 1

    def _switch(self, index: int, rates: Sequence[float], why: str) -> None:
        self._num_better = self._num_ahead = self._left = 0
        if index == self.index:
            return
        told = " -> ".join(f"{self.shapes[i]} ({rates[i]:.3g})" for i in (self.index, index))
        self.switches.append(f"round {self._round}: {told}, {why}")
        self.num_switches += 1
        self.index, self._since = index, self._round
