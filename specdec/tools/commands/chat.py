"""`specdec chat`: a conversation in the terminal, with tokens/s and tau after every answer."""

import sys
from collections.abc import Callable, Generator, Iterable
from typing import Annotated, Any

import typer

from specdec.api import Engine
from specdec.core.outputs import RequestOutput
from specdec.reach.targets.pretrained import BUNDLED
from specdec.tools.commands.choices import Draft, MaxNew, Steps, drafting_of, engine_line, named_draft
from specdec.tools.train.cli import Device, Dtype, Target
from specdec.tools.train.target import load

LEAVE = "An empty line starts a new conversation, Ctrl-C ends an answer, Ctrl-D the chat."


def run_chat(engine: Engine, lines: Iterable[str], system: str | None = None, **options: Any) -> list[dict[str, str]]:
    """Answer `lines` in turn, streaming to stdout, statistics to stderr; returns the conversation.

    An empty line starts a new conversation. Ctrl-C ends the answer that is being written, which is kept as it is.
    options: those of `Engine.stream`. A conversation that no longer fits the engine is refused, and its last line
    dropped.
    """
    begin = [] if system is None else [{"role": "system", "content": system}]
    messages = list(begin)
    for line in lines:
        if not line.strip():
            messages = list(begin)
            continue
        messages.append({"role": "user", "content": line})
        written: list[str] = []
        try:
            out = print_stream(engine.stream(messages, **options), written.append)
            print(statistics(out), file=sys.stderr)
        except KeyboardInterrupt:
            print()
        except ValueError as error:
            messages.pop()
            print(error, file=sys.stderr)
            continue
        messages.append({"role": "assistant", "content": "".join(written)})
    return messages


def typed_lines() -> Generator[str, None, None]:
    """Yield lines that are typed, up to the end of input."""
    while True:
        try:
            yield input("> ")
        except (EOFError, KeyboardInterrupt):
            print()
            return


def print_stream(
    pieces: Generator[str, None, RequestOutput], keep: Callable[[str], None] = lambda piece: None
) -> RequestOutput:
    """Print pieces as they come and a line's end; returns the finished request. keep: is given every piece."""
    try:
        while True:
            piece = next(pieces)
            keep(piece)
            print(piece, end="", flush=True)
    except StopIteration as end:
        print()
        return end.value
    finally:
        pieces.close()


def statistics(out: RequestOutput) -> str:
    """Say in brackets what one request took."""
    rate = len(out.tokens) / out.time_s
    return f"[{len(out.tokens)} tokens, {out.finish_reason}, {rate:.1f} tokens/s, tau {out.acceptance.tau:.2f}]"


def command(
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
    drafting = drafting_of(named_draft(draft, target), model, 1, steps)
    engine = drafting.attach(model, tokenizer, max_batch=1, prefix_cache="auto")
    for line in (engine_line(engine), drafting.note, LEAVE):
        if line:
            print(line, file=sys.stderr)
    law: dict[str, Any] = {}
    if temperature is not None:
        law = {"temperature": temperature or None, "do_sample": temperature > 0}
    run_chat(engine, typed_lines(), system, max_new_tokens=max_new_tokens, **law)
