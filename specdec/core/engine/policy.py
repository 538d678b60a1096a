"""Chooses a shape for each round: the one with the most expected tokens per ms. Pure: its inputs are costs and accepted
drafts, its output an index; it knows no device and no requests.

Expected tokens of the shape in use follow from its recently accepted drafts, by position; those of other shapes from
the same counts by a model of trees and chains, corrected by their own results when they were tried. A shape that might
be faster is tried from time to time, by a probe, which costs a small share of the time.
"""

from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from specdec.core.config import CATCH_UP, Shape

MARGIN = 1.03  # factor by which another shape must be better to switch to it,
IN_A_ROW = 2  # in consecutive decisions for as many requests in total, up to PROBE each;
SLIGHTLY, LONG = 1.01, 48  # or a smaller factor, in decisions for more requests
STAY = 8  # rounds that a shape stays at least, and after which its acceptance is out of date
PROBE = 4  # requests from which one round suffices for a probe, which has two else, and for a decision
PROBE_SHARE = 0.01  # of the tokens: limit of the cost of probes
SHORTEST_WAIT = 16  # rounds between probes
FOLLOW_SHARE = 0.01  # of the time of plain rounds: limit of the cost of the draft following them
SLOW, FAST = 512, 24  # memory of the averages, in verified drafts
CHANGED = 3.5  # standard deviations between both averages from which acceptance counts as changed
OFF = 1.25, 2.0  # factors by which one trial, of a chain or a tree, may differ from the model: else acceptance changed
PRIOR = 0.6  # acceptance per draft before any is verified
GAIN = 1.7  # a tree accepts a token like this many independent chains, until it is measured
NUM_SWITCHES = 8  # the last ones, which the report shows


class CostTable(NamedTuple):
    """Measured ms of a round: rows[bucket][context][shape], of batches up to `bucket`, at the two `contexts` (tokens).

    catch_up: bucket -> ms until a draft that has not followed plain rounds can draft again.
    """

    rows: Mapping[int, tuple[Sequence[float], Sequence[float]]]
    contexts: tuple[int, int]
    catch_up: Mapping[int, float]


class Accepted:
    """Recent counts of drafts of one shape, verified and accepted, by position.

    chances [num_steps], weight: prior acceptance by position, and the number of drafts that it counts as.
    """

    def __init__(self, chances: Sequence[float], weight: float):
        self.judged = [weight / len(chances) for _ in chances]
        self.hits = [weight / len(chances) * chance for chance in chances]
        self._recent = sum(self.judged), sum(self.hits)

    def add(self, lens: Sequence[int]) -> None:
        """Count the requests of a round, which emitted `lens` tokens each, bonus included."""
        num_steps = len(self.judged)
        ends = [0] * (num_steps + 1)
        for emitted, count in Counter(lens).items():
            ends[min(emitted - 1, num_steps)] += count
        judged, hits, going = [], [], len(lens)
        for end in ends[:-1]:
            judged.append(going)
            going -= end
            hits.append(going)
        num_judged, num_hits = sum(judged), sum(hits)
        slow, fast = max(0.0, 1 - num_judged / SLOW), max(0.0, 1 - num_judged / FAST)
        self.judged = [slow * old + new for old, new in zip(self.judged, judged, strict=True)]
        self.hits = [slow * old + new for old, new in zip(self.hits, hits, strict=True)]
        self._recent = self._recent[0] * fast + num_judged, self._recent[1] * fast + num_hits
        self._follow_change()

    def _follow_change(self) -> None:
        """Forget older counts if the last drafts differ from them significantly."""
        total, recent = sum(self.judged), self._recent[0]
        share, lately = min(max(sum(self.hits) / total, 0.02), 0.98), self._recent[1] / recent
        if abs(lately - share) > CHANGED * (share * (1 - share) / recent) ** 0.5:
            self.judged = [recent * old / total for old in self.judged]
            self.hits = [lately * judged for judged in self.judged]

    def chances(self, num_steps: int) -> list[float]:
        """Return each position's conditional acceptance, given the position before; the last one's past the end."""
        found, chance = [], sum(self.hits) / sum(self.judged)
        for judged, hits in zip(self.judged, self.hits, strict=True):
            chance = min((hits + 2 * chance) / (judged + 2), 1.0)
            found.append(chance)
        return (found + [chance] * num_steps)[:num_steps]


