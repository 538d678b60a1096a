"""Load for an OpenAI-compatible server: requests of random lengths, by clients that ask again and again or by chance.

Run as a process of its own, it takes no time from a server beside it: it reads a `Load` from stdin as JSON and prints
the row. It imports nothing of the engine.

Lengths of prompts and texts are drawn from lognormal laws, each request's from its own number, so that runs compare.
The default means, 161 and 338 tokens, are those of ShareGPT (vLLM, arXiv 2309.06180, section 6.1); its long tail is
about a spread of 1: the standard deviation of the logarithm.
"""

import asyncio
import json
import math
import random
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import httpx

PATH = "/v1/completions"
# a token each with the tokenizers of Llama, Qwen and SmolLM2
WORDS = "the of and to in is that it was for on are with as his they at be this from have or by one had not but".split()
PAUSE = 0.1  # seconds after which a client that was refused asks again
BAD = ("{", '{"prompt": "x", "suffix": "y"}', '{"prompt": [999999999]}', '{"prompt": [5], "max_tokens": 99999999}')


@dataclass(frozen=True)
class Load:
    """What is sent where. clients: so many that ask one request after the other; or rate: requests that arrive a
    second, at random (Poisson).

    seconds: of the window that is measured, after `warm_up`. spread: 0 for texts of equal lengths. longest: tokens of
    prompt and text together. vocab: prompts are token ids below it; None: text. does_harm: clients also leave in the
    middle of a text, and send what is refused.
    """

    url: str
    model: str
    seconds: float
    warm_up: float
    longest: int
    clients: int | None = None
    rate: float | None = None
    prompt_tokens: float = 161.0
    new_tokens: float = 338.0
    spread: float = 1.0
    vocab: int | None = None
    api_key: str | None = None
    does_harm: bool = False

    def body(self, number: int) -> dict[str, Any]:
        """Return the body of request `number`."""
        rng = random.Random(number)
        new = self._length(rng, self.new_tokens, self.longest - 1)
        size = self._length(rng, self.prompt_tokens, self.longest - new)
        options = {"temperature": 0, "ignore_eos": True, "stream": True, "stream_options": {"include_usage": True}}
        return {"model": self.model, "prompt": self._prompt(rng, size), "max_tokens": new, **options}

    def _length(self, rng: random.Random, mean: float, most: int) -> int:
        median = math.log(mean) - self.spread**2 / 2
        return max(1, min(round(rng.lognormvariate(median, self.spread)), most))

    def _prompt(self, rng: random.Random, size: int) -> str | list[int]:
        if self.vocab is not None:
            return [rng.randrange(5, self.vocab) for _ in range(size)]
        return " ".join(rng.choices(WORDS, k=size))


@dataclass
class Seen:
    """What came of the requests within the window, seconds and tokens, one number a request but for `gaps`.

    between: mean time of a token after the first; gaps: times between two pieces of text. counts: of finished ones,
    and of those that ended otherwise, by name.
    """

    begin: float
    end: float
    firsts: list[float] = field(default_factory=list)
    between: list[float] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    errors: Counter[str] = field(default_factory=Counter)

    def note(self, asked: float, times: Sequence[float], num_tokens: int) -> None:
        """Take note of a text whose pieces came at `times`."""
        if not times:
            return
        if self.holds(times[0]):
            self.firsts.append(times[0] - asked)
        self.gaps += [b - a for a, b in zip(times, times[1:], strict=False) if self.holds(b)]
        if num_tokens and self.holds(times[-1]):
            self.counts["finished"] += 1
            self.tokens.append(num_tokens)
            if num_tokens > 1:
                self.between.append((times[-1] - times[0]) / (num_tokens - 1))

    def holds(self, moment: float) -> bool:
        """True within the window."""
        return self.begin <= moment < self.end

    def row(self) -> dict[str, Any]:
        """Return the figures of a row."""
        seconds = self.end - self.begin
        row: dict[str, Any] = {"requests_s": round(self.counts["finished"] / seconds, 3)}
        row["tok_s"] = round(sum(self.tokens) / seconds, 1)
        for name, values in (("ttft_ms", self.firsts), ("token_ms", self.between), ("gap_ms", self.gaps)):
            row |= {f"{name}_p{q}": round(1e3 * percentile(values, q), 3) for q in (50, 99) if values}
        return {**row, **self.counts, "errors": sum(self.errors.values()), "notes": dict(self.errors) or None}


