"""`specdec chat`: a conversation in the terminal, with what speculation gave after every answer."""

import sys
from collections.abc import Callable, Generator, Iterable
from typing import Any

from specdec.api import Engine
from specdec.outputs import RequestOutput


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
