"""`specdec bench compare`: which rows of two result files are better or worse beyond noise."""

import math
from collections.abc import Iterable, Iterator, Sequence
from statistics import mean, median, stdev
from typing import Any, NamedTuple

from rich.console import Console

from specdec.core import grouped
from specdec.tools.measure.rows import Measure, Record, Row, identity, label_of, measure_of, number, text
from specdec.tools.measure.statistics import Z95, student_t
from specdec.tools.measure.tables import Table, table

THRESHOLD = 0.03
MOST_UNMATCHED = 12  # most lines about unmatched cases
# Not judged in rows with these keys: time per token and tau are random where a round's time is measured, tokens/s
# follow from acceptance where that is measured, and the number of equal texts is random where logits tie.
CHANCE = {"ms": ("round_ms",), "tau": ("round_ms",), "tok_s": ("round_ms", "accept_at"), "equal": ("near_ties",)}
Case = tuple[tuple[str, Any], ...]  # the keys that identify a row, sorted
Pair = tuple[Sequence[Row], Sequence[Row]]  # rows of one case, before and after


class RowChange(NamedTuple):
    """One measured value of a case, before and after. noise: the absolute difference that counts as noise; basis: its
    source."""

    case: dict[str, Any]
    key: str
    before: float
    after: float
    noise: float
    basis: str
    is_higher_better: bool

    @property
    def ratio(self) -> float:
        """After over before; infinite if before is 0."""
        if self.before:
            return self.after / self.before
        return math.inf if self.after else 1.0

    @property
    def verdict(self) -> str:
        """Return "worse" or "better" beyond noise, else "noise"."""
        difference = self.after - self.before
        if abs(difference) <= self.noise or difference == 0:
            return "noise"
        return "better" if (difference > 0) == self.is_higher_better else "worse"


class Comparison(NamedTuple):
    """All judged values of matched cases, and the cases that only one file has."""

    changes: list[RowChange]
    only_before: list[dict[str, Any]]
    only_after: list[dict[str, Any]]

    def of(self, verdict: str) -> list[RowChange]:
        """Return the changes of that verdict, the largest first."""
        own = [change for change in self.changes if change.verdict == verdict]
        return sorted(own, key=lambda c: -abs(math.log(c.ratio)) if 0 < c.ratio < math.inf else -math.inf)


def compare(before: Record, after: Record, threshold: float = THRESHOLD) -> Comparison:
    """Match rows by all keys that are not measured, and judge every measured value that both have.

    Rows of one case within a file are repeats: their median is compared. Noise of a difference, the first that exists:
    95% intervals in the rows; the spread of at least two repeats on both sides; chance, of counts out of trials; else
    `threshold`, relative to the value before. ValueError if no row matches.
    """
    if not 0 <= threshold < 1:
        raise ValueError(f"threshold {threshold}: expected a share from 0 up to 1, such as 0.03 for 3%")
    old, new = _cases(before, after)
    both = [case for case in old if case in new]
    if not both:
        kinds = [sorted({str(row.get("what", "rows without `what`")) for row in r.rows}) for r in (before, after)]
        raise ValueError(
            f"no row of {before.name} ({', '.join(kinds[0])}) is the same case as one of {after.name} "
            f"({', '.join(kinds[1])}): expected two results of the same command with the same options"
        )
    changes = [change for case in both for change in _changes(dict(case), (old[case], new[case]), threshold)]
    alone = [[dict(case) for case in own if case not in other] for own, other in ((old, new), (new, old))]
    return Comparison(changes, *alone)


def _cases(*records: Record) -> list[dict[Case, list[Row]]]:
    """Return the rows of both records by case.

    A key that only one file has, with a single value, was added by a later version and identifies nothing.
    """
    values: list[dict[str, set[str]]] = [{}, {}]
    for known, record in zip(values, records, strict=True):
        for row in record.rows:
            for key, value in identity(row).items():
                known.setdefault(key, set()).add(text(value))
    ignored = {key for key in values[0].keys() ^ values[1].keys() if len({**values[0], **values[1]}[key]) == 1}

    def case_of(row: Row) -> Case:
        return tuple(sorted((key, value) for key, value in identity(row).items() if key not in ignored))

    return [grouped(record.rows, case_of) for record in records]


