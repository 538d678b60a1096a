"""`specdec doctor TARGET DRAFT`: examines both, prints the findings; with --json also one JSON line."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.markup import escape

from specdec import shipped
from specdec.core.errors import CheckpointError
from specdec.core.text.prompts import chat_ids, read_questions, tokenizer_fingerprint, tokenizer_match
from specdec.reach.assembly.assemble import resolve_draft
from specdec.reach.heads.formats import WHOLE
from specdec.reach.heads.load import inspect, load_head
from specdec.reach.targets.pretrained import BUNDLED, load_draft, read_tokenizer
from specdec.reach.targets.shape import TargetShape, vocab_size_of
from specdec.reach.targets.standalone import named_tokenizer
from specdec.tools.commands.choices import TARGET, OnTarget, Reported, at_least
from specdec.tools.doctor.examine import examine
from specdec.tools.measure.tables import Table
from specdec.tools.options import argument, command_of, option

PROMPTS = (
    "A florist ties 18 bouquets of 7 roses each and has 9 roses left. How many roses did she start with?",
    "Explain to a child why leaves change colour in autumn.",
    "Write a short Python function that returns the largest number of a list.",
    "What are three things to check before a long train journey?",
    "Summarise in two sentences what a bank does.",
    "Translate into French: Good morning, where is the library?",
)

APART = ("draft", "chance", "rows", "agreement", "readings", "repairs", "defects", "remarks")  # not rows of facts
LABELS = {  # of facts whose names are not clear
    "bandwidth_gb_s": "bandwidth, GB/s",
    "floor_plain_ms": "plain step, by bytes read",
    "floor_round_ms": "round, by bytes read",
    "floor_break_even": "break-even tau, by bytes read",
    "plain_ms": "plain step, measured",
    "round_ms": "round, measured",
    "break_even": "break-even tau, measured",
    "accept_at": "accepted at 1, 2, …",
    "accept_given": "accepted if the previous was",
    "equal": "text equals plain decoding",
}


class Doctor(OnTarget, Reported):
    """Inspect a draft on a target: layout, cost, acceptance, defects.

    Exit status 1 if it cannot be loaded or a defect was found.
    """

    target: str = argument(TARGET)
    draft: str = argument("Draft folder or Hub id, 'shipped' or the name of a shipped draft.")
    algo: str | None = option("Algorithm, for a folder that supports several.")
    prompts: Path | None = option("JSON lines of prompts to measure on; default: six built-in ones.")
    limit: int = option("Prompts to read from the file.", 8, min=1)
    steps: int = option("Draft depth S of the chains.", 3)
    max_new_tokens: int = option("New tokens per prompt.", 48)
    bandwidth_gb_s: float | None = option("Bandwidth of device memory in GB/s; default: measured.")

    def run(self) -> None:
        gb_s, sizes = self.bandwidth_gb_s, {"num_steps": self.steps, "max_new_tokens": self.max_new_tokens}
        if gb_s is not None and not 0 < gb_s < math.inf:
            raise ValueError(f"--bandwidth-gb-s {gb_s}: expected a positive number of GB/s")
        at_least("steps", self.steps)
        at_least("max-new-tokens", self.max_new_tokens, 4)
        if self.draft == "lookup":
            raise ValueError(
                "DRAFT 'lookup' has no checkpoint to inspect: `specdec bench acceptance --draft lookup` measures it"
            )
        questions = list(PROMPTS) if self.prompts is None else read_questions(self.prompts, self.limit)
        source = shipped.find(self.draft)
        checkpoint = None if source == BUNDLED else inspect(source)
        kind, _ = resolve_draft(source, self.algo or "auto")
        model, tokenizer = self.load()
        loaded, theirs, problems = None, None, list[str]()
        try:
            if kind in WHOLE:
                loaded, theirs = load_draft(source, dtype=model.dtype, device=model.device)
                problems = standalone_problems(loaded, model)
            else:
                loaded = load_head(source, TargetShape.of(model), model.dtype, model.device, kind)
        except CheckpointError as error:
            problems = list(error.problems)
        layout, notes = (None, []) if checkpoint is None else (checkpoint.layout, checkpoint.notes)
        facts: dict[str, Any] = {"draft": str(self.draft), "layout": layout, "algo": kind, "notes": notes}
        named = named_tokenizer(source) if theirs is None else None
        facts["tokenizer"] = tokenizer_match(tokenizer, theirs)
        if named is not None:
            facts["tokenizer"] = "equal" if named == tokenizer_fingerprint(tokenizer) else "another, by its fingerprint"
        elif kind not in WHOLE and checkpoint is not None:
            facts["tokenizer"] = _tokenizer_beside(checkpoint.folder, tokenizer)
        if problems:
            found = {**facts, "defects": ["cannot be loaded"], "remarks": problems}
        else:
            found = examine(model, loaded, prompt_ids(questions, tokenizer), **sizes, gb_s=gb_s, known=facts)
        print_findings(Console(), found)
        if self.json:
            print(json.dumps(found))
        raise typer.Exit(1 if found["defects"] else 0)


doctor = command_of(Doctor)


def prompt_ids(questions: list[str], tokenizer: Any) -> list[list[int]]:
    """Return token ids of `questions`: as chats if the tokenizer has a template, else as plain text."""
    if getattr(tokenizer, "chat_template", None):
        return chat_ids(questions, tokenizer)
    return [tokenizer(q)["input_ids"] for q in questions]


def _tokenizer_beside(folder: Path, tokenizer: Any) -> str | None:
    """Compare the tokenizer in a head's folder with the target's. Heads draft without one."""
    try:
        return tokenizer_match(tokenizer, read_tokenizer(folder))
    except CheckpointError as error:
        return "; ".join(error.problems)


def standalone_problems(draft: Any, model: Any) -> list[str]:
    """List the reasons why a model cannot draft for another."""
    own, wanted = map(vocab_size_of, (draft, model))
    return [] if own == wanted else [f"it scores {own} tokens, the target {wanted}: use a model of the same family"]


def print_findings(console: Console, found: Mapping[str, Any]) -> None:
    """Print the result of `examine`: a table of facts, one of readings, remarks and the conclusion."""
    facts = [
        [LABELS.get(name, name.replace("_", " ")), _shown(name, value)]
        for name, value in found.items()
        if name not in APART and value is not None and value != []
    ]
    Table("layout and measurements", ["draft", str(found.get("draft", ""))], facts, [False, False]).print(console)
    if "agreement" in found:
        chance = f"always guessing the commonest token: {found['chance']:.0%}"
        title = f"agreement with the target given true tokens, {found['rows']} rows ({chance})"
        rates = {"as loaded": found["agreement"], **found["readings"]}
        cells = [["* " * (n in found["repairs"]) + n, *(f"{rate:.0%}" for rate in own)] for n, own in rates.items()]
        note = "*: repairs the draft" if found["repairs"] else ""
        Table(title, ["reading", "step 1", "step 2"], cells, [False, True, True], note=note).print(console)
    for remark in found["remarks"]:
        console.print(f"- {remark}", markup=False, highlight=False)
    defects = escape(", and ".join(found["defects"]))
    console.print(f"[bold red]likely defect: {defects}" if defects else "[bold green]no defect found", highlight=False)


def _shown(name: str, value: Any) -> str:
    """Return the value of a fact with its unit."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, dict):
        return ", ".join(f"{k.replace('_', ' ')} {v}" for k, v in value.items())
    if isinstance(value, list):
        return ("\n" if name == "notes" else ", ").join(_shown(name, item) for item in value)
    if name == "coverage":
        return f"{value:.1%} of the target's tokens here are in the hot vocabulary"
    if name.endswith("_bytes"):
        return f"{value / 2**20:,.1f} MiB"
    if isinstance(value, float):
        return f"{value:.3f} ms" if name.endswith("_ms") else f"{value:.2f}"
    return f"{value:,}" if isinstance(value, int) else str(value)
