"""The engine's side of a server: creates the requests that an API server asks for, and sends it their tokens.

The engine's driver steps in its own thread. HTTP, JSON and text are left to the API server's process, so that no step
waits for them.
"""

import asyncio
import pickle
import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from specdec.api import Engine
from specdec.core.engine.calls import Call
from specdec.core.engine.request import Request
from specdec.core.outputs import Report, TokenLogprob
from specdec.tools.serve.channel import COMPILING, Channel
from specdec.tools.serve.process import shared_fairly


class Made(NamedTuple):
    """Facts about a created request that the API server needs to decode its text.

    reads_prompt: stop strings may begin in the prompt.
    """

    eos_ids: frozenset[int]
    stop_strings: tuple[str, ...]
    reads_prompt: bool


class Update(NamedTuple):
    """New tokens of one choice of a call. error: the error that ended the whole call."""

    number: int
    choice: int = 0
    tokens: Sequence[int] = ()
    logprobs: Sequence[TokenLogprob] = ()
    finish_reason: str | None = None
    num_cached: int = 0
    error: Exception | None = None


class Load(NamedTuple):
    """The engine's report, its running and waiting requests, and the tokens of finished ones."""

    report: Report
    num_running: int
    num_waiting: int
    num_tokens: int


class HostedCall(Call):
    """A call whose updates the host sends to the API server."""

    def __init__(self, host: "EngineHost", number: int, requests: Sequence[Request], wants_tokens: bool):
        super().__init__(host.core.calls, requests, wants_tokens)
        self.number, self._host = number, host
        self._unfinished = dict(enumerate(requests))  # by choice, until their finish reason is sent
        self._num_sent = [0] * len(requests)

    def updates(self) -> Iterator[Update]:
        """Yield the new tokens of each choice since the last call."""
        for choice, request in list(self._unfinished.items()):
            reason = request.finish_reason  # read first: another thread is stepping
            if reason is None and not self._wants_tokens:
                continue
            start = self._num_sent[choice]
            tokens = request.tokens[start:]
            if reason is None and tokens and tokens[-1] in request.stop_ids:
                tokens.pop()  # sent with the finish reason, which is set next
            scores = (request.logprobs or [])[start : start + len(tokens)]
            self._num_sent[choice] += len(tokens)
            if reason:
                del self._unfinished[choice]
            if reason or tokens:
                yield Update(self.number, choice, tokens, scores, reason, request.num_cached)

    def _tell(self) -> None:
        self._host.changed[self] = None
        self._calls.note(self._host)


class EngineHost:
    """Serves one API server at the other end of `sock`, in its own event loop.

    Requests are (number, method, arguments), responses (number, answer, error). Tokens are sent as a list of the fields
    of each `Update`, one list for each "ready" of the API server: while it is busy, updates are collected.
    """

    def __init__(self, engine: Engine, sock: socket.socket):
        self.engine, self.core, self._driver = engine, engine._attached(), engine._driven()
        self.changed: dict[HostedCall, None] = {}
        self._sock = sock
        self._calls: dict[int, HostedCall] = {}
        self._num_tokens = 0
        self._is_awaited = asyncio.Event()
        self._compiling = asyncio.Semaphore(COMPILING)

    def run(self) -> None:
        """Serve until the API server closes its end; then drop all of its requests."""
        with shared_fairly(self.core.device.type):
            asyncio.run(self._serve())

    @property
    def has_news(self) -> bool:
        """True once there is something to send."""
        return bool(self.changed)

    async def _serve(self) -> None:
        channel = await Channel.over(self._sock)
        try:
            async with asyncio.TaskGroup() as tasks:
                sending = tasks.create_task(self._send_updates(channel))
                async for number, method, arguments in channel:
                    if method == "ready":
                        self._is_awaited.set()
                    elif method == "end":
                        self._end(number)
                    else:
                        tasks.create_task(self._answer(channel, number, method, arguments))
                sending.cancel()
        finally:
            for number in list(self._calls):
                self._end(number)
            await channel.close()

    async def _answer(self, channel: Channel, number: int, method: str, arguments: tuple[Any, ...]) -> None:
        try:
            answer, error = await getattr(self, method)(number, *arguments), None
        except Exception as raised:
            answer, error = None, portable(raised)
        channel.send((number, answer, error))

    async def _send_updates(self, channel: Channel) -> None:
        while True:
            await self._is_awaited.wait()
            await self.core.calls.wait(self)
            updates: list[Update] = []
            while self.changed:
                call, _ = self.changed.popitem()
                try:
                    call.take()
                    updates += call.updates()
                except Exception as error:
                    updates.append(Update(call.number, error=portable(error)))
                    self._end(call.number)
                if call.is_over:
                    self._end(call.number)
            if updates:
                self._is_awaited.clear()
                channel.send([tuple(one) for one in updates])  # plain tuples pickle six times faster

    def _end(self, number: int) -> None:
        """Drop a call; its unfinished requests free their rows and pages after the current step."""
        if (call := self._calls.pop(number, None)) is not None:
            self._driver.end(call)
            self._num_tokens += sum(len(request.tokens) for request in call.requests)

    async def start(self, number: int, prompts: list[Any], options: dict[str, Any], wants_tokens: bool) -> list[Made]:
        """Create and queue a request for every prompt, with options of `Engine.generate`."""
        requests = await asyncio.to_thread(self.engine._requests, prompts, **options)
        call = self._calls[number] = HostedCall(self, number, requests, wants_tokens)
        self._driver.begin(call)
        texts = [request.detokenizer for request in requests]
        return [Made(r.eos_ids, t.stop_strings, t.reads_prompt) for r, t in zip(requests, texts, strict=True)]

    async def compile_grammar(self, _: int, grammar: Any) -> None:
        """Compile a grammar into the engine's cache; ValueError for an invalid one."""
        async with self._compiling:
            await asyncio.to_thread(self.engine.compile_grammar, grammar)

    async def load(self, _: int) -> Load:
        """Return the `Load`; waits for the current step."""
        report, queues = await asyncio.to_thread(self.engine.report), self.core.scheduler
        return Load(report, len(queues.running), len(queues.waiting), self._num_tokens)


@contextmanager
def hosted(engine: Engine, sock: socket.socket) -> Iterator[None]:
    """Run an `EngineHost` for `sock` in a thread; the body must close the other end, or end its process."""
    thread = threading.Thread(target=EngineHost(engine, sock).run, name="specdec-host", daemon=True)
    thread.start()
    try:
        yield
    finally:
        thread.join()


def portable(error: Exception) -> Exception:
    """Return `error`, or a RuntimeError in its place if it cannot be pickled."""
    try:
        return pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(repr(error))