def _changes(case: dict[str, Any], rows: Pair, threshold: float) -> Iterator[RowChange]:
    everything = [*rows[0], *rows[1]]
    for key in dict.fromkeys(key for row in everything for key in row):
        measure = measure_of(key, None)
        if measure is None or not measure.better:
            continue
        is_chance = any(row.get(other) not in (None, 0) for other in CHANCE.get(key, ()) for row in everything)
        before, after = (_values(key, own) for own in rows)
        if before and after and not is_chance:
            noise, basis = _noise(measure, rows, before, after, threshold)
            yield RowChange(case, key, median(before), median(after), noise, basis, measure.better == "higher")


def _values(key: str, rows: Iterable[Row]) -> list[float]:
    """Return the numbers that rows have for `key`; for text, 1 for an error and for the outcome "equal", else 0."""
    if key in ("error", "outcome"):
        return [float(bool(row.get(key)) if key == "error" else row.get(key) == "equal") for row in rows]
    return [float(row[key]) for row in rows if isinstance(row.get(key), int | float)]


def _noise(
    measure: Measure, rows: Pair, before: Sequence[float], after: Sequence[float], threshold: float
) -> tuple[float, str]:
    """Return the difference that counts as noise, and its source."""
    halves, trials = ([_values(key, own) if key else [] for own in rows] for key in (measure.ci, measure.of))
    if all(halves):
        return math.hypot(*map(median, halves)), "95% intervals"
    if len(before) > 1 and len(after) > 1:
        spread = math.hypot(*(stdev(own) / math.sqrt(len(own)) for own in (before, after)))
        return student_t(len(before) + len(after) - 2) * spread, "repeats"
    if all(trials):
        share = (mean(before) + mean(after)) / (mean(trials[0]) + mean(trials[1]))
        return Z95 * math.sqrt(2 * max(share * (1 - share), 0.0) * mean(trials[0])), "chance"
    limit = threshold if measure.threshold is None else measure.threshold
    return limit * abs(median(before)), f"{limit:.1%} threshold"


def print_comparison(found: Comparison, before: Record, after: Record) -> None:
    """Print the changes beyond noise, worse first, how many values were judged, and the unmatched cases."""
    out = Console(highlight=False)
    out.print(f"before: {before.name}; after: {after.name}")
    for key in ("gpu", "versions"):
        if before.about.get(key) != after.about.get(key):
            pair = f"{text(before.about.get(key))} against {text(after.about.get(key))}"
            out.print(f"not the same {key}: {pair}", style="yellow")
    for verdict, style in (("worse", "red"), ("better", "green")):
        if own := found.of(verdict):
            _table(own, f"{verdict} beyond noise").print(style=style)
    worse, better, same = (len(found.of(verdict)) for verdict in ("worse", "better", "noise"))
    out.print(f"{len(found.changes)} values judged: {worse} worse, {better} better, {same} within noise")
    by_chance = sum(not change.basis.endswith("threshold") for change in found.changes) / 40
    if by_chance >= 1:
        out.print(f"(of intervals of 95%, about {by_chance:.0f} would be worse by chance alone)")
    for name, alone in ((before.name, found.only_before), (after.name, found.only_after)):
        if alone:
            shown = [f"  {text(case)}" for case in alone[:MOST_UNMATCHED]]
            shown += [f"  … and {len(alone) - MOST_UNMATCHED} more"] * (len(alone) > MOST_UNMATCHED)
            out.print(f"{len(alone)} cases are in {name} only:", style="yellow")
            out.print("\n".join(shown))


def _table(changes: Sequence[RowChange], title: str) -> Table:
    """Make a table with the differing keys of cases in one column, and the shared ones in the title."""
    shared = {key: value for key, value in changes[0].case.items() if all(c.case.get(key) == value for c in changes)}
    rows = [
        {
            "case": {key: value for key, value in c.case.items() if key not in shared},
            "measure": label_of(c.key),
            **{"before": c.before, "after": c.after},
            "change": "new" if math.isinf(c.ratio) else f"{c.ratio - 1:+.1%}",
            "noise": f"±{number(c.noise)} ({c.basis})",
        }
        for c in changes
    ]
    return table(f"{title} ({text(shared)})" if shared else title, rows)
