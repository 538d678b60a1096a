"""Times the server: `PYTHONPATH=. python bench/serve.py --clients 1 8 32 64 --seconds 20`.

The server runs in this process, all clients in another one, each with one stream at a time. A row a number of clients:
time to the first text and time per token after it, of whole requests, and requests/s. Every text must have its length.
--soak SECONDS adds a run in which clients vanish and send bad requests; memory and free pages are compared.
--shape takes random weights, whose acceptance is imposed. The last line is one JSON object.
"""

import argparse
import asyncio
import json
import multiprocessing
import os
import random
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import torch
import uvicorn
from fastapi import FastAPI
from rich.console import Console
from rich.table import Table

from specdec import Engine, attach, shipped
from specdec.commands.choices import device_of
from specdec.doctor.command import PROMPTS
from specdec.measure.results import write_results
from specdec.measure.shapes import acceptance_rates, make_head, make_target
from specdec.serve.server import build_app
from specdec.targets.pretrained import BUNDLED
from specdec.text.prompts import chat_ids
from specdec.train.target import load

PATH = "/v1/completions"
BAD = (b"{", b'{"prompt": "x", "logprobs": 3}', b'{"prompt": [999999999]}', b'{"prompt": [5], "max_tokens": 99999999}')


class Letters:
    """A tokenizer for models without one: a letter a token."""

    def decode(self, tokens: Sequence[int], **_: Any) -> str:
        """The text of `tokens`."""
        return "".join(chr(97 + token % 26) for token in tokens)


def main() -> None:
    """Every number of clients in turn, then the soak."""
    args = arguments()
    engine, prompts = make_engine(args)
    rows: list[dict[str, Any]] = []
    spawn = multiprocessing.get_context("spawn")
    app = build_app(engine, "bench")
    with serving(app) as url, ProcessPoolExecutor(1, mp_context=spawn) as pool:
        pool.submit(measure, url, prompts, max(args.clients), 2.0, args.max_tokens).result()  # warm-up
        for clients in args.clients:
            rows.append(pool.submit(measure, url, prompts, clients, args.seconds, args.max_tokens).result())
            print(json.dumps(rows[-1]), flush=True)
        if args.soak:
            before = memory()
            counts = pool.submit(soak, url, prompts, max(args.clients), args.soak, args.max_tokens).result()
            rows.append({"what": "soak", "seconds": args.soak, **counts, **after_soak(engine, before)})
            print(json.dumps(rows[-1]), flush=True)
    table = Table(*(names := [k for k in rows[0] if k != "what"]))
    for row in rows:
        if row["what"] == "clients":
            table.add_row(*(str(row[name]) for name in names))
    Console(width=140).print(table)
    config = {**vars(args), "out": None, "tau": round(engine.report().acceptance.tau, 3)}
    engine.detach()
    path = write_results(args.out, "serve", args.shape or ("135m" if args.target == BUNDLED else "model"), config, rows)
    print(json.dumps({"file": path.name, "rows": rows}))


def make_engine(args: argparse.Namespace) -> tuple[Engine, list[list[int]]]:
    """The engine, and prompts as token ids."""
    settings: dict[str, Any] = {"max_batch": args.max_batch, "max_seq_len": args.max_seq_len}
    if args.draft != "none":
        settings |= {"num_steps": args.steps}
    if args.shape is None:
        model, tokenizer = load(args.target, args.dtype, args.device)
        draft = None if args.draft == "none" else shipped.find(args.draft)
        return attach(model, draft, tokenizer=tokenizer, **settings), chat_ids(list(PROMPTS), tokenizer)
    model = make_target(args.shape, device_of(args.device))
    draft = None if args.draft == "none" else make_head(args.shape, model)
    if draft is not None:
        settings["synthetic_acceptance"] = acceptance_rates(args.steps)
    rng = random.Random(0)
    prompts = [[rng.randrange(5, model.config.vocab_size) for _ in range(args.prompt_tokens)] for _ in range(16)]
    return attach(model, draft, tokenizer=Letters(), **settings), prompts


@contextmanager
def serving(app: FastAPI) -> Iterator[str]:
    """A server of `app` in a thread; yields its address."""
    sock = socket.socket()
    sock.bind(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=9))
    thread = threading.Thread(target=server.run, args=([sock],))
    thread.start()
    try:
        yield f"http://127.0.0.1:{sock.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()


def measure(url: str, prompts: list[list[int]], clients: int, seconds: float, max_tokens: int) -> dict[str, Any]:
    """The row of `clients` clients, each with one stream after the other; for a process of its own."""
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
    """Requests of all kinds until `seconds` are over, and how many of each; for a process of its own."""
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
    """When text came, and the number of tokens; leave_after: chunks after which the client vanishes."""
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


def memory() -> dict[str, float]:
    """MiB that the process and, if there is one, the device hold."""
    pages = int(Path("/proc/self/statm").read_text("ascii").split()[1])
    held = {"rss_mib": round(pages * os.sysconf("SC_PAGE_SIZE") / 2**20, 1)}
    if torch.cuda.is_available():
        held["device_mib"] = round(torch.cuda.memory_allocated() / 2**20, 1)
    return held


def after_soak(engine: Engine, before: dict[str, float]) -> dict[str, Any]:
    """Memory before and after, and pages, once the engine has nothing to do."""
    while (report := engine.report()).num_free_pages < report.num_pages:
        time.sleep(0.1)
    engine.check_integrity()
    memories = {f"{name}_{when}": v for when, m in (("start", before), ("end", memory())) for name, v in m.items()}
    return {**memories, "free_pages": report.num_free_pages, "pages": report.num_pages}


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 8, 32, 64])
    parser.add_argument("--seconds", type=float, default=20.0, help="of each row")
    parser.add_argument("--soak", type=float, default=0.0, help="seconds")
    parser.add_argument("--target", default=BUNDLED)
    parser.add_argument(
        "--draft", default="shipped", help="as for specdec serve; with --shape, anything but none: random"
    )
    parser.add_argument("--shape", choices=("135m", "8b", "tiny"), help="random weights, in place of --target")
    parser.add_argument("--prompt-tokens", type=int, default=128, help="with --shape")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--max-batch", type=int, default=64)
    parser.add_argument("--max-seq-len", type=int, default=1024)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    return parser.parse_args()


if __name__ == "__main__":
    main()
