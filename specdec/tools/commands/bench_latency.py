"""`specdec bench latency`: reads the options, loads what is measured, prints and writes the rows."""

import sys
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from specdec import __version__
from specdec.core.text.prompts import chat_ids, read_questions
from specdec.reach.targets.pretrained import BUNDLED
from specdec.tools.commands.choices import Json, check_alone, draft_of, finish, listed, named_draft, numbers
from specdec.tools.measure.latency.cases import (
    Plan,
    Prompts,
    Timed,
    given_prompts,
    random_prompts,
    random_subject,
    read_tokenizer,
)
from specdec.tools.measure.latency.run import Run, draft_of_row, print_rows
from specdec.tools.measure.latency.timing import host_probe_ms
from specdec.tools.measure.results import ResultFile
from specdec.tools.measure.shapes import IMPOSED, check_shape
from specdec.tools.measure.together import device_of_rank, is_first, num_ranks
from specdec.tools.train.cli import Device, Dtype
from specdec.tools.train.target import device_of, dtype_of, load

ALGOS = ("eagle3", "nextn")
Numbers = list[str] | None  # such as 1,8,32


def latency_command(
    target: Annotated[
        str | None, typer.Option(help="Hub id, folder, .gguf file or 'bundled', the default: its draft accepts really.")
    ] = None,
    draft: Annotated[
        str | None, typer.Option(help="Its draft: folder, Hub id, shipped name, 'lookup', 'none'; default: shipped.")
    ] = None,
    shape: Annotated[
        str | None,
        typer.Option(help="Instead of a target, random weights of a named shape such as 8b; acceptance is imposed."),
    ] = None,
    algo: Annotated[
        str, typer.Option(help="How a --shape drafts: eagle3, or nextn, a layer of the target's own kind.")
    ] = "eagle3",
    prompts: Annotated[Path | None, typer.Option(help="JSON lines; default: random token ids.")] = None,
    limit: Annotated[int | None, typer.Option(help="Prompts to read from the file.")] = None,
    label: Annotated[str, typer.Option(help="Of these rows, such as before or after.")] = "now",
    grid: Annotated[
        str | None, typer.Option(help="quick, small, full, tiny; default small on CUDA or for a --shape, else quick.")
    ] = None,
    batches: Annotated[Numbers, typer.Option(help="Prompts at once, such as 1,8,32.")] = None,
    tokens: Annotated[Numbers, typer.Option(help="Prompt lengths, such as 128,8192.")] = None,
    ttft_tokens: Annotated[
        Numbers,
        typer.Option(help="More prompt lengths: of these only the first token, at batch 1. '' for none."),
    ] = None,
    modes: Annotated[
        list[str] | None,
        typer.Option(help="Of compiled, graph, or an attention backend: torch, triton, flashinfer, triton+flashinfer."),
    ] = None,
    drafts: Annotated[
        list[str] | None,
        typer.Option(help="How rounds draft: plain, or S:K:D such as 3:1:4, or S:K:D@N to draft from N tokens only."),
    ] = None,
    tokenizer: Annotated[
        str | None, typer.Option(help="'bundled' or a folder; adds rows that end in text. 'own': a --target's.")
    ] = None,
    samplings: Annotated[
        list[str] | None, typer.Option(help="How tokens are drawn, of greedy, sampled, filtered. [default: greedy]")
    ] = None,
    every_kind: Annotated[
        bool, typer.Option("--every-kind", help="Capture all kinds of sampling, not only those measured.")
    ] = False,
    new_tokens: Annotated[int | None, typer.Option(help="Tokens of the calls that give the time of a token.")] = None,
    repeats: Annotated[int | None, typer.Option(help="Calls that give the time of the first token.")] = None,
    hf: Annotated[
        bool, typer.Option("--hf", help="First time transformers' own generate on the same model, at batch 1.")
    ] = False,
    budget: Annotated[float, typer.Option(help="Seconds after which nothing new begins.")] = 1e9,
    out: Annotated[Path | None, typer.Option(help="Folder for the result file, written after every engine.")] = None,
    device: Device = "auto",
    dtype: Dtype = "auto",
    json: Json = False,
) -> None:
    """Time the first token, a token and a round through `engine.generate`, engine by engine.

    Under torchrun, the ranks share the target, a --shape.
    Alone it is a small grid of the bundled target with its draft, a minute or two on a CPU. Lists are separated by
    commas or given by repeating the option. Exit status 1 if an engine failed.
    """
    where, ranks = device_of_rank(device_of(device)), num_ranks()
    options: dict[str, Any] = {"label": label, "budget": budget, "every_kind": every_kind}
    options |= {"batches": numbers("batches", batches), "tokens": numbers("tokens", tokens)}
    options |= {"ttft_tokens": numbers("ttft-tokens", ttft_tokens), "new_tokens": new_tokens, "repeats": repeats}
    names = {"modes": modes, "drafts": drafts, "samplings": samplings}
    options |= {name: tuple(listed(values)) or None for name, values in names.items()}
    plan = Plan.of(grid or _grid(shape, where), **options)
    if shape is not None:
        check_alone(shape, target=target, draft=draft, prompts=prompts)
        if algo not in ALGOS:
            raise ValueError(f"--algo {algo!r}: expected one of {', '.join(ALGOS)}")
        subject = random_subject(shape, where, dtype_of(dtype, where), read_tokenizer(tokenizer), ranks, algo)
    elif algo != ALGOS[0]:
        raise ValueError(f"--algo {algo!r}: only a --shape takes it; name one, or the draft as --draft")
    elif ranks > 1:
        raise ValueError(f"{ranks} ranks: only a --shape is shared by ranks; name one, or leave torchrun out")
    else:
        questions = None if prompts is None else read_questions(prompts, limit)
        subject, longest = _real_subject(target or BUNDLED, draft, questions, tokenizer, where, dtype)
        if longest is not None:
            plan = replace(plan, tokens=(longest,), ttft_tokens=())
    if subject.algo is None:
        if drafts is not None and set(plan.drafts) != {"plain"}:
            raise ValueError(f"--drafts {','.join(plan.drafts)}: there is no draft; expected plain, or a --draft")
        plan = replace(plan, drafts=("plain",))
    given = {"target": target, "draft": draft, "prompts": None if prompts is None else str(prompts)}
    _measure(subject, plan, out, {**given, "tokenizer": tokenizer}, hf, json)


