"""Rows of result files: reads files of any age, and defines what keys measure and how values are written as text.

A key that `measure_of` knows is a measured value. Every other key with a plain value identifies its row: a draft, a
batch size, a temperature. Pages and `compare` read rows through these tables.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

Row = Mapping[str, Any]


@dataclass(frozen=True)
class Record:
    """A result file: its stem, its rows, and what it says about them (command, versions, gpu, commit, config, …)."""

    name: str
    rows: list[dict[str, Any]]
    about: dict[str, Any]


def read_record(path: str | Path) -> Record:
    """Read a result file. ValueError describes what is wrong with any other file."""
    file = Path(path)
    if not file.is_file():
        raise ValueError(f"result file {str(path)!r}: no such file; expected JSON that a `specdec bench` command wrote")
    try:
        found = json.loads(file.read_text("utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"result file {str(path)!r}: not JSON ({error})") from error
    if not isinstance(found, dict) or not isinstance(found.get("rows"), list):
        raise ValueError(f"result file {str(path)!r}: expected an object with a list of 'rows', as write_results makes")
    rows = [row if isinstance(row, dict) else {"value": row} for row in found.pop("rows")]
    return Record(file.stem, rows, found)


class Measure(NamedTuple):
    """A measured value. better: "lower", "higher", or "" for values that are not judged.

    ci: the key with the half width of its 95% interval; of: the key with the number of trials of a count of successes;
    threshold: relative change that is noise, if the general one would be too wide.
    """

    unit: str = ""
    better: str = ""
    ci: str = ""
    of: str = ""
    threshold: float | None = None


DESCRIBED = """
acc bits calls callers_saw ci95 emitted expected_differing experts_in_use faults finished flips_per_token free_pages
hf_new_tokens logits near_ties neighbours_told note notes num_graphs off_prediction only_base
only_here refused replayed rounds rss_mib_end rss_mib_start run runners says status tau_of_starts
vanished version
"""
MEASURES = {
    "tau": Measure("tokens/round", "higher", ci="ci95"),
    "expected_tau": Measure("tokens/round"),
    "tok_s": Measure("tokens/s", "higher", ci="tok_s_ci95"),
    "host_ms": Measure("ms"),
    "gap_us": Measure("µs"),
    "graph_mib_of": Measure("MiB"),
    "answer_s": Measure("s"),
    "seconds": Measure("s"),
    "minutes": Measure("min"),
    "cached_tokens": Measure("tokens"),
    "near_tie": Measure("logits"),
    "eager": Measure("", "lower"),
    "nll_difference": Measure("nats/token", ci="nll_ci95"),
    "accepted": Measure("share of rounds"),
    "nll": Measure("nats/token", "lower", threshold=1e-3),
    "correct": Measure("", "higher", of="answers"),
    "equal": Measure("", "higher", threshold=0.0),
    "outcome": Measure("", "higher", threshold=0.0),
    **dict.fromkeys(("unexplained", "error", "errors", "lost", "wrong_texts"), Measure("", "lower", threshold=0.0)),
    "logits_differ": Measure("", "lower", threshold=0.0),
    **dict.fromkeys(DESCRIBED.split(), Measure()),
}
# For keys that are not above, by their last word; the first match. "_p50" and "_p99" may follow it.
ENDINGS = {
    "tok_s": Measure("tokens/s", "higher"),
    "tokens_per_s": Measure("tokens/s", "higher"),
    "requests_s": Measure("requests/s", "higher"),
    "ms": Measure("ms", "lower"),
    "us": Measure("µs", "lower"),
    "s": Measure("s", "lower"),
    "mib": Measure("MiB", "lower"),
    "bytes": Measure("bytes", "lower"),
    "percent": Measure("%"),
}
NOT_OURS = ("floor", "hf_", "torch_", "sdpa_", "flex_", "flashinfer_")  # prefixes of keys that are not judged
LABELS = {  # for keys whose own words are not clear
    **{"algo": "algorithm", "num_prompts": "prompts measured", "draft_vocab": "tokens drafted from"},
    **{"steps": "S", "num_steps": "S", "topk": "K", "draft_tokens": "D", "num_draft_tokens": "D"},
    **{"tokenizer": "with text", "sample_drafts": "drafts sampled", "max_new_tokens": "new tokens at most"},
    **{"ci95": "±95%", "accept_ci95": "±95% of accepted", "accept_at": "accepted at 1, 2, …", "ms": "time"},
    **{"predicted_at": "predicted at 1, 2, …", "us": "time", "seconds": "time", "minutes": "time", "nll": "NLL"},
    **{"only_here": "right only here", "only_base": "right only in the first mode", "says": "in words"},
    **{"tok_s_ci95": "±95% of tokens/s"},
    **{"answer_s": "answers took", "eager": "eager runs", "gaps": "logit gaps"},
    **{"cached_tokens": "cached", "num_graphs": "graphs", "graph_mib_of": "graph memory by runner"},
}
IDENTIFYING_FLOATS = frozenset({"temperature", "top_p", "min_p", "repetition_penalty", "alpha"})
RUN_NAMES = frozenset({"label", "file", "commit", "date"})  # they identify the run of a row, not its case


def _ending(key: str) -> tuple[str, str]:
    """Split `key` into its other words and its ending in ENDINGS, "" if it has none."""
    name = key.removesuffix("_p50").removesuffix("_p99")
    ending = next((ending for ending in ENDINGS if f"_{name}".endswith(f"_{ending}")), "")
    return name.removesuffix(ending) + key.removeprefix(name), ending


def measure_of(key: str, value: Any) -> Measure | None:
    """Return what `key` measures, or None if it identifies its row; unknown keys by their ending and type of value."""
    ending = _ending(key)[1]
    if key in MEASURES or not ending:
        is_described = isinstance(value, dict | list) or (isinstance(value, float) and key not in IDENTIFYING_FLOATS)
        return MEASURES.get(key, Measure() if is_described else None)
    return Measure(ENDINGS[ending].unit) if key.startswith(NOT_OURS) else ENDINGS[ending]


def label_of(key: str) -> str:
    """Return the heading of a column, with the unit of a measure."""
    words, _ = _ending(key)
    label = LABELS.get(key, " ".join(filter(None, words.split("_"))))
    measure = measure_of(key, None) or Measure()
    return f"{label} ({measure.unit})" if label and measure.unit else label or measure.unit


def identity(row: Row) -> dict[str, Any]:
    """Return the keys of `row` that identify its case, without those of its run."""
    counted = {"tokens"} if "tokens_per_s" in row else set()  # emitted ones; elsewhere the length of prompts
    return {
        key: value
        for key, value in row.items()
        if key not in RUN_NAMES | counted and value is not None and measure_of(key, value) is None
    }


def text(value: Any) -> str:
    """Write a value as a cell of a table."""
    if value is None:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return number(value)
    if isinstance(value, Mapping):
        return ", ".join(f"{key}: {text(one)}" for key, one in value.items()) or "–"
    if isinstance(value, list | tuple):
        return _listed(value)
    return f"{value:,}" if isinstance(value, int) and abs(value) >= 10_000 else str(value)


def number(value: float) -> str:
    """Write a number with three to four significant digits."""
    if abs(value) >= 100:  # nan is not
        return f"{value:,.{int(abs(value) < 1000)}f}".removesuffix(".0")
    return f"{value:.3f}".rstrip("0").rstrip(".") if abs(value) >= 1 else f"{value:.4g}"


def _listed(values: Sequence[Any], most: int = 12) -> str:
    is_short = bool(values) and all(isinstance(v, float) for v in values) and max(map(abs, values)) >= 0.05
    shown = " ".join(f"{v:.2f}" for v in values[:most]) if is_short else ", ".join(map(text, values[:most]))
    return (shown or "–") + (f" … ({len(values)} in all)" if len(values) > most else "")
