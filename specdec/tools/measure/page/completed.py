"""Values computed from rows for charts and tables, kind by kind.

Keys that begin with "_" are not shown in tables. For the key that a chart draws, "_KEY_ends" has the 95% interval if
rows have no half width, and "_KEY_floor" its lower bound.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from specdec.core import grouped
from specdec.tools.measure.page.sections import Rows
from specdec.tools.measure.rows import Row, label_of, measure_of
from specdec.tools.measure.statistics import conditional, wilson
from specdec.tools.measure.tables import Table, numbered, shape_of, shortener, table

GREEDY, LOOKUP = ", greedy drafts", ", lookup"
BUCKETS = {"tau_by_position": "position in the answer (tokens)", "tau_by_context": "context length (tokens)"}
SHAPE = "steps topk draft_tokens"  # the keys from which "rounds_of" is made
SIZE = "_batch × tokens"


def acceptance(rows: Sequence[Row]) -> Rows:
    """Add the shape's name, with the kind of drafting for sampled requests, and conditional rates."""
    short, found = shortener(str(row.get("draft", "")) for row in rows), []
    for row in rows:
        is_greedy = row.get("sample_drafts") is False and bool(row.get("temperature"))
        old = {"conditional_at": conditional(row["accept_at"]), "temperature": 0.0, "prompts": "prompts"}
        shape = shape_of(row) + LOOKUP * bool(row.get("lookup")) + GREEDY * is_greedy
        own: dict[str, Any] = old | {**row, "shape": shape}
        own["draft"] = short(str(row.get("draft") or row.get("algo") or "plain"))
        own["_form"] = f"{own['shape'].partition(' ')[0]}s, T={own['temperature']:g}"
        found.append(own)
    return found


def drafted(rows: Rows) -> Rows:
    """Return the rows with a draft, by temperature."""
    return sorted((row for row in rows if row["shape"] != "plain"), key=lambda row: row["temperature"])


def _deepest(rows: Rows) -> Iterator[dict[str, Any]]:
    """Yield the rows of the deepest chain and of the deepest tree."""
    own = [row for row in drafted(rows) if not row["shape"].endswith(GREEDY)]
    for alike in grouped(own, lambda row: row["topk"] == 1).values():
        deepest = max(alike, key=lambda row: (row["steps"], row["draft_tokens"]))["shape"]
        yield from (row for row in alike if row["shape"] == deepest)


def positions(rows: Rows) -> Rows:
    """Return a row for each draft position, with its rate a_j and interval; over rounds if there is no interval."""
    found = []
    for row in _deepest(rows):
        ends: list[Any] = row.get("accept_ci95") or [wilson(a, row["rounds"]) for a in row["accept_at"]]
        for j, (rate, end) in enumerate(zip(row["accept_at"], ends, strict=True), 1):
            found.append({**row, "draft_position": j, "accepted": rate, "_accepted_ends": end})
    return found


def buckets(key: str) -> Callable[[Rows], Rows]:
    """Return a function that makes a row for each bucket of tokens, drawn at its middle, of the lowest temperature."""

    def expanded(rows: Rows) -> Rows:
        own = [row for row in rows if row.get(key)]
        lowest = [row for row in own if row["temperature"] == min(row["temperature"] for row in own)]
        return [
            {**row, **part, BUCKETS[key]: (part["from"] + (part["to"] or 2 * part["from"])) / 2}
            for row in _deepest(lowest)
            for part in row[key]
        ]

    return expanded


def bucket_tables(rows: Rows) -> list[Table]:
    """Make a table of all buckets of tokens, one line each."""
    hidden = {key for row in rows for key in row} - {"file", "draft", "prompts", "shape", "temperature"}
    return [
        table(label_of(key), [{**row, **part} for row in own for part in row[key]], (), hidden - {*own[0][key][0]})
        for key in BUCKETS
        if (own := [row for row in rows if row.get(key)])
    ]


def with_rounds(rows: Sequence[Row]) -> Rows:
    """Name the shape of rounds."""
    return [{**row, "rounds_of": shape_of(row)} if "steps" in row else dict(row) for row in rows]


