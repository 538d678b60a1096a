"""The `specdec` command: demo, generate, chat, bench, train, convert, doctor, backends, env, eval."""

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from specdec import shipped
from specdec.api import attach
from specdec.commands.backends import app as backends_app
from specdec.commands.chat import print_stream, run_chat, statistics, typed_lines
from specdec.commands.choices import device_of, draft_of, steps_of
from specdec.commands.convert import convert_command
from specdec.commands.demo import run_demo
from specdec.commands.env import env_command
from specdec.commands.evaluate import AS_THEY_ARE, evaluate_command
from specdec.commands.serve import serve_command
from specdec.commands.terminal import quiet_pipes
from specdec.doctor.command import doctor_command
from specdec.functional.sampling import SamplingParams
from specdec.heads.load import detect_algo
from specdec.measure.acceptance import Shape, acceptance, print_rows
from specdec.measure.results import write_results
from specdec.targets.pretrained import BUNDLED, load_pretrained
from specdec.text.prompts import chat_ids, read_questions
from specdec.train.cli import Device, Dtype, Target
from specdec.train.cli import app as train_app
from specdec.train.target import load

app = typer.Typer(help="Speculative decoding for Hugging Face models.", no_args_is_help=True)
bench_app = typer.Typer(help="Measurements.", no_args_is_help=True)
app.add_typer(bench_app, name="bench")
app.add_typer(train_app, name="train")
app.add_typer(backends_app, name="backends")
app.command("convert")(convert_command)
app.command("doctor")(doctor_command)
app.command("env")(env_command)
app.command("serve")(serve_command)
app.command("eval", context_settings=AS_THEY_ARE)(evaluate_command)

SHIPPED = "shipped"

DemoDraft = Annotated[str, typer.Option(help="Folder, .gguf file, Hub id, 'lookup', 'shipped' or a shipped name.")]
Draft = Annotated[str, typer.Option(help="As for `demo`, or 'none'. 'shipped' is the EAGLE-3 head.")]
Steps = Annotated[int | None, typer.Option(help="Draft depth S; default 2 on CPU, 3 on CUDA.")]
TopK = Annotated[int, typer.Option(help="Branches per step K; 1 drafts a chain.")]
DraftTokens = Annotated[int | None, typer.Option(help="Nodes verified per round D, root included.")]
MaxNew = Annotated[int, typer.Option(help="Tokens to emit at most.")]


@app.command()
def demo(
    target: Target = BUNDLED,
    draft: DemoDraft = SHIPPED,
    steps: Steps = None,
    topk: TopK = 1,
    draft_tokens: DraftTokens = None,
    max_new_tokens: MaxNew = 96,
    device: Device = "auto",
) -> None:
    """Compare HF generate, plain decoding and speculation, and show which tokens were drafted.

    The last line is one JSON object.
    """
    where = device_of(device)
    model, tokenizer = load_pretrained(target, dtype=torch.float32, device=where)
    run_demo(
        model,
        tokenizer,
        *draft_of(draft),
        num_steps=steps_of(steps, where),
        topk=topk,
        num_draft_tokens=draft_tokens,
        max_new_tokens=max_new_tokens,
    )


@app.command()
def generate(
    prompt: str,
    target: Target = BUNDLED,
    draft: Draft = SHIPPED,
    steps: Steps = None,
    topk: TopK = 1,
    draft_tokens: DraftTokens = None,
    max_new_tokens: MaxNew = 256,
    temperature: Annotated[float | None, typer.Option(help="0 is greedy; left out, the model's own default.")] = None,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    repetition_penalty: float | None = None,
    seed: Annotated[int | None, typer.Option(help="Seed of the random draws; default: new in each run.")] = None,
    stop: Annotated[list[str] | None, typer.Option(help="Stop string; may be repeated.")] = None,
    raw: Annotated[bool, typer.Option(help="Continue the prompt as it is, without the chat template.")] = False,
    device: Device = "auto",
    dtype: Dtype = "auto",
) -> None:
    """Generate for one prompt and stream the text; statistics go to stderr.

    Options left out come from the model's generation_config.
    """
    law = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p, "seed": seed}
    law["repetition_penalty"] = repetition_penalty
    given = {name: value for name, value in law.items() if value is not None}
    if temperature is not None:
        given["do_sample"] = temperature > 0
    model, tokenizer = load(target, dtype, device)
    settings: dict[str, Any] = {}
    if draft != "none":
        settings = {"num_steps": steps_of(steps, device_of(device)), "topk": topk, "num_draft_tokens": draft_tokens}
    engine = attach(model, *draft_of(draft), tokenizer=tokenizer, **settings)
    question: Any = prompt if raw else [{"role": "user", "content": prompt}]
    pieces = engine.stream(question, max_new_tokens=max_new_tokens, stop=stop, **given)
    print(statistics(print_stream(pieces)), file=sys.stderr)


