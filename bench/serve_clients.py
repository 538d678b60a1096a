"""The clients of bench/serve.py, a process of their own that starts at once: without torch, without specdec.

Reads a JSON list, a function of this file and its arguments, and prints what it returns.
"""

import asyncio
import json
import random
import sys
import time
from typing import Any

import httpx
import numpy as np

PATH = "/v1/completions"
BAD = (b"{", b'{"prompt": "x", "logprobs": 3}', b'{"prompt": [999999999]}', b'{"prompt": [5], "max_tokens": 99999999}')


def measure(url: str, prompts: list[list[int]], clients: int, seconds: float, max_tokens: int) -> dict[str, Any]:
    """The row of `clients` clients, each with one stream after the other."""
    firsts: list[float] = []
    per_token: list[float] = []
    start = time.perf_counter()

    async def client(http: httpx.AsyncClient, number: int) -> None:
        turn = number
        while time.perf_counter() - start < seconds:
            began = time.perf_counter()
            times, tokens = await stream(http, prompts[turn % len(prompts)], max_tokens)
            assert tokens == max_tokens, f"{tokens} tokens came, not {max_tokens}"
            firsts.append(times[0] - began)
            per_token.append((times[-1] - times[0]) / max(tokens - 1, 1))
            turn += clients

    asyncio.run(together(url, client, clients))
    wall = time.perf_counter() - start
    row = {"what": "clients", "clients": clients, "requests_s": round(len(firsts) / wall, 3)}
    row["tok_s"] = round(len(firsts) * max_tokens / wall, 1)
    for name, values in (("ttft_ms", firsts), ("token_ms", per_token)):
        row |= {f"{name}_p{q}": round(1e3 * float(np.percentile(values, q)), 3) for q in (50, 99)}
    return row


def soak(url: str, prompts: list[list[int]], clients: int, seconds: float, max_tokens: int) -> dict[str, int]:
    """Requests of all kinds until `seconds` are over, and how many of each."""
    counts = {"finished": 0, "vanished": 0, "refused": 0}
    end = time.perf_counter() + seconds

    async def client(http: httpx.AsyncClient, number: int) -> None:
        rng = random.Random(number)
        while time.perf_counter() < end:
            kind = rng.choice(("finished", "finished", "vanished", "refused"))
            prompt = rng.choice(prompts)
            if kind == "finished":
                assert (await stream(http, prompt, max_tokens))[1] == max_tokens
            elif kind == "vanished":
                await stream(http, prompt, max_tokens, leave_after=rng.randrange(1, 4))
            else:
                answer = await http.post(PATH, content=rng.choice(BAD), headers={"content-type": "application/json"})
                assert answer.status_code == 400, answer.text
            counts[kind] += 1

    asyncio.run(together(url, client, clients))
    return counts


async def together(url: str, client: Any, clients: int) -> None:
    """Run `clients` of `client`."""
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=600, limits=limits) as http:
        await asyncio.gather(*(client(http, number) for number in range(clients)))


async def stream(
    http: httpx.AsyncClient, prompt: list[int], max_tokens: int, leave_after: int | None = None
) -> tuple[list[float], int]:
    """Return times of text chunks, and the number of tokens; leave_after: chunks after which the client vanishes."""
    body = {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
    body |= {"stream": True, "stream_options": {"include_usage": True}}
    times, tokens = [], 0
    async with http.stream("POST", PATH, json=body) as response:
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                chunk = json.loads(line[6:])
                assert "error" not in chunk, chunk
                times.append(time.perf_counter())
                tokens = (chunk.get("usage") or {}).get("completion_tokens", 0)
            if leave_after is not None and len(times) >= leave_after:
                break
    return times[:-2] or times, tokens  # the last two say why it ended, and the usage


if __name__ == "__main__":
    name, *arguments = json.load(sys.stdin)
    print(json.dumps({"measure": measure, "soak": soak}[name](*arguments)))
