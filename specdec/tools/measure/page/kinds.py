"""The kinds of rows that pages know: `KINDS` maps them to sections; above it, what is computed of rows for charts.

Keys that begin with "_" are not shown in tables. Of the key that a chart draws, "_KEY_ends" has the 95% interval where
rows have no half width, and "_KEY_floor" the least that it could be.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from specdec.tools.measure.page.charts import grouped
from specdec.tools.measure.page.parts import (
    Card,
    Section,
    Table,
    named,
    numbered,
    shape_of,
    shortener,
    table,
    varying,
)
from specdec.tools.measure.page.sections import CASE, Best, Chart, RowKind, Rows
from specdec.tools.measure.rows import Row, label_of, measure_of
from specdec.tools.measure.statistics import conditional, wilson

GREEDY = ", greedy drafts"
BUCKETS = {"tau_by_position": "position in the answer (tokens)", "tau_by_context": "context length (tokens)"}
PHASES = ("draft", "verify", "accept", "extend")
SHAPE = "steps topk draft_tokens"  # of which "rounds_of" is made
SIZE = "_batch × tokens"
MODES = ("file", "dtype", "mode", "speculation", "draft", "compile")


def _acceptance(rows: Sequence[Row]) -> Rows:
    """Add the shape's name, which says how sampled chains are drafted, and conditional rates."""
    short, found = shortener(str(row.get("draft", "")) for row in rows), []
    for row in rows:
        is_greedy = row.get("sample_drafts") is False and bool(row.get("temperature")) and row.get("topk") == 1
        old = {"conditional_at": conditional(row["accept_at"]), "temperature": 0.0, "prompts": "prompts"}
        own: dict[str, Any] = old | {**row, "shape": shape_of(row) + GREEDY * is_greedy}
        own["draft"] = short(str(row.get("draft") or row.get("algo") or "plain"))
        own["_form"] = f"{own['shape'].partition(' ')[0]}s, T={own['temperature']:g}"
        found.append(own)
    return found


def _drafted(rows: Rows) -> Rows:
    return sorted((row for row in rows if row["shape"] != "plain"), key=lambda row: row["temperature"])


def _deepest(rows: Rows) -> Iterator[dict[str, Any]]:
    """Yield the rows of the deepest chain and of the deepest tree."""
    own = [row for row in _drafted(rows) if not row["shape"].endswith(GREEDY)]
    for alike in grouped(own, lambda row: row["topk"] == 1).values():
        deepest = max(alike, key=lambda row: (row["steps"], row["draft_tokens"]))["shape"]
        yield from (row for row in alike if row["shape"] == deepest)


def _positions(rows: Rows) -> Rows:
    """Return a row for each draft position, with its rate a_j and interval: over rounds where there is none."""
    found = []
    for row in _deepest(rows):
        ends: list[Any] = row.get("accept_ci95") or [wilson(a, row["rounds"]) for a in row["accept_at"]]
        for j, (rate, end) in enumerate(zip(row["accept_at"], ends, strict=True), 1):
            found.append({**row, "draft_position": j, "accepted": rate, "_accepted_ends": end})
    return found


def _buckets(key: str) -> Callable[[Rows], Rows]:
    """Return what makes a row for each bucket of tokens, drawn at its middle, of the lowest temperature."""

    def expanded(rows: Rows) -> Rows:
        own = [row for row in rows if row.get(key)]
        lowest = [row for row in own if row["temperature"] == min(row["temperature"] for row in own)]
        return [
            {**row, **part, BUCKETS[key]: (part["from"] + (part["to"] or 2 * part["from"])) / 2}
            for row in _deepest(lowest)
            for part in row[key]
        ]

    return expanded


def _bucket_tables(rows: Rows) -> list[Table]:
    """Make a table of all buckets of tokens, a line each."""
    hidden = {key for row in rows for key in row} - {"file", "draft", "prompts", "shape", "temperature"}
    return [
        table(label_of(key), [{**row, **part} for row in own for part in row[key]], (), hidden - {*own[0][key][0]})
        for key in BUCKETS
        if (own := [row for row in rows if row.get(key)])
    ]