def latency(rows: Sequence[Row]) -> Rows:
    """Add tokens/s of all requests, the floor of a round, its break-even tau, and its speed-up over plain decoding."""
    found = [{"batch": 1, **row} for row in with_rounds(rows)]
    alike = ("file", "label", "shape", "mode", "batch", "tokens", "tokenizer", "what")
    plain = {tuple(row.get(key) for key in alike): row for row in reversed(found) if row.get("steps") == 0}
    for row in found:
        row[SIZE] = f"{row['batch']} × {row['tokens']}"
        if row["what"] == "ttft":
            key = "_first_token_ms" if row["batch"] == 1 else "_first_tokens_ms"
            row |= {key: row["ms"], f"_{key}_floor": row.get("floor_ms")}
        elif row["ms"]:
            row["tokens/s"] = round(row["batch"] * 1000 / row["ms"], 1)
            row["_round_ms_floor"] = row["floor_ms"] * (row.get("tau") or 1.0) if row.get("floor_ms") else None
            other = plain.get(tuple(row.get(key) for key in alike))
            if other and row.get("round_ms") and row is not other:
                row["pays_from_tau"] = round(row["round_ms"] / other["ms"], 2)
                row["of_plain"] = row["tau"] / row["pays_from_tau"]
    return found


def start(rows: Sequence[Row]) -> Rows:
    """Add the seconds of attaching, from milliseconds in files without them, and the rest besides its parts."""
    found = [
        {"attach_s": row["ms"] / 1000 if "ms" in row else None, "compile_s": 0.0, **row} for row in with_rounds(rows)
    ]
    for row in found:
        row["rest_s"] = max((row["attach_s"] or 0.0) - row["compile_s"] - row.get("capture_s", 0.0), 0.0)
    return found


def engines(rows: Rows) -> Rows:
    """Name the engines."""
    names = numbered([row["_case"] for row in rows])
    return [{**row, "_engine": name} for row, name in zip(rows, names, strict=True)]


def by_what(rows: Iterable[Row]) -> list[Table]:
    """Make a table for each `what`, or for each set of keys; the identifying keys come first."""
    kinds = grouped(rows, lambda row: str(row.get("what") or ", ".join(list(row)[:3])))
    return [
        table(kind, own, sorted(own[0], key=lambda key: measure_of(key, own[0][key]) is not None))
        for kind, own in sorted(kinds.items())
    ]


def gsm8k(rows: Sequence[Row]) -> Rows:
    """Write likelihoods with all their digits, since modes differ in the fourth or later; add the share of answers, and
    how often prefills were replayed."""
    found = [dict(row) for row in rows]
    for row in found:
        if isinstance(row.get("nll"), float):
            row["nll"] = f"{row['nll']:.6f}"
        prefills = (row.get("runners") or {}).get("target_prefill")
        row |= {key: prefills[key] for key in ("replays", "eager") if prefills and key in prefills}
        if row.get("answers") and "correct" in row:
            row["_correct (%)"] = 100 * row["correct"] / row["answers"]
            row["__correct (%)_ends"] = [100 * end for end in wilson(row["correct"] / row["answers"], row["answers"])]
    return found


def in_words(rows: Rows) -> list[Table]:
    """Make a table of the sentences in rows."""
    words = [{"file": row.get("file"), "against the first mode": row["says"]} for row in rows if "says" in row]
    return [table("In words", words)] if words else []


def peers(rows: Sequence[Row]) -> Rows:
    """Add the speed in multiples of `generate`'s; the fastest comes first."""
    found = sorted(map(dict, rows), key=lambda row: -row.get("tokens_per_s", 0.0))
    base = {row.get("file"): row["tokens_per_s"] for row in found if row["what"] == "generate" and "error" not in row}
    for row in found:
        if base.get(row.get("file")) and "tokens_per_s" in row:
            row["of_generate"] = row["tokens_per_s"] / base[row.get("file")]
    return found