class Policy:
    """Chooses the shape of each round from `shapes`, the first of which is plain decoding.

    index: the shape in use. switches: the last switches, as text; num_switches: their total number.
    """

    def __init__(self, shapes: Sequence[Shape], costs: CostTable):
        self.shapes, self._costs = tuple(shapes), costs
        self._buckets = sorted(costs.rows)
        self._bucket = 0
        self._accepted = [Accepted([PRIOR] * max(s.num_steps, 1), FAST / 2) for s in self.shapes]
        self._source = 1  # the shape whose accepted drafts the others are judged by
        self._trial = 0  # another one that drafted since
        weights = [FAST / 2 if s.topk > 1 else 8 * FAST for s in self.shapes]  # chains mostly follow the model
        self._tried = [(w, w) for w in weights]  # accepted and expected drafts of each shape
        self._expected: list[float] = []  # tokens per round of each shape, by current knowledge
        places = range(len(self.shapes))
        self._slower = dict.fromkeys(self._buckets, 1.0)  # measured over table ms, common to all shapes,
        self._own = {(b, i): (1.0, 0) for b in self._buckets for i in places}  # and a shape's own factor, rounds
        self._round = self._since = 0  # rounds; the one of the last switch
        self._last = [0] * len(self.shapes)  # the last round of each shape
        self._noted = 0  # the last round whose drafts were counted
        self._num_better = self._num_ahead = 0  # decisions in a row in which another shape was better, or slightly so
        self._probe, self._left = 0, 0  # the shape being tried, and its rounds left
        self._until_probe = SHORTEST_WAIT
        self.index = 0
        self.switches: deque[str] = deque(maxlen=NUM_SWITCHES)
        self.num_switches = self.num_probes = 0

    def choose(self, batch: int, context: int) -> int:
        """Return the index of the shape for the next round of `batch` requests with `context` tokens each."""
        bucket = self._bucket_of(batch)
        rates = self._rates(bucket, context)
        best = max(range(len(rates)), key=rates.__getitem__)
        pace = min(batch, PROBE)  # the more requests, the more certain is what a round shows
        self._num_better = self._num_better + pace if rates[best] > MARGIN * rates[self.index] else 0
        self._num_ahead = self._num_ahead + pace if rates[best] > SLIGHTLY * rates[self.index] else 0
        self._round += 1
        if bucket != self._bucket:
            self._bucket, self._left = bucket, 0
            self._switch(best, rates, f"batches of up to {bucket}")
        elif self._num_better >= IN_A_ROW and pace * (self._round - self._since) > STAY:
            self._switch(best, rates, "better in two decisions" if pace < IN_A_ROW else "better")
        elif self._num_ahead >= LONG:
            self._switch(best, rates, "slightly better for long")
        elif not self._left:
            self._maybe_probe(rates, batch)
        chosen = self._probe if self._left else self.index
        self._left = max(0, self._left - 1)
        self._last[chosen] = self._round
        return chosen

    def note(self, index: int, lens: Sequence[int]) -> None:
        """Record a round of `shapes[index]`: tokens emitted by each request that goes on after it, bonus included."""
        if not index or not lens:
            return
        is_stale, self._noted = self._round - self._noted > STAY, self._round
        if is_stale or (index != self._source and index != self._trial):  # it begins with what could be expected
            self._accepted[index] = Accepted(self._chances(index), FAST / 4)
            self._trial = index
        if is_stale or index == self._source or self._round - self._last[self._source] > STAY:
            self._source, self._trial = index, 0
        elif self._goes_beyond(index):
            hits, modelled = sum(lens) - len(lens), len(lens) * self._modelled(index)
            if index == 1:  # which others are compared with
                self._compare(self._source, modelled, hits)
            else:
                self._compare(index, hits, modelled / self._bias(self._source))
        self._accepted[index].add(lens)
        self._expected = []

    def _compare(self, index: int, hits: float, modelled: float) -> None:
        """Record drafts of `shapes[index]` that were accepted, and those that the model predicted."""
        if modelled > FAST:  # of fewer, chance may be that far off
            off = OFF[self.shapes[index].topk > 1]
            hits = min(max(hits, modelled / off), modelled * off)
        weight = min(1.0, FAST / max(modelled, hits, 1.0))  # many requests are one trial
        hits, modelled = weight * hits, weight * modelled
        keep = max(0.0, 1 - modelled / SLOW)
        old_hits, old_modelled = self._tried[index]
        self._tried[index] = keep * old_hits + hits, keep * old_modelled + modelled

    def note_time(self, index: int, batch: int, context: int, ms: float) -> None:
        """Record the measured time of a round. A shape's first rounds correct its own cost; later changes, such as with
        the context, are applied to the costs of all shapes."""
        bucket = self._bucket_of(batch)
        own, num = self._own[bucket, index]
        off = ms / (self._cost(bucket, index, context) * self._slower[bucket] * own)
        off, share = min(max(off, 0.5), 2.0) - 1, max(1 / (num + 4), 0.02)
        self._own[bucket, index] = own * (1 + share * off), num + 1
        self._slower[bucket] *= 1 + 0.1 * (1 - 4 * share) * off

    def keeps_up(self, batch: int) -> bool:
        """Return whether the draft runs after every plain round of `batch` requests, which is cheap for small batches,
        rather than catching up when it is to draft again."""
        bucket = self._bucket_of(batch)
        plain = self._costs.rows[bucket][0][0]
        return self._costs.catch_up[bucket] <= FOLLOW_SHARE * CATCH_UP * plain

    def note_admission(self) -> None:
        """Record that a request was admitted: its acceptance may differ."""
        self._until_probe //= 2

    def expected(self, index: int) -> float:
        """Return the expected tokens of a request in a round of `shapes[index]`, bonus included."""
        if not self._expected:
            own, places = self._bias(self._source), range(len(self.shapes))
            biases = [self._bias(i) / own if self._goes_beyond(i) else 1.0 for i in places]
            self._expected = [1 + self._modelled(i) * bias for i, bias in zip(places, biases, strict=True)]
        return self._expected[index]

    def _goes_beyond(self, index: int) -> bool:
        """Return whether drafts of `shapes[index]` are others than the first of the source's: those of a shorter chain
        are accepted as the source's are, so there is nothing to learn of it."""
        own, source = self.shapes[index], self.shapes[self._source]
        return own.topk > 1 or source.topk > 1 or own.num_steps > source.num_steps

    def _modelled(self, index: int) -> float:
        """Return the drafts that a round has accepted by the source's chances, trees and chains as the model says."""
        path, total = 1.0, 0.0
        for chance in self._chances(index):
            path *= chance
            total += path
        return total

    def _chances(self, index: int) -> list[float]:
        gains = [GAIN if self.shapes[i].topk > 1 else 1.0 for i in (index, self._source)]
        chances, gain = self._accepted[self._source].chances(self.shapes[index].num_steps), gains[0] / gains[1]
        return chances if gain == 1 else [1 - (1 - chance) ** gain for chance in chances]

    def _bias(self, index: int) -> float:
        hits, wanted = self._tried[index]
        return hits / wanted

    def _bucket_of(self, batch: int) -> int:
        return self._buckets[min(bisect_left(self._buckets, batch), len(self._buckets) - 1)]

    def _cost(self, bucket: int, index: int, context: int) -> float:
        """Return ms of a round by the table, on a line through both contexts."""
        short, long = (costs[index] for costs in self._costs.rows[bucket])
        near, far = self._costs.contexts
        return short + (long - short) * max(context - near, 0) / max(far - near, 1)

    def costs_ms(self, index: int) -> dict[int, float]:
        """Return ms of a round of `shapes[index]` by batch bucket, in a short context, as measured so far."""
        near = self._costs.contexts[0]
        return {b: self._cost(b, index, near) * self._slower[b] * self._own[b, index][0] for b in self._buckets}

    def _rates(self, bucket: int, context: int) -> list[float]:
        """Return each shape's expected tokens per request and ms."""
        places = range(len(self.shapes))
        slower, own = self._slower[bucket], [self._own[bucket, i] for i in places]
        unknown = min([1 / slower, 1.0, *(ratio for ratio, num in own if num)])  # so that it is tried rather than not
        ratios = [ratio if num else unknown for ratio, num in own]
        costs = [self._cost(bucket, i, context) * slower * ratio for i, ratio in zip(places, ratios, strict=True)]
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
