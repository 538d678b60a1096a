"""The API server's client of an engine in another process or thread; `host.py` is the other side.

Detokenizes texts; knows neither HTTP nor JSON.
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
    """Static facts about the engine. samples: texts are sampled by default."""

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
    """A text in generation: its tokens so far. has_images: the prompt has images, which `prompt_ids` do not hold."""

    prompt_ids: Sequence[int]
    has_images: bool
    eos_ids: frozenset[int]
    detokenizer: Detokenizer
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish_reason: str | None = None
    num_cached: int = 0

    def take(self, update: Update) -> None:
        """Append the tokens of `update`."""
        self.tokens += update.tokens
        self.logprobs += update.logprobs
        self.finish_reason, self.num_cached = update.finish_reason, update.num_cached

    def read(self) -> str:
        """Return the text that became final since the last call; once finished, all of the rest."""
        tokens = self.tokens[self.detokenizer.num_fed :]
        text = self.detokenizer.feed(tokens) if tokens else ""
        return text if self.finish_reason is None else text + self.detokenizer.finish()


class TextCall:
    """The texts of one HTTP request."""

    def __init__(self, number: int):
        self.number = number
        self.texts: list[Text] = []
        self._error: Exception | None = None
        self._updates: list[Update] = []  # they may arrive before `texts` is filled
        self._has_updates = asyncio.Event()

    @property
    def left(self) -> list[Text]:
        """Unfinished texts."""
        return [text for text in self.texts if text.finish_reason is None]

    def tell(self, update: Update) -> None:
        """Queue an update and wake the task in `wait`."""
        self._updates.append(update)
        self._has_updates.set()

    def fail(self, error: Exception) -> None:
        """Make the next `wait` raise `error`."""
        self._error = error
        self._has_updates.set()

    async def wait(self) -> None:
        """Wait for new tokens and apply them to `texts`; raise the error that ended the call."""
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
    """Sends requests to the engine at the other end of a socket, from one event loop. rests: the loop pauses in
    proportion to the time it spends on texts, because the engine steps in this process or on this CPU."""

    def __init__(self, facts: Facts, rests: bool):
        self.config, self.tokenizer, self.processor = facts.config, facts.tokenizer, facts.processor
        self.facts = facts
        self._rest = REST if rests else 0.0
        self._numbers = count(1)
        self._asked: dict[int, asyncio.Future[Any]] = {}
        self._calls: dict[int, TextCall] = {}

    async def connect(self, sock: socket.socket, on_lost: Callable[[], None]) -> None:
        """Connect to the `EngineHost` at the other end of `sock`. on_lost: called when that closes, and at `close`."""
        self._loop, self._channel = asyncio.get_running_loop(), await Channel.over(sock)
        self._reading = asyncio.create_task(self._read())
        self._reading.add_done_callback(lambda _: on_lost())
        self._say_ready()

    async def close(self) -> None:
        """Disconnect; the engine drops all requests of this client."""
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
        """Start generating a text for every prompt, with options of `Engine.generate`.

        streams: tokens arrive as they are generated, not all at the end. goes_on: the text continues the prompt, so its
        first space is kept; else it is an answer. ValueError for what `generate` refuses.
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
        """Drop the unfinished requests of `call` in the engine."""
        del self._calls[call.number]
        self._channel.send((call.number, "end", ()))

    def compile_grammar(self, grammar: Any) -> Any:
        """Compile `grammar` in the engine and return it; to be called from another thread."""
        self._ask_and_wait("compile_grammar", grammar)
        return grammar

    def load(self) -> Load:
        """Return the engine's current load; to be called from another thread."""
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
        """Deliver updates to their calls, then ask for more."""
        began = time.thread_time()
        for update in map(Update._make, updates):
            if (call := self._calls.get(update.number)) is not None:  # else the client disconnected
                call.tell(update)
        self._loop.call_soon(self._relax, began)  # after the tasks that were woken

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
