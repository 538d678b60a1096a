"""The `specdec` command: demo, generate, chat, bench, train, convert, doctor, backends, cache, env, eval."""

import sys
from typing import Annotated, Any

import torch
import typer

from specdec.api import attach
from specdec.commands.backends import app as backends_app
from specdec.commands.bench import app as bench_app
from specdec.commands.cache import cache_command
from specdec.commands.chat import print_stream, run_chat, statistics, typed_lines
from specdec.commands.choices import DraftTokens, Steps, TopK, draft_of, drafting_of, named_draft
from specdec.commands.convert import convert_command
from specdec.commands.demo import run_demo
from specdec.commands.env import env_command
from specdec.commands.evaluate import AS_THEY_ARE, evaluate_command
from specdec.commands.serve import serve_command
from specdec.commands.terminal import quiet_pipes
from specdec.doctor.command import doctor_command
from specdec.targets.pretrained import BUNDLED, load_pretrained
from specdec.train.cli import Device, Dtype, Target
from specdec.train.cli import app as train_app
from specdec.train.target import device_of, load

app = typer.Typer(help="Speculative decoding for Hugging Face models.", no_args_is_help=True)
app.add_typer(bench_app, name="bench")
app.add_typer(train_app, name="train")
app.add_typer(backends_app, name="backends")
app.command("cache")(cache_command)
app.command("convert")(convert_command)
app.command("doctor")(doctor_command)
app.command("env")(env_command)
app.command("serve")(serve_command)
app.command("eval", context_settings=AS_THEY_ARE)(evaluate_command)

DemoDraft = Annotated[
    str | None,
    typer.Option(
        help="Folder, .gguf file, Hub id, 'lookup', 'shipped' (EAGLE-3, the default for bundled) or a shipped name."
    ),
]
Draft = Annotated[
    str | None, typer.Option(help="As for `demo`, or 'none', the default for other targets than bundled.")
]
MaxNew = Annotated[int, typer.Option(help="Tokens to emit at most.")]


@app.command()
def demo(
    target: Target = BUNDLED,
    draft: DemoDraft = None,
    steps: Steps = None,
    topk: TopK = None,
    draft_tokens: DraftTokens = None,
    max_new_tokens: MaxNew = 96,
    device: Device = "auto",
) -> None:
    """Compare HF generate, plain decoding and speculation, and show which tokens were drafted.

    The last line is one JSON object.
    """
    draft = named_draft(draft, target)
    if draft == "none":
        raise ValueError(
            "--draft 'none', the default for other targets than bundled: the demo compares drafting with plain "
            "decoding; name a draft made for the target, or 'lookup'"
        )
    model, tokenizer = load_pretrained(target, dtype=torch.float32, device=device_of(device))
    run_demo(
        model,
        tokenizer,
        *draft_of(draft),
        max_new_tokens=max_new_tokens,
        **drafting_of(draft, model.device.type, steps, topk, draft_tokens),
    )


@app.command()
def generate(
    prompt: str,
    target: Target = BUNDLED,
    draft: Draft = None,
    steps: Steps = None,
    topk: TopK = None,
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
    draft = named_draft(draft, target)
    settings = drafting_of(draft, model.device.type, steps, topk, draft_tokens)
    settings["compile"] = False  # one text would not earn it back
    engine = attach(model, *draft_of(draft), tokenizer=tokenizer, **settings)
    question: Any = prompt if raw else [{"role": "user", "content": prompt}]
    pieces = engine.stream(question, max_new_tokens=max_new_tokens, stop=stop, **given)
    print(statistics(print_stream(pieces)), file=sys.stderr)


@app.command()
def chat(
    target: Target = BUNDLED,
    draft: Draft = None,
    steps: Steps = None,
    max_new_tokens: MaxNew = 512,
    temperature: Annotated[float | None, typer.Option(help="0 is greedy; left out, the model's own default.")] = None,
    system: Annotated[str | None, typer.Option(help="System message.")] = None,
    device: Device = "auto",
    dtype: Dtype = "auto",
) -> None:
    """Chat in the terminal; an empty line starts again, Ctrl-C ends an answer, Ctrl-D the chat."""
    model, tokenizer = load(target, dtype, device)
    draft = named_draft(draft, target)
    settings = {**drafting_of(draft, model.device.type, steps), "prefix_cache": "auto"}
    engine = attach(model, *draft_of(draft), tokenizer=tokenizer, **settings)
    law: dict[str, Any] = {}
    if temperature is not None:
        law = {"temperature": temperature or None, "do_sample": temperature > 0}
    run_chat(engine, typed_lines(), system, max_new_tokens=max_new_tokens, **law)


def main() -> None:
    """Entry point: a user's mistake is one line on stderr and exit status 2."""
    quiet_pipes()
    try:
        app()
    except (ValueError, FloatingPointError) as error:
        print(f"specdec: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
