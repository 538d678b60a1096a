"""`specdec generate`: one prompt, streamed to stdout."""

import sys
from typing import Annotated, Any

import typer

from specdec.reach.targets.pretrained import BUNDLED
from specdec.tools.commands.chat import print_stream, statistics
from specdec.tools.commands.choices import Draft, DraftTokens, MaxNew, Steps, TopK, drafting_of, named_draft
from specdec.tools.train.cli import Device, Dtype, Target
from specdec.tools.train.target import load


def command(
    prompt: Annotated[str, typer.Argument(help="The prompt; '-' reads it from stdin.")],
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
    if prompt == "-":
        prompt = sys.stdin.read().strip()
        if not prompt:
            raise ValueError("the prompt is '-', but stdin is empty: expected a prompt there")
    model, tokenizer = load(target, dtype, device)
    drafting = drafting_of(named_draft(draft, target), model, 1, steps, topk, draft_tokens)
    engine = drafting.attach(model, tokenizer, max_batch=1, compile=False)  # one text would not earn compiling back
    question: Any = prompt if raw else [{"role": "user", "content": prompt}]
    pieces = engine.stream(question, max_new_tokens=max_new_tokens, stop=stop, **given)
    print(statistics(print_stream(pieces)), file=sys.stderr)
