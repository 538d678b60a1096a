"""The `specdec` command: demo, generate, bench, train, convert."""

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from specdec import heads
from specdec.api import attach
from specdec.bench import acceptance, print_rows, write_results
from specdec.convert import convert_command
from specdec.demo import run_demo
from specdec.models.pretrained import BUNDLED, load_pretrained
from specdec.prompts import chat_ids, read_questions
from specdec.sampling import SamplingParams
from specdec.train.cli import app as train_app
from specdec.train.target import load

app = typer.Typer(help="Speculative decoding for Hugging Face models.", no_args_is_help=True)
bench_app = typer.Typer(help="Measurements.", no_args_is_help=True)
app.add_typer(bench_app, name="bench")
app.add_typer(train_app, name="train")
app.command("convert")(convert_command)

SHIPPED = "shipped"

Target = Annotated[str, typer.Option(help="Hub id, folder, .gguf file or 'bundled' (SmolLM2-135M-Instruct).")]
Draft = Annotated[str, typer.Option(help="Draft folder or Hub id, 'shipped' (for the bundled target), or 'none'.")]
Device = Annotated[str, typer.Option(help="cuda, cpu; auto: cuda where there is one.")]
Dtype = Annotated[str, typer.Option(help="float32, bfloat16, float16; auto: bfloat16 on CUDA, else float32.")]
Steps = Annotated[int | None, typer.Option(help="Draft depth S; default 2 on CPU, 3 on CUDA.")]
TopK = Annotated[int, typer.Option(help="Branches a step K; 1 drafts a chain.")]
DraftTokens = Annotated[int | None, typer.Option(help="Nodes verified a round D, root included.")]
MaxNew = Annotated[int, typer.Option(help="Tokens to emit at most.")]


@app.command()
def demo(
    target: Target = BUNDLED,
    draft: Draft = SHIPPED,
    steps: Steps = None,
    topk: TopK = 1,
    draft_tokens: DraftTokens = None,
    max_new_tokens: MaxNew = 96,
    device: Device = "auto",
) -> None:
    """HF generate, plain decoding and speculation side by side; the last line is one JSON object."""
    where = _device(device)
    model, tokenizer = load_pretrained(target, dtype=torch.float32, device=where)
    run_demo(
        model,
        tokenizer,
        _draft(draft),
        num_steps=_steps(steps, where),
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
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    seed: int = 0,
    stop: Annotated[list[str] | None, typer.Option(help="Stop string; may be repeated.")] = None,
    raw: Annotated[bool, typer.Option(help="Continue the prompt as it is, without the chat template.")] = False,
    device: Device = "auto",
    dtype: Dtype = "auto",
) -> None:
    """Generate for one prompt, text as it comes; statistics go to stderr."""
    law = SamplingParams(temperature, top_k, top_p, min_p, seed)
    model, tokenizer = load(target, dtype, device)
    settings: dict[str, Any] = {}
    if draft != "none":
        settings = {"num_steps": _steps(steps, _device(device)), "topk": topk, "num_draft_tokens": draft_tokens}
    engine = attach(model, _draft(draft), tokenizer=tokenizer, **settings)
    question: Any = prompt if raw else [{"role": "user", "content": prompt}]
    pieces = engine.stream(question, max_new_tokens=max_new_tokens, sampling=law, stop=stop or ())
    while True:
        try:
            print(next(pieces), end="", flush=True)
        except StopIteration as end:
            out = end.value
            break
    print()
    print(
        f"[{len(out.tokens)} tokens, {out.finish_reason}, {len(out.tokens) / out.time_s:.1f} tokens/s, "
        f"tau {out.acceptance.tau:.2f}]",
        file=sys.stderr,
    )


@bench_app.command("acceptance")
def bench_acceptance(
    prompts: Annotated[list[Path], typer.Option(help="JSON lines with turns, question or prompt; may be repeated.")],
    steps: Annotated[int, typer.Option(help="Draft depth S.")] = 3,
    topk: TopK = 1,
    draft_tokens: DraftTokens = None,
    target: Target = BUNDLED,
    draft: Draft = SHIPPED,
    limit: Annotated[int | None, typer.Option(help="Prompts of each file.")] = None,
    max_new_tokens: MaxNew = 256,
    temperature: float = 0.0,
    max_batch: int = 8,
    device: Device = "auto",
    dtype: Dtype = "auto",
    out: Annotated[Path | None, typer.Option(help="Folder for the result file.")] = None,
    shape: Annotated[str, typer.Option(help="Name of the target's shape in the result file.")] = "135m",
) -> None:
    """Acceptance length (tau) and per-position acceptance; the last line is one JSON object."""
    model, tokenizer = load(target, dtype, device)
    rows = [
        acceptance(
            model,
            _draft(draft),
            chat_ids(read_questions(path, limit), tokenizer),
            name=path.stem,
            num_steps=steps,
            topk=topk,
            num_draft_tokens=draft_tokens,
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            max_batch=max_batch,
        )
        for path in prompts
    ]
    print_rows(rows)
    if out is not None:
        config = {"target": target, "draft": draft, "dtype": str(model.dtype)}
        what = f"acceptance-s{steps}k{topk}"
        write_results(out, what, shape, config, rows)
    print(json.dumps({"rows": rows}))


def main() -> None:
    """Entry point: a user's mistake is one line on stderr and exit status 2."""
    try:
        app()
    except ValueError as error:
        print(f"specdec: {error}", file=sys.stderr)
        sys.exit(2)


def _device(device: str) -> str:
    return ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device


def _steps(steps: int | None, device: str) -> int:
    """On CPU a product of up to three rows costs what one row costs, so depth 2 pays best there."""
    return steps if steps is not None else (2 if device == "cpu" else 3)


def _draft(draft: str) -> Path | str | None:
    if draft == "none":
        return None
    return heads.path() if draft == SHIPPED else draft


if __name__ == "__main__":
    main()
