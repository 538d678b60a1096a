"""The model card of a trained draft: a README.md with its purpose, its training and its acceptance."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from specdec.checkpoints.replacing import write_text
from specdec.train.config import training_of

_CARD = """# {kind} for {target}

{fits} Load it with `specdec.attach(model, DIR)`, where DIR is this folder.

| | |
|---|---|
{facts}

{held_out}{tau}"""


def write_card(folder: str | Path, facts: Mapping[str, Any], tau_rows: Sequence[Mapping[str, Any]] = ()) -> Path:
    """Write README.md into `folder`.

    facts: what `specdec train` reports, by name; "algo" and "target" are required. tau_rows: rows of an acceptance
    bench; without them the card has no tau table.
    """
    folder = Path(folder)
    kind = training_of(facts["algo"])
    named = {k: v for k, v in facts.items() if k not in ("algo", "target", "acc", "accept_at", "loss")}
    if "tau" in named:
        named["simulated tau, held out"] = named.pop("tau")
    text = _CARD.format(
        kind=kind.name,
        fits=kind.fits,
        target=facts["target"],
        facts="\n".join(f"| {name.replace('_', ' ')} | {_shown(value)} |" for name, value in named.items()),
        held_out=_held_out(facts),
        tau=_table("Measured by `bench acceptance`", tau_rows),
    )
    path = folder / "README.md"
    write_text(path, text.rstrip() + "\n")
    return path


def _held_out(facts: Mapping[str, Any]) -> str:
    """Return a table of held-out rates: accuracy given true tokens, and acceptance in simulated rounds."""
    rows = [
        {"draft step": j + 1, "right given true tokens": a, "accepted so far (a_j)": b}
        for j, (a, b) in enumerate(zip(facts.get("acc", ()), facts.get("accept_at", ()), strict=True))
    ]
    return _table("Held out, rounds of greedy decoding played on known text; tau = 1 + Σ a_j", rows)


def _table(title: str, rows: Sequence[Mapping[str, Any]]) -> str:
    if not rows:
        return ""
    columns = list(rows[0])
    lines = [title + ":", "", "| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    lines += ["| " + " | ".join(_shown(row.get(c, "")) for c in columns) + " |" for row in rows]
    return "\n".join(lines) + "\n\n"


def _shown(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}" if abs(value) < 1000 else f"{value:,.0f}"
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    if isinstance(value, list | tuple):
        return ", ".join(map(_shown, value))
    return str(value)