@app.command()
def chat(
    target: Target = BUNDLED,
    draft: Draft = SHIPPED,
    steps: Steps = None,
    max_new_tokens: MaxNew = 512,
    temperature: Annotated[float | None, typer.Option(help="0 is greedy; left out, the model's own default.")] = None,
    system: Annotated[str | None, typer.Option(help="System message.")] = None,
    device: Device = "auto",
    dtype: Dtype = "auto",
) -> None:
    """Chat in the terminal; an empty line starts again, Ctrl-C ends an answer, Ctrl-D the chat."""
    model, tokenizer = load(target, dtype, device)
    settings: dict[str, Any] = {} if draft == "none" else {"num_steps": steps_of(steps, device_of(device))}
    engine = attach(model, *draft_of(draft), tokenizer=tokenizer, **settings)
    law: dict[str, Any] = {}
    if temperature is not None:
        law = {"temperature": temperature or None, "do_sample": temperature > 0}
    run_chat(engine, typed_lines(), system, max_new_tokens=max_new_tokens, **law)


@bench_app.command("acceptance")
def bench_acceptance(
    prompts: Annotated[
        list[str], typer.Option(help="JSON lines with turns, question or prompt. Repeat it, or separate by commas.")
    ],
    draft: Annotated[
        list[str] | None,
        typer.Option(help="Folders, Hub ids, names of shipped drafts, 'shipped' (all of them), 'lookup' or 'none'."),
    ] = None,
    shape: Annotated[list[str] | None, typer.Option(help="S:K:D, such as 3:1:4,5:8:32; default 3:1:4.")] = None,
    temperature: Annotated[list[str] | None, typer.Option(help="Such as 0,1; default 0.")] = None,
    sample_drafts: Annotated[
        bool, typer.Option("--sample-drafts/--greedy-drafts", help="How chains of sampled requests are drafted.")
    ] = True,
    predicted: Annotated[
        bool, typer.Option("--predicted", help="Greedy chains: also show what the trainer simulates on the same text.")
    ] = False,
    target: Target = BUNDLED,
    limit: Annotated[int | None, typer.Option(help="Prompts of each file.")] = None,
    max_new_tokens: MaxNew = 256,
    max_batch: int = 8,
    device: Device = "auto",
    dtype: Dtype = "auto",
    out: Annotated[Path | None, typer.Option(help="Folder for the result file, written after every engine.")] = None,
    target_name: Annotated[
        str | None, typer.Option(help="Name of the target in the result file; else its own.")
    ] = None,
) -> None:
    """Measure acceptance length (tau) and per-position acceptance of every draft, shape, prompt file and temperature.

    One engine is attached for each draft and shape. The last line is one JSON object.
    """
    shapes = [Shape.parse(text) for text in _listed(shape, "3:1:4")]
    laws = [_temperature(text) for text in _listed(temperature, "0")]
    questions = {name: read_questions(file, limit) for name, file in _by_name(_listed(prompts), "stem").items()}
    drafts = _drafts(_listed(draft, SHIPPED))
    for folder, _algo in drafts.values():
        if folder is not None:
            detect_algo(folder)  # so that a mistyped path does not wait for the target to load
    model, tokenizer = load(target, dtype, device)
    ids = {name: chat_ids(texts, tokenizer) for name, texts in questions.items()}
    rows: list[dict[str, Any]] = []
    file: Path | None = None
    config = {"target": target, "drafts": list(drafts), "dtype": str(model.dtype), "max_batch": max_batch}
    for name, (folder, algo) in drafts.items():
        for one in shapes if algo is not None else shapes[:1]:
            measured = acceptance(
                model,
                folder,
                ids,
                name=name,
                algo=algo,
                shape=one,
                temperatures=laws,
                tokenizer=tokenizer,
                max_new_tokens=max_new_tokens,
                max_batch=max_batch,
                sample_drafts=sample_drafts,
                predicted=predicted,
            )
            for row in measured:
                rows.append(row)
                print(f"{name} {one} {row['prompts']} T={row['temperature']:g}: tau {row['tau']:.3f}", file=sys.stderr)
            if out is not None:
                file = write_results(out, "acceptance", target_name or _name_of(target), config, rows, file)
    print_rows(rows)
    print(json.dumps({"rows": rows}))


def main() -> None:
    """Entry point: a user's mistake is one line on stderr and exit status 2."""
    quiet_pipes()
    try:
        app()
    except (ValueError, FloatingPointError) as error:
        print(f"specdec: {error}", file=sys.stderr)
        sys.exit(2)


def _name_of(target: str) -> str:
    """Return the target's name for a file name: "135m" for the bundled one."""
    return "135m" if target == BUNDLED else Path(target).name.lower().removesuffix(".gguf")


def _drafts(values: list[str]) -> dict[str, tuple[Path | str | None, str | None]]:
    """Return draft and algo of each of `values`, by its name in the results."""
    each = [name for v in values for name in (shipped.available() if v == SHIPPED else [v])]
    return {name: draft_of(value) for name, value in _by_name(each, "name").items()}


def _by_name(values: list[str], part: str) -> dict[str, str]:
    """Return paths by their `part`, "name" or "stem", or by the whole path if that is taken."""
    found: dict[str, str] = {}
    for value in values:
        short = getattr(Path(value), part)
        found[value if short in found else short] = value
    return found


def _listed(values: list[str] | None, default: str = "") -> list[str]:
    """Split the values of an option that may be repeated, or separated by commas."""
    return [part.strip() for value in values or [default] for part in value.split(",") if part.strip()]


def _temperature(text: str) -> float:
    try:
        return SamplingParams(temperature=float(text)).temperature
    except ValueError as error:
        raise ValueError(f"--temperature {text!r}: expected 0 or a positive number ({error})") from error


if __name__ == "__main__":
    main()
