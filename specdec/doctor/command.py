"""`specdec doctor TARGET DRAFT`: loads both, examines, prints tables; with --json also one JSON line."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from specdec import shipped
from specdec.doctor.examine import Findings, examine
from specdec.doctor.facts import tokenizer_match
from specdec.errors import CheckpointError
from specdec.heads.load import Checkpoint, detect_algo, inspect, load_head
from specdec.targets.pretrained import BUNDLED, load_draft, read_tokenizer
from specdec.targets.shape import TargetShape
from specdec.targets.standalone import named_tokenizer
from specdec.text.prompts import chat_ids, read_questions, tokenizer_fingerprint
from specdec.train.cli import Device, Dtype
from specdec.train.target import load

PROMPTS = (
    "A florist ties 18 bouquets of 7 roses each and has 9 roses left. How many roses did she start with?",
    "Explain to a child why leaves change colour in autumn.",
    "Write a short Python function that returns the largest number of a list.",
    "What are three things to check before a long train journey?",
    "Summarise in two sentences what a bank does.",
    "Translate into French: Good morning, where is the library?",
)


def doctor_command(
    target: Annotated[str, typer.Argument(help="Hub id, folder, .gguf file or 'bundled' (SmolLM2-135M-Instruct).")],
    draft: Annotated[str, typer.Argument(help="Draft folder or Hub id, 'shipped' or the name of a shipped draft.")],
    algo: Annotated[str | None, typer.Option(help="Algorithm to take from a folder that serves several.")] = None,
    prompts: Annotated[Path | None, typer.Option(help="JSON lines to measure on; default: six of our own.")] = None,
    limit: Annotated[int, typer.Option(help="Prompts to read from the file.")] = 8,
    steps: Annotated[int, typer.Option(help="Draft depth S of the chains.")] = 3,
    max_new_tokens: Annotated[int, typer.Option(help="Tokens a prompt.")] = 48,
    bandwidth_gb_s: Annotated[float | None, typer.Option(help="Bandwidth of device memory; default: measured.")] = None,
    device: Device = "auto",
    dtype: Dtype = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="Print the findings as one JSON object.")] = False,
) -> None:
    """Describe a draft, measure its cost and acceptance on a target, and name its defects.

    Exit status 1 if it cannot be loaded or a defect was found.
    """
    if bandwidth_gb_s is not None and bandwidth_gb_s <= 0:
        raise ValueError(f"--bandwidth-gb-s {bandwidth_gb_s}: expected a positive number of GB/s")
    if steps < 1 or max_new_tokens < 4:
        raise ValueError(f"--steps {steps}, --max-new-tokens {max_new_tokens}: expected at least 1 step and 4 tokens")
    questions = list(PROMPTS) if prompts is None else read_questions(prompts, limit)
    source = shipped.find(draft)
    checkpoint = None if source == BUNDLED else inspect(source)
    kind = detect_algo(source, algo)
    console, facts = Console(), _facts(str(draft), kind, checkpoint)
    model, tokenizer = load(target, dtype, device)
    theirs, problems = None, list[str]()
    try:
        if kind == "standalone":
            loaded, theirs = load_draft(source, dtype=model.dtype, device=model.device)
            problems = standalone_problems(loaded, model)
        else:
            loaded = load_head(source, TargetShape.of(model), model.dtype, model.device, kind)
    except CheckpointError as error:
        problems = list(error.problems)
    facts["tokenizer"] = tokenizer_match(tokenizer, theirs)
    if kind != "standalone" and checkpoint is not None:
        facts["tokenizer"] = _tokenizer_beside(checkpoint.folder, tokenizer)
    named = named_tokenizer(source) if theirs is None else None
    if named is not None:
        facts["tokenizer"] = "equal" if named == tokenizer_fingerprint(tokenizer) else "another, by its fingerprint"
    if problems:
        _print_facts(console, facts)
        for problem in problems:
            console.print(f"cannot be loaded: {problem}", style="red", markup=False, highlight=False)
        if as_json:
            print(json.dumps({**facts, "defects": ["cannot be loaded"], "remarks": problems}))
        raise typer.Exit(1)
    ids = prompt_ids(questions, tokenizer)
    sizes = {"num_steps": steps, "max_new_tokens": max_new_tokens}
    found = examine(model, loaded, ids, **sizes, gb_s=bandwidth_gb_s, known=facts)
    print_findings(console, found)
    if as_json:
        print(json.dumps(found.json))
    raise typer.Exit(1 if found.defects else 0)


def prompt_ids(questions: list[str], tokenizer: Any) -> list[list[int]]:
    """Return token ids of `questions`: as chats if the tokenizer has a template, else as plain text."""
    if getattr(tokenizer, "chat_template", None):
        return chat_ids(questions, tokenizer)
    return [tokenizer(q)["input_ids"] for q in questions]


def _tokenizer_beside(folder: Path, tokenizer: Any) -> str | None:
    """Compare the tokenizer in a head's folder with the target's. A head drafts without one."""
    try:
        return tokenizer_match(tokenizer, read_tokenizer(folder))
    except CheckpointError as error:
        return "; ".join(error.problems)


def standalone_problems(draft: Any, model: Any) -> list[str]:
    """List why a model cannot draft for another."""
    own, wanted = (m.get_output_embeddings().weight.shape[0] for m in (draft, model))
    return [] if own == wanted else [f"it scores {own} tokens, the target {wanted}: take a model of the same family"]


def _facts(draft: str, algo: str, checkpoint: Checkpoint | None) -> dict[str, Any]:
    if checkpoint is None:
        return {"draft": draft, "layout": None, "algo": algo, "notes": []}
    return {"draft": draft, "layout": checkpoint.layout, "algo": algo, "notes": checkpoint.notes}


def print_findings(console: Console, found: Findings) -> None:
    """Print tables of facts, cost and readings, then the conclusion."""
    _print_facts(console, found.facts)
    _print_cost(console, found)
    if found.agreement is not None:
        _print_readings(console, found)
    for remark in found.remarks:
        console.print(f"- {remark}", markup=False, highlight=False)
    if found.defects:
        console.print(f"[bold red]likely defect: {escape(', and '.join(found.defects))}", highlight=False)
    else:
        console.print("[bold green]no defect found", highlight=False)


def _print_facts(console: Console, facts: Mapping[str, Any]) -> None:
    table = Table("draft", str(facts.get("draft", "")), title="what was read", title_justify="left")
    for name, value in facts.items():
        if name == "draft" or value is None or value == []:
            continue
        table.add_row(name.replace("_", " "), escape(_shown(name, value)))
    console.print(table)


def _shown(name: str, value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{k.replace('_', ' ')} {v}" for k, v in value.items())
    if name == "notes":
        return "\n".join(value)
    if isinstance(value, list):
        return ", ".join(map(str, value))
    if name.endswith("_bytes"):
        return f"{value / 2**20:,.1f} MiB"
    if name == "coverage":
        return f"{value:.1%} of what the target said here is in the hot vocabulary"
    return f"{value:,}" if isinstance(value, int) else str(value)


def _print_cost(console: Console, found: Findings) -> None:
    title = f"what a round of {found.num_steps} steps costs, batch 1"
    table = Table("", "plain step", "round", "break-even tau", title=title, title_justify="left")
    cells = (f"{found.floor.plain_ms:.3f} ms", f"{found.floor.round_ms:.3f} ms", f"{found.floor.break_even:.2f}")
    table.add_row(f"bytes read at {found.floor.gb_s:.0f} GB/s", *cells)
    plain = f"{found.plain.step_ms:.3f} ms"
    if found.speculative is None or found.break_even is None:
        table.add_row("measured", plain, "-", "-")
    else:
        table.add_row("measured", plain, f"{found.speculative.step_ms:.3f} ms", f"{found.break_even:.2f}")
    console.print(table)
    if found.speculative is not None:
        rates = found.speculative.acceptance.acceptance_at
        given = [a / b for a, b in zip(rates, [1.0, *rates], strict=False)]  # the one before accepted
        shown, conditional = (" ".join(f"{a:.2f}" for a in each) or "none" for each in (rates, given))
        rounds = found.speculative.acceptance.num_rounds
        result = f"tau {found.tau:.3f} over {rounds} rounds; accepted at 1, 2, …: {shown} (given the one before: "
        console.print(f"{result}{conditional})", highlight=False)


def _print_readings(console: Console, found: Findings) -> None:
    assert found.agreement is not None
    rows = f"{found.agreement.num_rows} rows (always the commonest token: {found.chance:.0%})"
    title = f"agreement with the target given true tokens, {rows}"
    table = Table("reading", "step 1", "step 2", title=title, title_justify="left")
    table.add_row("as it is read", f"{found.agreement.first:.0%}", f"{found.agreement.second:.0%}", style="bold")
    repairing = [t.alternative.name for t in found.repairs]
    for trial in found.trials:
        style = "green" if trial.alternative.name in repairing else None
        first, second = trial.agreement.first, trial.agreement.second
        table.add_row(trial.alternative.name, f"{first:.0%}", f"{second:.0%}", style=style)
    console.print(table)
