"""Load for an OpenAI-compatible server: requests of random lengths, from clients in a loop or at random times.

Clients run in separate processes, so that they take no time from a server in this one, and do not import the engine.

Lengths of prompts and texts are drawn from lognormal laws, each request's by its number, so that runs are comparable.
The default means, 161 and 338 tokens, are those of ShareGPT (vLLM, arXiv 2309.06180, section 6.1); its long tail
corresponds to a spread of about 1: the standard deviation of the logarithm.
"""

import asyncio
import json
import math
import os
import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine, Sequence
from contextlib import aclosing
from dataclasses import asdict, dataclass, field, replace
from itertools import count, pairwise
from typing import Any

import httpx

PATH = "/v1/completions"
# one token each in the tokenizers of Llama, Qwen and SmolLM2
WORDS = "the of and to in is that it was for on are with as his they at be this from have or by one had not but"
CLIENTS = 4  # per process, or requests per second: a process reads about 5,000 pieces per second
PAUSE = 0.1  # seconds after which a refused client asks again
BAD = ("{", '{"prompt": "x", "suffix": "y"}', '{"prompt": [999999999]}', '{"prompt": [5], "max_tokens": 99999999}')


@dataclass(frozen=True)
class Load:
    """The requests to send, and their server. clients: each sends one request after the other; or rate: arrivals per
    second, at random (Poisson).

    seconds: of the window that is measured, after `warm_up`. spread: 0 for texts of equal lengths. longest: tokens of
    prompt and text together. vocab: prompts are token ids below it; None: text. does_harm: clients also disconnect in
    the middle of a text, and send invalid requests. first, step: numbers of the requests that each process sends.
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
    first: int = 0
    step: int = 1

    def parts(self, num: int) -> list["Load"]:
        """Divide the load among `num` processes."""

        def of(clients: int | None, i: int) -> int | None:
            return None if clients is None else clients // num + (i < clients % num)

        rate = None if self.rate is None else self.rate / num
        return [replace(self, clients=of(self.clients, i), rate=rate, first=i, step=num) for i in range(num)]

    def body(self, number: int) -> dict[str, Any]:
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
        return " ".join(rng.choices(WORDS.split(), k=size))


@dataclass
class Seen:
    """Results of the requests within the window: times in seconds, one number per request except `gaps`.

    between: mean time per token after the first; gaps: times between two pieces of text. counts: requests by how they
    ended; errors: by message.
    """

    begin: float = 0.0
    end: float = 0.0
    firsts: list[float] = field(default_factory=list)
    between: list[float] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    num_tokens: int = 0
    counts: Counter[str] = field(default_factory=Counter)
    errors: Counter[str] = field(default_factory=Counter)

    def add(self, other: "Seen") -> None:
        """Add the results of another process."""
        for name in ("firsts", "between", "gaps", "num_tokens"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        for name in ("counts", "errors"):
            getattr(self, name).update(getattr(other, name))

    def note(self, asked: float, times: Sequence[float], num_tokens: int) -> None:
        """Record a text whose pieces arrived at `times`."""
        if not times:
            return
        if self.holds(times[0]):
            self.firsts.append(times[0] - asked)
        self.gaps += [b - a for a, b in pairwise(times) if self.holds(b)]
        if num_tokens and self.holds(times[-1]):
            self.counts["finished"] += 1
            self.num_tokens += num_tokens
            if num_tokens > 1:
                self.between.append((times[-1] - times[0]) / (num_tokens - 1))

    def holds(self, moment: float) -> bool:
        """True within the window."""
        return self.begin <= moment < self.end

    def row(self, seconds: float) -> dict[str, Any]:
        """Return the figures of a row, of a window of `seconds`."""
        row: dict[str, Any] = {"requests_s": round(self.counts["finished"] / seconds, 3)}
        row["tok_s"] = round(self.num_tokens / seconds, 1)
        for name, values in (("ttft_ms", self.firsts), ("token_ms", self.between), ("gap_ms", self.gaps)):
            row |= {f"{name}_p{q}": round(1e3 * percentile(values, q), 3) for q in (50, 99) if values}
        row |= {**self.counts, "errors": sum(self.errors.values())}
        return row | ({"notes": dict(self.errors)} if self.errors else {})


def percentile(values: Sequence[float], q: float) -> float:
    """Return the value that `q` percent of `values` do not exceed."""
    return sorted(values)[max(0, math.ceil(len(values) * q / 100) - 1)]


def measure(load: Load) -> dict[str, Any]:
    """Send the load from processes of up to `CLIENTS` clients, at most one for two cores, and return its row."""
    num = max(1, min(math.ceil((load.clients or load.rate or 1) / CLIENTS), (os.cpu_count() or 1) // 2))
    command = [sys.executable, "-m", __name__]
    pipes: dict[str, Any] = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    running = [(subprocess.Popen(command, **pipes), part) for part in load.parts(num)]
    for process, part in running:
        assert process.stdin is not None
        process.stdin.write(json.dumps(asdict(part)))
        process.stdin.close()
    seen = Seen()
    for process, _ in running:
        assert process.stdout is not None
        out = process.stdout.read()
        if process.wait():
            raise RuntimeError("a client process failed, see above")
        seen.add(Seen(**json.loads(out)))
    name = {"clients": load.clients} if load.rate is None else {"rate": load.rate}
    return {"what": "clients" if load.rate is None else "arrivals", **name, **seen.row(load.seconds)}


def served_model(url: str, api_key: str | None) -> tuple[str, int | None]:
    """Return the name of a server's model, and the length of its longest request in tokens, if it reports that."""
    headers = {} if api_key is None else {"authorization": f"Bearer {api_key}"}
    try:
        answer = httpx.get(f"{url}/v1/models", headers=headers, timeout=60)
        model = answer.raise_for_status().json()["data"][0]
        return model["id"], model.get("max_model_len")
    except (httpx.HTTPError, ValueError, LookupError, TypeError) as error:
        raise ValueError(f"--url {url}: {error!r} for {url}/v1/models; expected an OpenAI-compatible server") from error