def _grid(shape: str | None, device: str) -> str:
    if shape is None:
        return "small" if device.startswith("cuda") else "quick"
    return "tiny" if check_shape(shape).startswith("tiny") else "small"


def _real_subject(
    target: str, draft: str | None, questions: list[str] | None, tokenizer: str | None, device: str, dtype: str
) -> tuple[Timed, int | None]:
    """Load a target, with the draft of that name. Prompts are questions in its chat template, of which the longest
    one's length is returned, too, or random ids."""
    source, algo = draft_of(named_draft(draft, target))
    model, own = load(target, dtype, device)
    prompts: Prompts = random_prompts(torch.arange(model.get_output_embeddings().weight.shape[0]))
    longest = None
    if questions is not None:
        ids = chat_ids(questions, own)
        prompts, longest = given_prompts(ids), max(map(len, ids))
    text = own if tokenizer == "own" else read_tokenizer(tokenizer)
    return Timed(Path(target).name.lower(), model, source, algo, prompts, text), longest


def _say(row: dict[str, Any]) -> None:
    """Print a row on stderr as it comes, on the first rank."""
    if is_first():
        case = f"{row['mode']} {draft_of_row(row)}, {row['batch']} x {row['tokens']} tokens"
        print(f"{case}: {row['what']} {row['ms']:g} ms", file=sys.stderr, flush=True)


def _measure(subject: Timed, plan: Plan, out: Path | None, given: dict[str, Any], has_hf: bool, json: bool) -> None:
    """Measure, write the file after every engine, print the table."""
    warnings.filterwarnings("ignore", message="synthetic_acceptance is on")
    run = Run(subject, plan, _say)
    config = {"label": plan.label, "version": __version__, "host_probe_ms": host_probe_ms(), **given}
    config |= {"acceptance": IMPOSED} if subject.is_random else {}
    config |= {"new_tokens": plan.new_tokens, "every_kind": plan.every_kind, "dtype": str(subject.model.dtype)}
    config |= {"skipped": run.skipped, "failed": run.failed}  # lists that grow
    with ResultFile(out if is_first() else None, f"latency-{plan.label}", subject.shape, config) as file:
        if has_hf:
            run.time_hf()
            file.write(run.rows)
        for _ in run.engines():
            file.write(run.rows)
    if is_first():
        print_rows(run.rows)
        if subject.is_random:
            print(IMPOSED)
        for case in run.skipped:
            print(f"skipped: {case}")
        finish(json, {"skipped": run.skipped, "rows": run.rows}, file.name)
    if run.failed:
        raise typer.Exit(1)