def _with_rounds(rows: Sequence[Row]) -> Rows:
    return [{**row, "rounds_of": shape_of(row)} if "steps" in row else dict(row) for row in rows]


def _latency(rows: Sequence[Row]) -> Rows:
    """Add tokens/s of all requests, the floor of a round, the tau from which it pays, and its speed-up of plain."""
    found = [{"batch": 1, **row} for row in _with_rounds(rows)]
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


def _phases(rows: Rows) -> Rows:
    """Return a row for each round, with the milliseconds of its phases."""
    floors = {row["_case"]: row.get("floor_ms") for row in rows if row["what"] == "round"}
    return [
        {**{row["what"]: row["ms"] for row in own}, "_case": case, "_draft_floor": floors.get(case)}
        for case, own in grouped(rows, lambda row: row["_case"]).items()
    ]


def _start(rows: Sequence[Row]) -> Rows:
    """Add the seconds of attaching, of files without them the milliseconds, and what is left beside its parts."""
    found = [
        {"attach_s": row["ms"] / 1000 if "ms" in row else None, "compile_s": 0.0, **row} for row in _with_rounds(rows)
    ]
    for row in found:
        row["rest_s"] = max((row["attach_s"] or 0.0) - row["compile_s"] - row.get("capture_s", 0.0), 0.0)
    return found


def _engines(rows: Rows) -> Rows:
    names = numbered([row["_case"] for row in rows])
    return [{**row, "_engine": name} for row, name in zip(rows, names, strict=True)]


def _by_what(rows: Iterable[Row]) -> list[Table]:
    """Make a table for each `what`, or for each set of keys; what identifies a row comes first."""
    kinds = grouped(rows, lambda row: str(row.get("what") or ", ".join(list(row)[:3])))
    return [
        table(kind, own, sorted(own[0], key=lambda key: measure_of(key, own[0][key]) is not None))
        for kind, own in sorted(kinds.items())
    ]


def _gsm8k(rows: Sequence[Row]) -> Rows:
    """Write likelihoods with all their digits, as modes differ in the fourth or later; add the share of answers."""
    found = [dict(row) for row in rows]
    for row in found:
        if isinstance(row.get("nll"), float):
            row["nll"] = f"{row['nll']:.6f}"
        if row.get("answers") and "correct" in row:
            row["_correct (%)"] = 100 * row["correct"] / row["answers"]
            row["__correct (%)_ends"] = [100 * end for end in wilson(row["correct"] / row["answers"], row["answers"])]
    return found


def _in_words(rows: Rows) -> list[Table]:
    words = [{"file": row.get("file"), "against the first mode": row["says"]} for row in rows if "says" in row]
    return [table("In words", words)] if words else []


def eager_section(rows: Sequence[Row]) -> Section | None:
    """Make the section of what ran eagerly and why; None where no row counts that."""
    counted = [row for row in rows if "eager" in row or "runners" in row]
    if not counted:
        return None
    keys = varying(counted, CASE) or ["what"]
    lines = [{"row": named(row, keys), **line} for row in counted for line in _eager_lines(row)]
    card = Card(str(sum(line["eager runs"] for line in lines)), "eager runs", f"in {len(counted)} rows that count them")
    intro = "Forwards that no graph replayed, with the engine's reason where rows have one."
    if not lines:
        intro = f"None: in all {len(counted)} rows that count eager runs, graphs replayed every forward."
    tables = [table("Eager runs", lines)] if lines else []
    return Section("eager", "What ran eagerly, and why", intro, [card], [], tables)


def _eager_lines(row: Row) -> Iterator[dict[str, Any]]:
    """Yield a line for each runner of `row` that ran eagerly, or one for the row."""
    runners = row.get("runners")
    if isinstance(runners, Mapping):
        for name, counts in runners.items():
            if counts.get("eager"):
                why = _counted(counts.get("rejects", {}))
                yield {"runner": name, "eager runs": counts["eager"], "replays": counts.get("replays"), "why": why}
    elif isinstance(row.get("eager"), int) and row["eager"]:
        yield {"eager runs": row["eager"], "why": _counted(row.get("why_eager", {})) or row.get("notes")}