async def send(load: Load) -> Seen:
    """Send the load. Requests that are unfinished when the window closes are abandoned."""
    begin = time.perf_counter() + load.warm_up
    seen, numbers = Seen(begin, begin + load.seconds), count(load.first, load.step)
    headers = {} if load.api_key is None else {"authorization": f"Bearer {load.api_key}"}
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    async with httpx.AsyncClient(base_url=load.url, timeout=600, limits=limits, headers=headers) as http:
        if load.rate is not None:
            sent: list[Coroutine[Any, Any, None]] = [_arrivals(load, http, seen, numbers)]
        else:
            client = _careless if load.does_harm else _client
            sent = [client(load, http, seen, numbers) for _ in range(load.clients or 1)]
        tasks = [asyncio.create_task(one) for one in sent]
        done, _ = await asyncio.wait(tasks, timeout=seen.end - time.perf_counter(), return_when=asyncio.FIRST_EXCEPTION)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for task in done:
            task.result()
    return seen


async def _client(load: Load, http: httpx.AsyncClient, seen: Seen, numbers: "count[int]") -> None:
    while True:
        if not await _ask(load.body(next(numbers)), http, seen):
            await asyncio.sleep(PAUSE)


async def _careless(load: Load, http: httpx.AsyncClient, seen: Seen, numbers: "count[int]") -> None:
    """Send requests as a client that also disconnects in the middle of a text, or sends invalid requests."""
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
    """Send requests at the times of a Poisson process."""
    assert load.rate is not None
    async with asyncio.TaskGroup() as group:
        due = time.perf_counter()
        for number in numbers:
            due += random.Random(f"arrival {number}").expovariate(load.rate)
            await asyncio.sleep(due - time.perf_counter())
            group.create_task(_ask(load.body(number), http, seen))


async def _ask(body: dict[str, Any], http: httpx.AsyncClient, seen: Seen, leave_after: int | None = None) -> bool:
    """Send one request and read its text, or a few pieces of it. Return False if there was none."""
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


async def _events(parts: AsyncIterator[bytes]) -> AsyncGenerator[dict[str, Any], None]:
    """Yield the JSON of a stream's events."""
    rest = b""
    async for part in parts:
        *events, rest = (rest + part).replace(b"\r\n", b"\n").split(b"\n\n")  # other servers end lines with both
        for event in events:
            if event.startswith(b"data: {"):
                yield json.loads(event[6:])


if __name__ == "__main__":
    print(json.dumps(vars(asyncio.run(send(Load(**json.load(sys.stdin)))))))
