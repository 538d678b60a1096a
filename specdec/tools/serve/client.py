"""The API server's side of an engine that is in another process, or another thread: see `host.py`.

Knows neither HTTP nor JSON. Texts are decoded here.
"""

import asyncio
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from specdec.api import Engine
from specdec.core.config import EngineConfig
from specdec.core.engine.calls import LONGEST_REST, REST
from specdec.core.errors import DetachedError
from specdec.core.outputs import TokenLogprob
from specdec.core.text.detokenizer import Detokenizer
from specdec.tools.serve.channel import Channel
from specdec.tools.serve.host import Load, Update


@dataclass(frozen=True)
class Facts:
    """What an API server knows of its engine. samples: whether texts are sampled by default."""

    config: EngineConfig
    tokenizer: Any
    processor: Any
    adapters: tuple[str, ...]
    samples: bool
    reads_images: bool
    device_type: str

    @classmethod
    def of(cls, engine: Engine) -> "Facts":
        reads_images = engine.processor is not None and bool(engine._attached().target.images.names)
        samples = bool(engine.report().generation.get("do_sample"))
        device_type = engine.target_module.device.type
        return cls(
            engine.config, engine.tokenizer, engine.processor, engine.adapters, samples, reads_images, device_type
        )


@dataclass
class Text:
    """A text that the engine generates, as far as it has come. has_images: its prompt's ids do not hold all of it."""

    prompt_ids: Sequence[int]
    has_images: bool
    eos_ids: frozenset[int]
    detokenizer: Detokenizer
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish_reason: str | None = None
    num_cached: int = 0

    def take(self, update: Update) -> None:
        """Append what has come."""
        self.tokens += update.tokens
        self.logprobs += update.logprobs
        self.finish_reason, self.num_cached = update.finish_reason, update.num_cached

    def read(self) -> str:
        """Return the text that has become certain since the last call; all the rest once it is finished."""
        tokens = self.tokens[self.detokenizer.num_fed :]
        text = self.detokenizer.feed(tokens) if tokens else ""
        return text if self.finish_reason is None else text + self.detokenizer.finish()


class TextCall:
    """The texts of one request of a client."""

    def __init__(self, number: int):
        self.number = number
        self.texts: list[Text] = []
        self._error: Exception | None = None
        self._updates: list[Update] = []  # which may come before the texts are known
        self._has_updates = asyncio.Event()

    @property
    def left(self) -> list[Text]:
        """Texts that are not finished."""
        return [text for text in self.texts if text.finish_reason is None]

    def tell(self, update: Update) -> None:
        """Note what has come."""
        self._updates.append(update)
        self._has_updates.set()

    def fail(self, error: Exception) -> None:
        """Make the next `wait` raise `error`."""
        self._error = error
        self._has_updates.set()

    async def wait(self) -> None:
        """Return once texts have got tokens since the last call; raise the error that ended them."""
        await self._has_updates.wait()
        self._has_updates.clear()
        updates, self._updates = self._updates, []
        for update in updates:
            if update.error is not None:
                raise update.error
            self.texts[update.choice].take(update)
        if self._error is not None:
            raise self._error


class EngineClient:
    """Asks the engine at the other end of a socket, from one event loop. rests: the loop does, in proportion to
    the time that it takes for texts, since the engine steps in this process, or on this CPU."""

    def __init__(self, facts: Facts, rests: bool):
        self.config, self.tokenizer, self.processor = facts.config, facts.tokenizer, facts.processor
        self.facts = facts
        self._rest = REST if rests else 0.0
        self._numbers = count(1)
        self._asked: dict[int, asyncio.Future[Any]] = {}
        self._calls: dict[int, TextCall] = {}

    async def connect(self, sock: socket.socket, on_lost: Callable[[], None]) -> None:
        """Begin; the engine's host is at the other end of `sock`. on_lost: called once that is gone, or at `close`."""
        self._loop, self._channel = asyncio.get_running_loop(), await Channel.over(sock)
        self._reading = asyncio.create_task(self._read())
        self._reading.add_done_callback(lambda _: on_lost())
        self._say_ready()

    async def close(self) -> None:
        """Leave; the engine forgets what was asked for."""
        self._reading.cancel()
        await self._channel.close()

    async def start(
        self,
        prompts: Sequence[Any],
        prompt_ids: Sequence[Sequence[int]],
        options: Mapping[str, Any],
        streams: bool,
        goes_on: bool = False,
    ) -> TextCall:
        """Have a text generated for every prompt, with options of `Engine.generate`; without `streams` it comes whole.

        goes_on: the text is what the prompt goes on with, its first space included; an answer begins anew. ValueError
        for what `generate` refuses.
        """
        call = TextCall(next(self._numbers))
        self._calls[call.number] = call
        try:
            made = await self._ask(call.number, "start", prompts, options, streams)
        except BaseException:
            self.end(call)
            raise
        skips_special = options.get("skip_special_tokens", True)
        for prompt, ids, facts in zip(prompts, prompt_ids, made, strict=True):
            before = ids if facts.reads_prompt else ()
            after = ids if goes_on and not facts.reads_prompt else ()
            detokenizer = Detokenizer(self.tokenizer, facts.stop_strings, before, skips_special, after)
            call.texts.append(Text(ids, isinstance(prompt, Mapping), facts.eos_ids, detokenizer))
        return call

    def end(self, call: TextCall) -> None:
        """Let the engine forget what is left of `call`."""
        del self._calls[call.number]
        self._channel.send((call.number, "end", ()))

    def compile_grammar(self, grammar: Any) -> Any:
        """Have the engine compile what a request will ask for, from another thread; returns it."""
        self._ask_and_wait("compile_grammar", grammar)
        return grammar

    def load(self) -> Load:
        """Return what the engine does now, to another thread."""
        return self._ask_and_wait("load")

    def _ask_and_wait(self, method: str, *arguments: Any) -> Any:
        question = self._ask(next(self._numbers), method, *arguments)
        return asyncio.run_coroutine_threadsafe(question, self._loop).result()

    async def _ask(self, number: int, method: str, *arguments: Any) -> Any:
        if self._reading.done():
            raise _gone()
        future = self._asked[number] = self._loop.create_future()
        self._channel.send((number, method, arguments))
        return await future

    async def _read(self) -> None:
        try:
            async for message in self._channel:
                if isinstance(message, list):
                    self._tell(message)
                else:
                    number, answer, error = message
                    future = self._asked.pop(number)
                    if not future.done():
                        future.set_result(answer) if error is None else future.set_exception(error)
        finally:
            for future in self._asked.values():
                if not future.done():
                    future.set_exception(_gone())
            for call in self._calls.values():
                call.fail(_gone())

    def _tell(self, updates: Sequence[tuple[Any, ...]]) -> None:
        """Wake who waits for texts, and afterwards ask for more."""
        began = time.thread_time()
        for update in map(Update._make, updates):
            if (call := self._calls.get(update.number)) is not None:  # else its client has left
                call.tell(update)
        self._loop.call_soon(self._relax, began)  # behind the tasks

    def _relax(self, began: float) -> None:
        rest = min(self._rest * (time.thread_time() - began), LONGEST_REST)
        if rest:
            self._loop.call_later(rest, self._say_ready)
        else:
            self._say_ready()

    def _say_ready(self) -> None:
        self._channel.send((0, "ready", ()))


def _gone() -> DetachedError:
    return DetachedError("the engine is gone: start the server again")
