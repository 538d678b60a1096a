"""`specdec bench compare`: which rows of two result files are better or worse beyond noise."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from statistics import mean, median, stdev
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table

from specdec.measure.keys import Measure, identity, label_of, measure_of
from specdec.measure.page.parts import number, text
from specdec.measure.records import Record
from specdec.measure.statistics import Z95, student_t

THRESHOLD = 0.03
MOST_UNMATCHED = 12  # lines of what could not be matched
Row = Mapping[str, Any]
Case = tuple[tuple[str, Any], ...]  # what identifies a row, sorted


class Change(NamedTuple):
    """One measured value of a case, before and after. noise: the absolute difference that is noise; basis: whose."""

    case: dict[str, Any]
    key: str
    before: float
    after: float
    noise: float
    basis: str
    is_higher_better: bool

    @property
    def ratio(self) -> float:
        """After over before; infinite where nothing became something."""
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

    changes: list[Change]
    only_before: list[dict[str, Any]]
    only_after: list[dict[str, Any]]

    def of(self, verdict: str) -> list[Change]:
        """Return the changes of that verdict, the largest first."""
        own = [change for change in self.changes if change.verdict == verdict]
        return sorted(own, key=lambda c: -abs(math.log(c.ratio)) if 0 < c.ratio < math.inf else -math.inf)


def compare(before: Record, after: Record, threshold: float = THRESHOLD) -> Comparison:
    """Match rows by all that is not measured, and judge every measured value that both have.

    Rows of one case within a file are repeats: their median is compared. Noise of a difference, the first that there
    is: 95% intervals in the rows; the spread of at least two repeats on both sides; chance, of counts out of trials;
    else `threshold`, relative to the value before. ValueError where no row matches.
    """
    if not 0 <= threshold < 1:
        raise ValueError(f"threshold {threshold}: expected a share from 0 up to 1, such as 0.03 for 3%")
    ignored = _ignored(before.rows, after.rows)
    old, new = _cases(before.rows, ignored), _cases(after.rows, ignored)
    both = [case for case in old if case in new]
    if not both:
        kinds = [sorted({str(row.get("what", "rows without `what`")) for row in r.rows}) for r in (before, after)]
        raise ValueError(
            f"no row of {before.name} ({', '.join(kinds[0])}) is the same case as one of {after.name} "
            f"({', '.join(kinds[1])}): expected two results of the same command with the same options"
        )
    changes = [change for case in both for change in _changes(dict(case), old[case], new[case], threshold)]
    alone = [[dict(case) for case in own if case not in other] for own, other in ((old, new), (new, old))]
    return Comparison(changes, *alone)


def _ignored(*files: Sequence[Row]) -> set[str]:
    """Return keys that only one file knows, and that tell none of its rows apart: they came with a later version."""
    values: list[dict[str, set[str]]] = [{}, {}]
    for found, rows in zip(values, files, strict=True):
        for row in rows:
            for key, value in identity(row).items():
                found.setdefault(key, set()).add(text(value))
    before, after = values
    return {key for key in before.keys() ^ after.keys() if len(before.get(key) or after[key]) == 1}


def _cases(rows: Sequence[Row], ignored: set[str]) -> dict[Case, list[Row]]:
    found: dict[Case, list[Row]] = {}
    for row in rows:
        own = {key: value for key, value in identity(row).items() if key not in ignored}
        found.setdefault(tuple(sorted(own.items())), []).append(row)
    return found


def _changes(case: dict[str, Any], old: Sequence[Row], new: Sequence[Row], threshold: float) -> Iterator[Change]:
    for key in dict.fromkeys(key for row in [*old, *new] for key in row):
        measure = measure_of(key, next(row[key] for row in [*old, *new] if key in row))
        if measure is None or not measure.better or not _is_judged(key, [*old, *new]):
            continue
        before, after = _values(key, old), _values(key, new)
        if before and after:
            noise, basis = _noise(measure, (old, new), (before, after), threshold)
            higher = measure.better == "higher"
            yield Change(case, key, median(before), median(after), noise, basis, higher)


def _is_judged(key: str, rows: Sequence[Row]) -> bool:
    """Whether `key` says something in these rows.

    Time per token and tau are chance where a round's time is measured, tokens/s come along where acceptance is, and how
    many texts are equal is chance where logits tie.
    """
    if key in ("ms", "tau", "tok_s") and any("round_ms" in row for row in rows):
        return False
    if key == "tok_s" and any("accept_at" in row for row in rows):
        return False
    return not (key == "equal" and any(row.get("near_ties") for row in rows))


def _values(key: str, rows: Iterable[Row]) -> list[float]:
    """Return the numbers that rows have for `key`; of words, 1 for an error and for the outcome "equal", else 0."""
    if key == "error":
        return [float(bool(row.get(key))) for row in rows]
    if key == "outcome":
        return [float(row.get(key) == "equal") for row in rows]
    return [float(row[key]) for row in rows if isinstance(row.get(key), int | float)]


def _noise(
    measure: Measure,
    rows: tuple[Sequence[Row], Sequence[Row]],
    values: tuple[list[float], list[float]],
    threshold: float,
) -> tuple[float, str]:
    """Return the difference that is noise, and what says so."""
    before, after = values
    halves = [_values(measure.ci, own) for own in rows] if measure.ci else []
    if all(halves) and halves:
        return math.hypot(*(median(own) for own in halves)), "95% intervals"
    if len(before) > 1 and len(after) > 1:
        spread = math.hypot(*(stdev(own) / math.sqrt(len(own)) for own in values))
        return student_t(len(before) + len(after) - 2) * spread, "repeats"
    trials = [_values(measure.of, own) for own in rows] if measure.of else []
    if all(trials) and trials:
        share = (mean(before) + mean(after)) / (mean(trials[0]) + mean(trials[1]))
        return Z95 * math.sqrt(2 * max(share * (1 - share), 0.0) * mean(trials[0])), "chance"
    limit = threshold if measure.threshold is None else measure.threshold
    return limit * abs(median(before)), f"{limit:.1%} threshold"


def print_comparison(found: Comparison, before: Record, after: Record, console: Console | None = None) -> None:
    """Print what changed beyond noise, worse first, how much was judged, and what could not be matched."""
    out = console or Console()
    out.print(f"before: {before.name}; after: {after.name}", highlight=False)
    for key in ("gpu", "versions"):
        if before.about.get(key) != after.about.get(key):
            pair = f"{text(before.about.get(key))} against {text(after.about.get(key))}"
            out.print(f"not the same {key}: {pair}", style="yellow", highlight=False)
    for verdict, style in (("worse", "red"), ("better", "green")):
        own = found.of(verdict)
        if own:
            out.print(_table(own, f"{verdict} beyond noise", style))
    worse, better, same = (len(found.of(verdict)) for verdict in ("worse", "better", "noise"))
    out.print(f"{len(found.changes)} values judged: {worse} worse, {better} better, {same} within noise")
    by_chance = sum(change.basis in ("95% intervals", "repeats", "chance") for change in found.changes) / 40
    if by_chance >= 1:
        out.print(f"(of intervals of 95%, about {by_chance:.0f} would be worse by chance alone)")
    for name, alone in ((before.name, found.only_before), (after.name, found.only_after)):
        if alone:
            out.print(f"{len(alone)} cases are in {name} only:", style="yellow", highlight=False)
            for case in alone[:MOST_UNMATCHED]:
                out.print(f"  {text(case)}", highlight=False)
            if len(alone) > MOST_UNMATCHED:
                out.print(f"  … and {len(alone) - MOST_UNMATCHED} more")


def _table(changes: Sequence[Change], title: str, style: str) -> Table:
    """Make a table with what tells the cases apart in one column, what all share in the title."""
    shared = {key: value for key, value in changes[0].case.items() if all(c.case.get(key) == value for c in changes)}
    columns = ("case", "measure", "before", "after", "change", "noise")
    table = Table(*columns, title=f"{title} ({text(shared)})" if shared else title, title_style=style)
    for column in table.columns[2:]:
        column.justify = "right"
    for c in changes:
        own = {key: value for key, value in c.case.items() if key not in shared}
        change = "new" if math.isinf(c.ratio) else f"{c.ratio - 1:+.1%}"
        noise = f"±{number(c.noise)} ({c.basis})"
        table.add_row(text(own), label_of(c.key), number(c.before), number(c.after), change, noise)
    return table
