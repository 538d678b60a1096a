"""The kinds of rows: `KINDS` maps them to sections of pages, and to tables on a terminal."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from specdec.core import grouped
from specdec.tools.measure.page import completed
from specdec.tools.measure.page.completed import BUCKETS, SHAPE, SIZE, engines
from specdec.tools.measure.page.sections import CASE, Best, Card, Chart, RowKind, Section
from specdec.tools.measure.rows import Row, label_of
from specdec.tools.measure.tables import named, table, varying

MODES = ("file", "dtype", "mode", "speculation", "draft", "compile")


def kind_of(row: Row) -> RowKind:
    """Return the kind of `row`: the first that accepts it."""
    return next(kind for kind in KINDS if kind.takes(row))


def print_rows(rows: Sequence[Row]) -> None:
    """Print a table for each kind of rows, and one of eager runs."""
    for kind, own in grouped(rows, kind_of).items():
        keys = (kind.brief or kind.columns).split()
        for each in [table("", kind.complete(own), keys, None)] if keys else kind.tables(own):
            each.print()
    eager = eager_section(rows)
    for each in eager.tables if eager else ():
        each.print()


def eager_section(rows: Sequence[Row]) -> Section | None:
    """Make the section of eager runs and their reasons; None if no row counts them."""
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
    return ", ".join(f"{reason}: {n}" for reason, n in reasons.items()) or None


KINDS = (  # a row belongs to the first kind that accepts it
    RowKind(
        "acceptance",
        "Acceptance",
        "How many tokens a round emits (tau, the bonus token included), and how often each draft position is accepted. "
        "It depends on target, draft, prompts and sampling, not on the machine. Bars are 95% intervals over prompts.",
        lambda row: {"accept_at", "tau", "rounds", "draft_tokens"} <= row.keys(),
        completed.acceptance,
        series=("draft", "file"),
        charts=(
            Chart("tau by draft and shape", "dots", "shape", "tau", completed.drafted),
            Chart(
                *("Acceptance by position", "lines", "draft_position", "accepted", completed.positions),
                caption="Unconditional rates a_j: the share of rounds in which position j was accepted and kept. "
                "Intervals are over prompts where rows have them, else over rounds as if these were independent.",
            ),
            *(
                Chart(
                    *(label_of(key), "lines", axis, "tau", completed.buckets(key)),
                    caption="Each point is a range of tokens, drawn at its middle; its 95% interval is over prompts.",
                )
                for key, axis in BUCKETS.items()
            ),
        ),
        best=(Best("tau", "largest tau of", ("draft", "shape", "prompts"), by="_form"),),
        columns="file draft algo prompts shape temperature num_prompts tau ci95 rounds accept_at conditional_at "
        "tok_s predicted_at off_prediction",
        brief="draft prompts category draft_vocab shape temperature tau ci95 rounds accept_at predicted_at "
        "off_prediction",
        hidden=f"{SHAPE} sample_drafts lookup {' '.join(BUCKETS)}",
        tables=completed.bucket_tables,
    ),
    RowKind(
        "latency",
        "Time to the first token and of a round",
        "TTFT is a call with one new token; a round is the time per token (TPOT) times tau. The floor is the least "
        "time that reading weights and keys once, or multiplying, takes on this device.",
        lambda row: row.get("what") in ("ttft", "tpot") and "ms" in row,
        completed.latency,
        series=("rounds_of", "mode", "file", "label"),
        charts=(
            Chart("Prefill: time to the first token of one prompt", "lines", "tokens", "_first_token_ms", log="xy"),
            Chart("First tokens of several prompts at once", "dots", SIZE, "_first_tokens_ms", log="x"),
            Chart("A round and its floor", "dots", SIZE, "round_ms", log="x"),
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
        columns="file label shape mode rounds_of batch tokens tokenizer what ms round_ms tau expected_tau floor_ms "
        "tokens/s pays_from_tau of_plain host_ms idle_percent gap_us eager replayed",
        brief="what sampling mode rounds_of draft_vocab batch tokens tokenizer ms round_ms tau expected_tau floor_ms "
        "host_ms idle_percent eager",
        hidden=SHAPE,
    ),
    RowKind(
        "peers",
        "Other ways to generate the same text",
        "The same requests through transformers, other libraries and specdec engines; the second of two runs.",
        lambda row: {"what", "requests"} <= row.keys() and bool({"tokens_per_s", "error"} & row.keys()),
        completed.peers,
        cases=("what", "requests"),
        charts=(Chart("Tokens/s by way", "bars", "_case", "tokens_per_s"),),
        best=(Best("tokens_per_s", "tokens/s, fastest way", ("what", "shape", "requests"), by="file"),),
        columns="file what version shape requests new_tokens tokens_per_s of_generate tau expected_tau equal "
        "seconds error",
        brief="what version requests one_at_a_time tokens_per_s of_generate tau expected_tau equal error",
    ),
    RowKind(
        "gsm8k",
        "GSM8K: does a mode change the model?",
        "Mean negative log-likelihood of the gold solutions and greedy answers, mode by mode. A mode that rounds "
        "differently may part at near ties; it must not be worse beyond chance (McNemar's test on answers, paired "
        "bootstrap on likelihoods).",
        lambda row: str(row.get("what", "")).startswith("gsm8k"),
        completed.gsm8k,
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
        brief="dtype mode draft nll nll_difference nll_ci95 replays eager answers equal near_ties correct mcnemar_p",
        hidden="gaps runners says",
        tables=completed.in_words,
    ),
    RowKind(
        "bits",
        "Bits: tokens and logits compared with plain decoding",
        "Texts equal token for token to plain decoding of the same engine, and rows of logits that differ in any bit, "
        "up to the first differing token. Texts that differ although the engine calls its bits equal are unexplained.",
        lambda row: "logits_differ" in row,
        best=(Best("logits_differ", "rows of logits different, at most", ("emitted", "draft", "way"), pick=max),),
        columns="file draft algo num_steps topk num_draft_tokens way batch against compared equal emitted logits "
        "logits_differ unexplained bits tau seconds",
        brief="draft num_steps topk num_draft_tokens way batch compared equal emitted logits_differ unexplained tau",
    ),
    RowKind(
        "lossless",
        "Lossless: texts compared with another way's",
        "Texts equal token for token to those of the way named, and how many of the others part where the target's own "
        "two logits are nearly equal, which rounding may decide.",
        lambda row: {"compared", "equal"} <= row.keys(),
        best=(
            Best("equal", "texts equal, at least", ("compared", "draft", "check"), pick=min),
            Best("unexplained", "differences unexplained, at most", ("compared", "draft", "check")),
        ),
        columns="file draft algo num_steps topk num_draft_tokens backend batch check against temperature compared "
        "equal near_ties unexplained tau seconds",
        brief="draft num_steps topk check against batch compared equal near_ties unexplained tau",
    ),
    RowKind(
        "serving",
        "The server",
        "Streams of requests from another process; p50 and p99 over requests.",
        lambda row: row.get("what") in ("clients", "arrivals", "soak"),
        best=(Best("requests_s", "requests/s", ("clients", "ttft_ms_p50")),),
        tables=completed.by_what,
    ),
    RowKind(
        "graphs",
        "Start-up and graphs",
        "What attaching an engine took, once, and what its captured graphs hold on the device.",
        lambda row: row.get("what") == "attach" and bool({"capture_s", "attach_s"} & row.keys()),
        completed.start,
        cases=("rounds_of", "file", "label", "shape", "mode", "batch", "tokens", "attempt"),
        charts=(
            Chart("Attaching", "bars", "_engine", ("compile_s", "capture_s", "rest_s"), engines, axis="time (s)"),
            Chart("Memory of captured graphs", "bars", "_engine", "graph_mib", engines),
        ),
        best=(Best("attach_s", "attaching, at most", unit=" s"),),
        columns="file label shape mode rounds_of batch tokens attach_s",
        brief="what mode rounds_of draft_vocab batch tokens attach_s compile_s capture_s num_graphs graph_mib",
        hidden="rest_s",
    ),
    RowKind("others", "Other measurements", "", lambda row: True, tables=completed.by_what),
)
