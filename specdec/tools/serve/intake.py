"""Texts that are being served: how many may join, their pieces as they become certain, and their end.

Knows neither HTTP nor JSON. The engine's driver submits, steps and abandons in a thread of its own; text is decoded
here, in the event loop, so that no step waits for it.
"""

import asyncio
import json
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Sequence
from contextlib import aclosing, contextmanager, suppress
from typing import NamedTuple, TextIO

from specdec.api import Engine
from specdec.core.engine.calls import Call
from specdec.core.engine.request import Request
from specdec.core.errors import DetachedError
from specdec.core.outputs import TokenLogprob


class Gone(Exception):
    """The client has left."""


class Closing(Exception):
    """No text is begun any more, or this one was ended."""


class Busy(Exception):
    """Too many texts wait."""


class Failed(Exception):
    """The engine could not finish a text."""


class StreamPiece(NamedTuple):
    """A part of the text of a choice that is final. finish_reason: the request's, once the text is complete.

    tokens, logprobs: emitted since the last piece, which hold this text and what is held back; none if the engine
    computes no log-probabilities.
    """

    choice: int
    text: str
    finish_reason: str | None
    tokens: Sequence[int] = ()
    logprobs: Sequence[TokenLogprob] = ()


class Intake:
    """Lets texts join while rows or `max_waiting` places are free. num_tokens: of those that have ended. log: takes the
    token ids of complete texts, a line of JSON each, but of those about images, which ids do not hold.

    One event loop uses it; other threads may only `drain` it and read it.
    """

    def __init__(self, engine: Engine, max_waiting: int, log: TextIO | None = None):
        self.engine = engine
        self.num_tokens = 0
        self.is_open = True
        self._log = log
        self._most = engine.config.max_batch + max_waiting
        self._num_coming = 0  # texts whose requests are being made
        self._calls: dict[Call, None] = {}
        self._loop: asyncio.AbstractEventLoop | None = None

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Serve in `loop`."""
        self._loop = loop

    @property
    def requests(self) -> list[Request]:
        """All that run or wait."""
        return [request for call in list(self._calls) for request in call.requests if request.finish_reason is None]

    @contextmanager
    def room_for(self, count: int) -> Iterator[None]:
        """Count `count` texts among those that wait, while their requests are made and until `follow` has begun; raises
        Busy if too many do, ValueError if so many never can."""
        if count > self._most:
            raise ValueError(
                f"{count} texts at once: at most {self._most} run and wait; lower n, or send fewer prompts"
            )
        there = sum([len(call.left) for call in self._calls]) + self._num_coming
        if there + count > self._most:
            raise Busy(
                f"{there} requests run or wait and {count} would be added: at most {self._most}; try again later"
            )
        self._num_coming += count
        try:
            yield
        finally:
            self._num_coming -= count

    async def follow(
        self, requests: Sequence[Request], gone: Callable[[], Awaitable[None]], wants_tokens: bool
    ) -> AsyncGenerator[StreamPiece, None]:
        """Yield an empty piece at once, then the pieces of `requests`, a choice each, until all have ended; with
        `wants_tokens` as they come, else each text whole.

        Raises Closing, Gone when `gone` returns, Failed for what ends one of them, DetachedError. Whatever ends this
        frees their rows and pages after the current step.
        """
        if not self.is_open:
            raise Closing("the server is shutting down")
        call = self.engine._attached().call(requests, wants_tokens)
        self._calls[call] = None
        watch = asyncio.ensure_future(_fail_when(gone, call))
        num_given = [0] * len(requests)  # tokens whose log-probabilities have been handed out
        left = dict(enumerate(requests))
        logged = [request for request in requests if request.embedded is None and self._log is not None]
        try:
            yield StreamPiece(0, "", None)
            async with aclosing(self.engine._arun(call)) as run:
                async for _ in run:
                    for choice, request in list(left.items()):
                        reason = request.finish_reason  # first: a thread steps meanwhile
                        if reason is None and not wants_tokens:
                            continue
                        if reason == "error":
                            raise FloatingPointError("the target's logits are not finite")
                        text, tokens = request.read(), request.tokens[num_given[choice] :]
                        if text or reason:
                            num_given[choice] += len(tokens)
                            scores = (request.logprobs or [])[num_given[choice] - len(tokens) : num_given[choice]]
                            yield StreamPiece(choice, text, reason, tokens if scores else (), scores)
                        if reason:
                            del left[choice]
                            if request in logged:
                                self._write(request)
        except (Closing, Gone, DetachedError):
            raise
        except Exception as error:
            raise Failed(f"the request failed: {error!r}") from error
        finally:
            watch.cancel()
            self._calls.pop(call, None)
            self.num_tokens += sum(len(request.tokens) for request in requests)

    def drain(self, seconds: float) -> None:
        """Let no more texts join, and end those that are unfinished after `seconds`; from any thread."""
        self.is_open = False
        if self._loop is not None:
            with suppress(RuntimeError):  # the loop is closed: nobody is served
                self._loop.call_soon_threadsafe(self._loop.call_later, seconds, self._end_all)

    def _write(self, request: Request) -> None:
        ids = {"prompt_token_ids": list(request.prompt_ids), "token_ids": list(request.tokens)}
        print(json.dumps(ids), file=self._log, flush=True)

    def _end_all(self) -> None:
        for call in list(self._calls):
            call.fail(Closing("the server is shutting down"))


async def _fail_when(gone: Callable[[], Awaitable[None]], call: Call) -> None:
    await gone()
    call.fail(Gone())
