"""What the keys of result rows mean: labels, units, and of measured values which direction is better.

Every other key with a plain value identifies its row: a draft, a batch size, a temperature. The page and `compare` read
rows of any age through this table.
"""

import re
from collections.abc import Mapping
from typing import Any, NamedTuple


class Measure(NamedTuple):
    """A measured value. better: "lower", "higher", or "" for what describes and is not judged.

    ci: the key with the half width of its 95% interval; of: the key with the trials that it counts successes of;
    threshold: relative change that is noise, where the general one would be too wide.
    """

    label: str
    unit: str = ""
    better: str = ""
    ci: str = ""
    of: str = ""
    threshold: float | None = None


MEASURES = {
    "tau": Measure("tau", "tokens/round", "higher", ci="ci95"),
    "ci95": Measure("±95%"),
    "rounds": Measure("rounds"),
    "accept_at": Measure("accepted at 1, 2, …"),
    "accept_ci95": Measure("±95% of accepted"),
    "predicted_at": Measure("predicted at 1, 2, …"),
    "off_prediction": Measure("off prediction"),
    "tau_by_position": Measure("tau by position"),
    "tau_by_context": Measure("tau by context"),
    "tau_of_starts": Measure("tau of starts"),
    "held_out_tau": Measure("held-out tau", "tokens/round", "higher"),
    "ms": Measure("time", "ms", "lower"),
    "round_ms": Measure("round", "ms", "lower"),
    "floor_ms": Measure("floor", "ms"),
    "cached_tokens": Measure("cached", "tokens"),
    "experts_in_use": Measure("experts in use"),
    "host_ms": Measure("host", "ms"),
    "us": Measure("time", "µs", "lower"),
    "calls": Measure("calls"),
    "gap_us": Measure("gap", "µs"),
    "idle_percent": Measure("GPU idle", "%"),
    "tok_s": Measure("tokens/s", "", "higher"),
    "tokens_per_s": Measure("tokens/s", "", "higher"),
    "hf_tok_s": Measure("HF generate", "tokens/s"),
    "hf_new_tokens": Measure("tokens timed"),
    "plain_tok_s": Measure("plain decoding", "tokens/s", "higher"),
    "spec_tok_s": Measure("speculation", "tokens/s", "higher"),
    "requests_s": Measure("requests/s", "", "higher"),
    "tflops": Measure("TFLOP/s"),
    "of_copy_rate": Measure("share of copy rate"),
    "compile_s": Measure("compile", "s", "lower"),
    "capture_s": Measure("capture", "s", "lower"),
    "attach_s": Measure("attach", "s", "lower"),
    "graph_mib": Measure("graph memory", "MiB", "lower"),
    "graph_mib_of": Measure("graph memory by runner", "MiB"),
    "attach_mib": Measure("attach memory", "MiB", "lower"),
    "estimated_mib": Measure("estimated", "MiB"),
    "num_graphs": Measure("graphs"),
    "launches": Measure("launches", "", "lower"),
    "kernel_launches": Measure("kernel launches", "", "lower"),
    "nodes": Measure("graph nodes"),
    "eager": Measure("eager runs", "", "lower"),
    "replayed": Measure("replayed"),
    "busy_from": Measure("busy from", "tokens"),
    "runners": Measure("runners"),
    "reasons": Measure("reasons"),
    "notes": Measure("notes"),
    "note": Measure("note"),
    "nll": Measure("NLL", "nats/token", "lower", threshold=1e-3),
    "correct": Measure("correct", "", "higher", of="answers"),
    "equal": Measure("equal", "", "higher", threshold=0.0),
    "near_ties": Measure("near ties"),
    "near_tie": Measure("near tie", "logits"),
    "only_here": Measure("right only here"),
    "only_base": Measure("right only in the first mode"),
    "says": Measure("in words"),
    "unexplained": Measure("unexplained", "", "lower", threshold=0.0),
    "gaps": Measure("logit gaps"),
    "flips_per_token": Measure("flips per token"),
    "expected_differing": Measure("expected differing"),
    "first_difference": Measure("first difference"),
    "seconds": Measure("time", "s"),
    "minutes": Measure("time", "min"),
    "answer_s": Measure("answers took", "s"),
    "outcome": Measure("outcome", "", "higher", threshold=0.0),
    "status": Measure("status"),
    "error": Measure("error", "", "lower", threshold=0.0),
    "version": Measure("version"),
    "rss_mib_start": Measure("memory at start", "MiB"),
    "rss_mib_end": Measure("memory at end", "MiB"),
    "other_tokens": Measure("other tokens"),
    "lost": Measure("lost", "", "lower", threshold=0.0),
    "wrong_texts": Measure("wrong texts", "", "lower", threshold=0.0),
    "acc": Measure("accuracy"),
    "loss": Measure("loss"),
    **{
        name: Measure(name.replace("_", " "))
        for name in ("finished", "vanished", "refused", "free_pages", "faults", "callers_saw", "neighbours_told", "run")
    },
}
LABELS = {
    "what": "what",
    "algo": "algorithm",
    "num_prompts": "prompts measured",
    "steps": "S",
    "num_steps": "S",
    "topk": "K",
    "draft_tokens": "D",
    "num_draft_tokens": "D",
    "tokens": "tokens",
    "tokenizer": "with text",
    "sample_drafts": "drafts sampled",
    "draft_vocab": "tokens drafted from",
    "max_new_tokens": "new tokens at most",
}
IDENTIFYING_FLOATS = frozenset({"temperature", "top_p", "min_p", "repetition_penalty", "alpha"})
RUN_NAMES = frozenset({"label", "file", "commit", "date"})  # which run a row is of, not which case
RATE = re.compile(r"(tok|requests|per)_s$")
NOT_OURS = ("floor", "seconds", "hf_", "torch_", "sdpa_", "flex_", "flashinfer_")
COST = re.compile(r"(?:^|_)(?P<unit>ms|us|s|mib|bytes)(?:_p\d+)?$")


def measure_of(key: str, value: Any) -> Measure | None:
    """Return what `key` measures, or None if it identifies its row. Unknown names are told by suffix and type."""
    if key in MEASURES:
        return MEASURES[key]
    label = key.replace("_", " ")
    if RATE.search(key):
        return Measure(label, "", "" if key.startswith(NOT_OURS) else "higher")
    cost = COST.search(key)
    if cost:
        return Measure(label, "", "" if key.startswith(NOT_OURS) else "lower")
    if isinstance(value, dict | list) or (isinstance(value, float) and key not in IDENTIFYING_FLOATS):
        return Measure(label)
    return None


def label_of(key: str) -> str:
    """Return the heading of a column, with the unit of a measure."""
    if key not in MEASURES:
        return LABELS.get(key, key.replace("_", " "))
    label, unit, *_ = MEASURES[key]
    return f"{label} ({unit})" if unit and unit not in label.split() else label


def identity(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys of `row` that say which case it is; not the name of its run."""
    counted = {"tokens"} if "tokens_per_s" in row else set()  # what a way emitted; elsewhere the length of prompts
    return {
        key: value
        for key, value in row.items()
        if key not in RUN_NAMES | counted and value is not None and measure_of(key, value) is None
    }
