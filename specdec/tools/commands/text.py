"""`specdec chat` and `specdec generate`: text in the terminal, with tokens/s and tau after it."""

import sys
from collections.abc import Callable, Generator, Iterable
from typing import Any

from specdec.api import Engine
from specdec.core.outputs import RequestOutput
from specdec.reach.targets.pretrained import read_processor
from specdec.tools.commands.choices import GREEDY, WithDraft, engine_line
from specdec.tools.options import argument, command_of, option

LEAVE = "An empty line starts a new chat, Ctrl-C ends an answer, Ctrl-D the chat."
LAW = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "seed")


class Chat(WithDraft):
    """Chat in the terminal. An empty line starts a new chat, Ctrl-C ends an answer, Ctrl-D the chat."""

    max_new_tokens: int = option("Maximum number of new tokens.", 512, min=1)
    temperature: float | None = option(GREEDY, min=0)
    system: str | None = option("System message.")

    def run(self) -> None:
        model, tokenizer = self.load()
        drafting = self.drafting(model)
        reader = read_processor(self.target, model) or tokenizer
        engine = drafting.attach(model, reader, max_batch=1, prefix_cache="auto")
        for line in (engine_line(engine), drafting.note, LEAVE):
            if line:
                print(line, file=sys.stderr)
        law: dict[str, Any] = {}
        if self.temperature is not None:
            law = {"temperature": self.temperature or None, "do_sample": self.temperature > 0}
        run_chat(engine, typed_lines(), self.system, max_new_tokens=self.max_new_tokens, **law)


class Generate(WithDraft):
    """Generate for one prompt and stream the text; statistics go to stderr.

    Options left out come from the model's generation_config.
    """

    prompt: str = argument("The prompt; '-' reads it from stdin.")
    max_new_tokens: int = option("Maximum number of new tokens.", 256, min=1)
    temperature: float | None = option(GREEDY, min=0)
    top_k: int | None = option("Sample from the k most likely tokens.")
    top_p: float | None = option("Sample from the most likely tokens whose probabilities sum to p.")
    min_p: float | None = option("Drop tokens below this share of the highest probability.")
    repetition_penalty: float | None = option("Penalty on tokens that occurred before; 1: none.")
    seed: int | None = option("Seed of the random draws; default: new in each run.")
    stop: list[str] | None = option("Stop string; may be repeated.")
    raw: bool = option("Continue the prompt as it is, without the chat template.", False)

    def run(self) -> None:
        given = {name: getattr(self, name) for name in LAW if getattr(self, name) is not None}
        if self.temperature is not None:
            given["do_sample"] = self.temperature > 0
        prompt = sys.stdin.read() if self.prompt == "-" else self.prompt
        if self.prompt == "-":
            prompt = prompt.removesuffix("\n") if self.raw else prompt.strip()
        if self.prompt == "-" and not prompt:
            raise ValueError("the prompt is '-', but stdin is empty: expected a prompt there")
        model, tokenizer = self.load()
        # not compiled: one text would not repay the compile time
        reader = read_processor(self.target, model) or tokenizer
        drafting = self.drafting(model)
        engine = drafting.attach(model, reader, max_batch=1, compile=False)
        question: Any = prompt if self.raw else [{"role": "user", "content": prompt}]
        pieces = engine.stream(question, max_new_tokens=self.max_new_tokens, stop=self.stop, **given)
        print(statistics(print_stream(pieces), drafting.note), file=sys.stderr)


chat, generate = command_of(Chat), command_of(Generate)


def run_chat(engine: Engine, lines: Iterable[str], system: str | None = None, **options: Any) -> list[dict[str, str]]:
    """Answer `lines` in turn, streaming to stdout, statistics to stderr; return the conversation.

    An empty line starts a new conversation. Ctrl-C ends the current answer and keeps its beginning. options: those of
    `Engine.stream`. A conversation that no longer fits the engine is refused, and its last line dropped.
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
    """Yield typed lines, up to the end of input."""
    sys.stdin.reconfigure(errors="surrogateescape")  # type: ignore[union-attr]  # a wrong byte costs its line alone
    while True:
        try:
            yield input("> ")
        except (EOFError, KeyboardInterrupt):
            print()
            return


def print_stream(
    pieces: Generator[str, None, RequestOutput], keep: Callable[[str], None] = lambda piece: None
) -> RequestOutput:
    """Print pieces as they arrive and a final line break; return the finished request. keep: gets every piece."""
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


def statistics(out: RequestOutput, note: str = "") -> str:
    """Format the statistics of one request, and `note`, in brackets."""
    rate = len(out.tokens) / out.time_s
    took = f"{len(out.tokens)} tokens, {out.finish_reason}, {rate:.1f} tokens/s, tau {out.acceptance.tau:.2f}"
    return f"[{took}; {note}]" if note else f"[{took}]"