def _counted(reasons: Mapping[str, int]) -> str | None:
    """Write reasons with their counts."""
    return ", ".join(f"{reason}: {n}" for reason, n in reasons.items()) or None


KINDS = (  # a row belongs to the first that takes it
    RowKind(
        "acceptance",
        "Acceptance",
        "How many tokens a round emits (tau, the bonus token included), and how often each draft position is accepted. "
        "It depends on target, draft, prompts and sampling, not on the machine. Bars are 95% intervals over prompts.",
        lambda row: {"accept_at", "tau", "rounds", "draft_tokens"} <= row.keys(),
        _acceptance,
        series=("draft", "file"),
        charts=(
            Chart("tau by draft and shape", "dots", "shape", "tau", _drafted),
            Chart(
                *("Acceptance by position", "lines", "draft_position", "accepted", _positions),
                caption="Unconditional rates a_j: the share of rounds in which position j was accepted and kept. "
                "Intervals are over prompts where rows have them, else over rounds as if these were independent.",
            ),
            *(
                Chart(
                    *(label_of(key), "lines", axis, "tau", _buckets(key)),
                    caption="Each point is a range of tokens, drawn at its middle; its 95% interval is over prompts.",
                )
                for key, axis in BUCKETS.items()
            ),
        ),
        best=(Best("tau", "largest tau of", ("draft", "shape", "prompts"), by="_form"),),
        columns="file draft algo prompts shape temperature num_prompts tau ci95 rounds accept_at conditional_at "
        "tok_s predicted_at off_prediction",
        hidden=f"{SHAPE} sample_drafts {' '.join(BUCKETS)}",
        tables=_bucket_tables,
    ),
    RowKind(
        "latency",
        "Time to the first token and of a round",
        "TTFT is a call with one new token; a round is the time per token (TPOT) times tau. The floor is what reading "
        "weights and keys once, or multiplying, takes at best on this device.",
        lambda row: row.get("what") in ("ttft", "tpot") and "ms" in row,
        _latency,
        series=("rounds_of", "mode", "file", "label"),
        charts=(
            Chart("Prefill: time to the first token of one prompt", "lines", "tokens", "_first_token_ms", log="xy"),
            Chart("First tokens of several prompts at once", "dots", SIZE, "_first_tokens_ms", log="x"),
            Chart("A round beside its floor", "dots", SIZE, "round_ms", log="x"),
            Chart(
                *("Tokens/s against batch", "lines", "batch", "tokens/s"),
                log="xy",
                caption="Break-even is the dashed line of plain decoding: speculation pays above it.",
            ),
        ),
        best=(
            Best("_first_token_ms", "shortest TTFT", unit=" ms", pick=min),
            Best("round_ms", "shortest round", unit=" ms", pick=min),
            Best("tokens/s", "tokens/s at most"),
            Best("of_plain", "of plain decoding", unit="×"),
        ),
        columns="file label shape mode rounds_of batch tokens tokenizer what ms round_ms tau floor_ms tokens/s "
        "pays_from_tau of_plain host_ms idle_percent gap_us eager replayed",
        hidden=SHAPE,
    ),
    RowKind(
        "rounds",
        "Phases of a round",
        "The engine's core stepped alone: draft, verify, accept and extend, timed one by one.",
        lambda row: row.get("what") in (*PHASES, "round", "plain_step") and "ms" in row and "sampling" in row,
        _with_rounds,
        cases=("rounds_of", "file", "shape", "mode", "sampling", "batch", "tokens"),
        charts=(
            Chart(
                *("Milliseconds by phase", "bars", "_case", PHASES, _phases),
                caption="The black mark is the floor of the whole round.",
                axis="time (ms)",
            ),
        ),
        columns="file shape mode rounds_of sampling batch tokens what ms floor_ms tau",
        hidden=SHAPE,
    ),
    RowKind(
        "peers",
        "Other ways to the same text",
        "The same requests by transformers' own ways, by other libraries, and by engines; second run of two.",
        lambda row: {"what", "requests"} <= row.keys() and bool({"tokens_per_s", "error"} & row.keys()),
        lambda rows: sorted(map(dict, rows), key=lambda row: -row.get("tokens_per_s", 0.0)),
        cases=("what", "requests"),
        charts=(Chart("Tokens/s by way", "bars", "_case", "tokens_per_s"),),
        best=(Best("tokens_per_s", "tokens/s, fastest way", ("what", "shape", "requests"), by="file"),),
        columns="file what version shape requests new_tokens tokens_per_s seconds error",
    ),
    RowKind(
        "lookup",
        "Speed by set of prompts",
        "One prompt at a time. “hf” is the target's own generate; all texts are compared with its text.",
        lambda row: {"what", "prompts", "tok_s", "equal"} <= row.keys(),
        series=("what", "steps"),
        charts=(Chart("Tokens/s by set of prompts", "dots", "prompts", "tok_s", log="x"),),
        best=(Best("tok_s", "tokens/s, one prompt at a time", ("what", "prompts")),),
        columns="file what prompts steps num_prompts tok_s tau equal",
    ),
    RowKind(
        "gsm8k",
        "GSM8K: does a mode change the model?",
        "Mean negative log-likelihood of the gold solutions and greedy answers, mode by mode. A mode that rounds "
        "differently may part at near ties; it must not be worse beyond chance (McNemar's test on answers, paired "
        "bootstrap on likelihoods).",
        lambda row: str(row.get("what", "")).startswith("gsm8k") or {"nll", "answers"} <= row.keys(),
        _gsm8k,
        series=("mode",),
        cases=MODES,
        charts=(
            Chart(
                *("Likelihood against the first mode", "dots", "_case", "nll_difference"),
                caption="Bars are 95% intervals of the paired bootstrap.",
            ),
            Chart(
                *("Correct answers by mode", "dots", "_case", "_correct (%)"),
                caption="Bars are Wilson's 95% intervals. Modes answer the same questions, so McNemar's test, which "
                "pairs, sees more.",
            ),
        ),
        best=(
            Best("mcnemar_p", "McNemar's p, smallest of all modes", MODES, pick=min),
            Best("_correct (%)", "GSM8K correct, worst mode", MODES, "%", min),
        ),
        columns="file dtype mode speculation draft compile items tokens nll nll_difference nll_ci95 answers "
        "correct mcnemar_p",
        hidden="gaps runners says",
        tables=_in_words,
    ),
    RowKind(
        "lossless",
        "Lossless: texts beside another way's",
        "Texts equal token for token to those of the way named, and how many of the others part where the target's own "
        "two logits are nearly equal, which rounding may decide.",
        lambda row: {"compared", "equal"} <= row.keys(),
        best=(
            Best("equal", "texts equal, at least", ("compared", "draft", "check"), pick=min),
            Best("unexplained", "differences unexplained, at most", ("compared", "draft", "check")),
        ),
        columns="file draft algo num_steps topk num_draft_tokens backend batch check against temperature compared "
        "equal near_ties unexplained tau seconds",
    ),
    RowKind(
        "serving",
        "The server",
        "Streams of requests from another process; p50 and p99 over requests.",
        lambda row: row.get("what") in ("clients", "soak"),
        best=(Best("requests_s", "requests/s", ("clients", "ttft_ms_p50")),),
        tables=_by_what,
    ),
    RowKind(
        "graphs",
        "Start-up and graphs",
        "What attaching an engine took, once, and what its captured graphs hold on the device.",
        lambda row: row.get("what") in ("attach", "build", "capture") and bool({"capture_s", "attach_s"} & row.keys()),
        _start,
        cases=("rounds_of", "file", "label", "shape", "mode", "batch", "tokens", "attempt"),
        charts=(
            Chart("Attaching", "bars", "_engine", ("compile_s", "capture_s", "rest_s"), _engines, axis="time (s)"),
            Chart("Memory of captured graphs", "bars", "_engine", "graph_mib", _engines),
        ),
        best=(Best("attach_s", "attaching, at most", unit=" s"),),
        columns="file label shape mode rounds_of batch tokens attach_s",
        hidden="rest_s",
    ),
    RowKind("others", "Other measurements", "", lambda row: True, tables=_by_what),
)
