"""Texts being served: how many may be queued, their pieces as they become final, and their end.

Knows neither HTTP nor JSON.
"""

import asyncio
import json
import warnings
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import NamedTuple, TextIO

from specdec.core.errors import DetachedError
from specdec.core.outputs import TokenLogprob
from specdec.tools.serve.client import EngineClient, Text, TextCall


class Gone(Exception):
    """The client has disconnected."""


class Closing(Exception):
    """The server is shutting down: the text was refused or ended."""


class Busy(Exception):
    """The queue is full."""


class Failed(Exception):
    """The engine failed to finish a text."""


class StreamPiece(NamedTuple):
    """A final part of a choice's text. finish_reason: the request's, once the text is complete.

    tokens, logprobs: emitted since the last piece; some of their text may still be held back. Empty if the engine
    computes no log-probabilities.
    """

    choice: int
    text: str
    finish_reason: str | None
    tokens: Sequence[int] = ()
    logprobs: Sequence[TokenLogprob] = ()


class Intake:
    """Admits texts while rows or `max_waiting` places are free. log: gets the token ids of each complete text, as a
    line of JSON; texts with images are left out, since ids do not hold images.

    Used from one event loop; other threads may only `drain` it and read it.
    """

    def __init__(self, engine: EngineClient, max_waiting: int, log: TextIO | None = None):
        self.engine = engine
        self.is_open = True
        self._log = log
        self._most = engine.config.max_batch + max_waiting
        self._num_coming = 0  # texts whose requests are being created
        self._calls: dict[TextCall, None] = {}
        self._loop: asyncio.AbstractEventLoop | None = None

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Serve in `loop`."""
        self._loop = loop

    @property
    def texts(self) -> list[Text]:
        """All unfinished texts."""
        return [text for call in list(self._calls) for text in call.left]

    @contextmanager
    def room_for(self, count: int) -> Iterator[None]:
        """Reserve places for `count` texts while their requests are created, until `follow` takes over. Busy if the
        queue is full, ValueError if it can never hold so many."""
        if count > self._most:
            raise ValueError(
                f"{count} texts at once: at most {self._most} run and wait; lower n, or send fewer prompts"
            )
        there = len(self.texts) + self._num_coming
        if there + count > self._most:
            raise Busy(
                f"{there} requests run or wait and {count} would be added: at most {self._most}; try again later"
            )
        self._num_coming += count
        try:
            yield
        finally:
            self._num_coming -= count

    async def follow(self, call: TextCall, gone: Callable[[], Awaitable[None]]) -> AsyncGenerator[StreamPiece, None]:
        """Yield an empty piece at once, then the pieces of the texts of `call`, one choice each, until all have ended.

        Raises Closing at shutdown, Gone once `gone` returns, Failed for an error of a text, DetachedError. However it
        ends, rows and pages are freed after the current step.
        """
        self._calls[call] = None
        watch = asyncio.ensure_future(_fail_when(gone, call))
        num_given = [0] * len(call.texts)  # tokens whose log-probabilities have been handed out
        left = dict(enumerate(call.texts))
        try:
            if not self.is_open:
                raise Closing("the server is shutting down")
            yield StreamPiece(0, "", None)
            while left:
                await call.wait()
                for choice, text in list(left.items()):
                    reason = text.finish_reason
                    if reason == "error":
                        raise FloatingPointError("the target's logits are not finite")
                    said, tokens = text.read(), text.tokens[num_given[choice] :]
                    if said or reason:
                        scores = text.logprobs[num_given[choice] :]
                        num_given[choice] += len(tokens)
                        yield StreamPiece(choice, said, reason, tokens if scores else (), scores)
                    if reason:
                        del left[choice]
                        if self._log is not None and not text.has_images:
                            self._write(text)
        except (Closing, Gone, DetachedError):
            raise
        except Exception as error:
            raise Failed(f"the request failed: {error!r}") from error
        finally:
            watch.cancel()
            del self._calls[call]
            self.engine.end(call)

    def drain(self, seconds: float) -> None:
        """Refuse new texts, and end those still unfinished after `seconds`; callable from any thread."""
        self.is_open = False
        if self._loop is not None:
            with suppress(RuntimeError):  # the loop is closed: no text is served
                self._loop.call_soon_threadsafe(self._loop.call_later, seconds, self._end_all)

    def _write(self, text: Text) -> None:
        ids = {"prompt_token_ids": list(text.prompt_ids), "token_ids": text.tokens}
        try:
            print(json.dumps(ids), file=self._log, flush=True)
        except OSError as error:  # such as a full disk; the client still gets its text
            assert self._log is not None
            with suppress(OSError):
                self._log.close()
            self._log = None
            warnings.warn(f"--log: {error}: nothing is logged from now on", stacklevel=2)

    def _end_all(self) -> None:
        for call in list(self._calls):
            call.fail(Closing("the server is shutting down"))


async def _fail_when(gone: Callable[[], Awaitable[None]], call: TextCall) -> None:
    await gone()
    call.fail(Gone())
