"""The page's sections on correctness: GSM8K likelihoods and answers by mode, text held against `generate`."""

from collections.abc import Sequence
from typing import Any

from specdec.measure.page import charts
from specdec.measure.page.palette import Palette
from specdec.measure.page.parts import Card, Figure, Row, Section, named, rest_of, table, varying
from specdec.measure.statistics import wilson

MODES = ("file", "dtype", "mode", "speculation", "draft", "compile")
DIFFERENCES = ("difference", "nll_difference", "nll_diff")
INTERVALS = ("interval", "ci95", "difference_ci95", "bootstrap95", "nll_ci95")
P_VALUES = ("mcnemar_p", "p", "p_value")


def is_gsm8k(row: Row) -> bool:
    """Whether `row` scores a mode on GSM8K."""
    return str(row.get("what", "")).startswith("gsm8k") or ("nll" in row and "answers" in row)


def is_lossless(row: Row) -> bool:
    """Whether `row` counts texts that are equal to another way's."""
    return "compared" in row and "equal" in row


def first_of(row: Row, keys: Sequence[str]) -> Any:
    """Return the value of the first of `keys` that `row` has: names of these differ with the age of a file."""
    return next((row[key] for key in keys if row.get(key) is not None), None)


def gsm8k_section(rows: Sequence[Row], palette: Palette) -> Section:
    """Make the section: likelihoods of the gold solutions, and correct answers, of every mode."""
    section = Section("gsm8k", "GSM8K: does a mode change the model?")
    section.intro = (
        "Mean negative log-likelihood of the gold solutions and greedy answers, mode by mode. A mode that rounds "
        "differently may part at near ties; it must not be worse beyond chance (McNemar's test on answers, paired "
        "bootstrap on likelihoods)."
    )
    own = [_completed(row) for row in rows]
    keys = varying(own, MODES) or ["mode"]
    section.figures = [*_differences(own, keys, palette), *_answers(own, keys, palette)]
    known = (*MODES, "items", "tokens", "nll", *DIFFERENCES, *INTERVALS, "answers", "correct", *P_VALUES)
    hidden = ("gaps", "runners", "says")
    section.tables = [table("Every mode", own, [*known, *(key for key in rest_of(own, known) if key not in hidden)])]
    words = [{"file": row.get("file"), "against the first mode": row["says"]} for row in own if "says" in row]
    if words:
        section.tables.append(table("In words", words))
    smallest = min((p for row in own if (p := first_of(row, P_VALUES)) is not None), default=None)
    scored = [row for row in own if row.get("answers")]
    if smallest is not None:
        section.cards = [Card(f"p = {smallest:.2g}", "McNemar, smallest of all modes", f"{len(own)} modes")]
    elif scored:
        share = min(row["correct"] / row["answers"] for row in scored if "correct" in row)
        section.cards = [Card(f"{share:.1%}", "GSM8K correct, worst mode", f"{len(scored)} modes")]
    return section


def _completed(row: Row) -> dict[str, Any]:
    """Write likelihoods with all their digits: modes differ in the fourth or later."""
    exact = {key: f"{row[key]:.6f}" for key in ("nll",) if isinstance(row.get(key), float)}
    found = {**row, **exact}
    if isinstance(found.get("speculation"), bool):
        found["speculation"] = "speculation" if found["speculation"] else "plain"
    return found


def _differences(rows: Sequence[Row], keys: Sequence[str], palette: Palette) -> list[Figure]:
    dots = []
    for row in rows:
        middle, interval = first_of(row, DIFFERENCES), first_of(row, INTERVALS)
        if not isinstance(middle, int | float):
            continue
        if isinstance(interval, list | tuple) and len(interval) == 2:
            interval = (middle - min(interval), max(interval) - middle)
        dots.append(charts.Dot(named(row, keys), _mode(row), middle, interval))
    if not dots:
        return []
    svg = charts.dots({"": dots}, "difference of NLL (nats per token)", palette, y="mode")
    return [Figure("Likelihood against the first mode", svg, "Bars are 95% intervals of the paired bootstrap.")]


def _answers(rows: Sequence[Row], keys: Sequence[str], palette: Palette) -> list[Figure]:
    dots = []
    for row in rows:
        if row.get("answers") and row.get("correct") is not None:
            share = row["correct"] / row["answers"]
            low, high = wilson(share, row["answers"])
            ends = (100 * (share - low), 100 * (high - share))
            dots.append(charts.Dot(named(row, keys), _mode(row), 100 * share, ends))
    if not dots:
        return []
    svg = charts.dots({"": dots}, "correct answers (%)", palette, y="mode")
    caption = (
        "Bars are Wilson's 95% intervals. Modes answer the same questions, so McNemar's test, which pairs, sees more."
    )
    return [Figure("Correct answers by mode", svg, caption)]


def _mode(row: Row) -> str:
    return str(row.get("mode", "mode"))


def lossless_section(rows: Sequence[Row]) -> Section:
    """Make the section of texts held against another way to the same text."""
    section = Section("lossless", "Lossless: texts held against another way")
    section.intro = (
        "Texts equal token for token to those of the way named, and how many of the others part where the target's own "
        "two logits are nearly equal, which rounding may decide."
    )
    equal, compared = sum(row["equal"] for row in rows), sum(row["compared"] for row in rows)
    left = sum(row.get("unexplained", 0) for row in rows)
    detail = f"{left} unexplained" if left else "none unexplained" if any("unexplained" in r for r in rows) else ""
    section.cards = [Card(f"{equal} of {compared}", "texts equal", detail)]
    first = ["file", "draft", "algo", "num_steps", "topk", "num_draft_tokens", "backend", "batch", "check", "against"]
    first += ["temperature", "compared", "equal", "near_ties", "unexplained", "tau", "seconds"]
    section.tables = [table("Every comparison", rows, [*first, *rest_of(rows, first)])]
    return section