def percentile(values: Sequence[float], q: float) -> float:
    """Return the value that `q` percent of `values` do not exceed."""
    return sorted(values)[max(0, math.ceil(len(values) * q / 100) - 1)]


async def measure(load: Load) -> dict[str, Any]:
    """Send the load, and return its row. What is unfinished when the window closes is given up."""
    begin = time.perf_counter() + load.warm_up
    seen, numbers = Seen(begin, begin + load.seconds), count()
    headers = {} if load.api_key is None else {"authorization": f"Bearer {load.api_key}"}
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    async with httpx.AsyncClient(base_url=load.url, timeout=600, limits=limits, headers=headers) as http:
        if load.rate is not None:
            sent: list[Awaitable[None]] = [_arrivals(load, http, seen, numbers)]
            name: dict[str, Any] = {"what": "arrivals", "rate": load.rate}
        else:
            client = _careless if load.does_harm else _client
            sent = [client(load, http, seen, numbers) for _ in range(load.clients or 1)]
            name = {"what": "clients", "clients": load.clients}
        tasks = [asyncio.ensure_future(one) for one in sent]
        done, _ = await asyncio.wait(tasks, timeout=seen.end - time.perf_counter(), return_when=asyncio.FIRST_EXCEPTION)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for task in done:
            task.result()
    return {**name, **seen.row()}


async def _client(load: Load, http: httpx.AsyncClient, seen: Seen, numbers: "count[int]") -> None:
    while True:
        if not await _ask(load.body(next(numbers)), http, seen):
            await asyncio.sleep(PAUSE)


async def _careless(load: Load, http: httpx.AsyncClient, seen: Seen, numbers: "count[int]") -> None:
    """A client that also leaves in the middle of a text, or sends what is refused."""
    while True:
        rng = random.Random(f"harm {(number := next(numbers))}")
        kind = rng.choice(("finishes", "finishes", "leaves", "is refused"))
        if kind == "is refused":
            answer = await http.post(PATH, content=rng.choice(BAD))
            assert answer.status_code == 400, answer.text
            seen.counts["refused"] += 1
        else:
            await _ask(load.body(number), http, seen, rng.randrange(1, 4) if kind == "leaves" else None)


async def _arrivals(load: Load, http: httpx.AsyncClient, seen: Seen, numbers: "count[int]") -> None:
    """Requests whose times of arrival are a Poisson process."""
    assert load.rate is not None
    async with asyncio.TaskGroup() as group:
        due = time.perf_counter()
        for number in numbers:
            due += random.Random(f"arrival {number}").expovariate(load.rate)
            await asyncio.sleep(due - time.perf_counter())
            group.create_task(_ask(load.body(number), http, seen))


async def _ask(body: dict[str, Any], http: httpx.AsyncClient, seen: Seen, leave_after: int | None = None) -> bool:
    """Send one request and read its text, or a few pieces of it. Returns False if there was none."""
    asked, times, num_tokens, problem = time.perf_counter(), list[float](), 0, None
    try:
        async with http.stream("POST", PATH, json=body) as response:
            if response.status_code != 200:
                problem = f"status {response.status_code}"
            else:
                async with aclosing(_events(response.aiter_raw())) as events:
                    async for chunk in events:
                        num_tokens = (chunk.get("usage") or {}).get("completion_tokens", num_tokens)
                        if "error" in chunk:
                            problem = "error in a stream"
                        elif any(choice.get("text") for choice in chunk["choices"]):
                            times.append(time.perf_counter())
                        if len(times) == leave_after:
                            seen.counts["vanished"] += 1
                            return True
                if not num_tokens:
                    problem = problem or "a stream without usage"
    except httpx.HTTPError as error:
        problem = type(error).__name__
    if problem is not None and seen.holds(time.perf_counter()):
        seen.errors[problem] += 1
    seen.note(asked, times, 0 if problem else num_tokens)
    return problem is None


async def _events(parts: AsyncIterator[bytes]) -> AsyncIterator[dict[str, Any]]:
    """Yield the JSON of a stream's events."""
    rest = b""
    async for part in parts:
        *events, rest = (rest + part).split(b"\n\n")
        for event in events:
            if event.startswith(b"data: {"):
                yield json.loads(event[6:])


def main() -> None:
    """Read a `Load`, send it, print its row."""
    print(json.dumps(asyncio.run(measure(Load(**json.load(sys.stdin))))))


if __name__ == "__main__":
    main()
