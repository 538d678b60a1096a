"""The model card of a trained draft: a README.md with its purpose, its training and its acceptance."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from specdec.reach.checkpoints.replacing import write_text
from specdec.tools.train.config import training_of


def write_card(folder: str | Path, facts: Mapping[str, Any]) -> Path:
    """Write README.md into `folder`. facts: what `specdec train` reports, by name; "algo" and "target" are required."""
    kind = training_of(facts["algo"])
    named = {k: v for k, v in facts.items() if k not in ("algo", "target", "acc", "accept_at", "loss")}
    if "tau" in named:
        named["simulated tau, held out"] = named.pop("tau")
    lines = [
        f"# {kind.name} for {facts['target']}\n",
        f"{kind.fits} Load it with `specdec.attach(model, DIR)`, where DIR is this folder.\n",
        "| | |\n|---|---|",
        *(f"| {name.replace('_', ' ')} | {_shown(value)} |" for name, value in named.items()),
    ]
    steps = list(enumerate(zip(facts.get("acc", ()), facts.get("accept_at", ()), strict=True), 1))
    if steps:
        lines += [
            "\nHeld out, rounds of greedy decoding played on known text; tau = 1 + Σ a_j:\n",
            "| draft step | right given true tokens | accepted so far (a_j) |\n|---|---|---|",
            *(f"| {step} | {_shown(acc)} | {_shown(accepted)} |" for step, (acc, accepted) in steps),
        ]
    path = Path(folder) / "README.md"
    write_text(path, "\n".join(lines) + "\n")
    return path


def _shown(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}" if abs(value) < 1000 else f"{value:,.0f}"
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    if isinstance(value, list | tuple):
        return ", ".join(map(_shown, value))
    return str(value)
