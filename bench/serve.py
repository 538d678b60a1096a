"""Times the server: `PYTHONPATH=. python bench/serve.py --clients 1 8 32 64 --seconds 20`.

The server runs in this process, all clients in another one, each with one stream at a time. A row a number of clients:
time to the first text and time per token after it, of whole requests, and requests/s. Every text must have its length.
--soak SECONDS adds a run in which clients vanish and send bad requests; memory and free pages are compared.
--shape takes random weights, whose acceptance is imposed. The last line is one JSON object.
"""

import argparse
import json
import os
import random
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import uvicorn
from rich.console import Console
from rich.table import Table
from starlette.applications import Starlette

from specdec import Engine, attach, shipped
from specdec.core.text.prompts import chat_ids
from specdec.reach.targets.pretrained import BUNDLED
from specdec.tools.commands.doctor import PROMPTS
from specdec.tools.measure.results import write_results
from specdec.tools.measure.shapes import acceptance_rates, make_head, make_target
from specdec.tools.serve.server import build_app
from specdec.tools.train.target import device_of, load


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
    app = build_app(engine, "bench")
    with serving(app) as url:
        clients_do("measure", url, prompts, max(args.clients), 2.0, args.max_tokens)  # warm-up
        for clients in args.clients:
            rows.append(clients_do("measure", url, prompts, clients, args.seconds, args.max_tokens))
            print(json.dumps(rows[-1]), flush=True)
        if args.soak:
            before = memory()
            counts = clients_do("soak", url, prompts, max(args.clients), args.soak, args.max_tokens)
            rows.append({"what": "soak", "seconds": args.soak, **counts, **after_soak(engine, before)})
            print(json.dumps(rows[-1]), flush=True)
    table = Table(*(names := [k for k in rows[0] if k != "what"]))
    for row in rows:
        if row["what"] == "clients":
            table.add_row(*(str(row[name]) for name in names))
    Console(width=140).print(table)
    config = {**vars(args), "out": None, "tau": round(engine.report().acceptance.tau, 3)}
    if engine.config.synthetic_acceptance is not None:
        config["expected_tau"] = round(1 + sum(engine.config.synthetic_acceptance), 3)
    engine.detach()
    path = write_results(args.out, "serve", args.shape or ("135m" if args.target == BUNDLED else "model"), config, rows)
    print(json.dumps({"file": path.name, "rows": rows}))


def clients_do(what: str, *arguments: Any) -> dict[str, Any]:
    """Run a function of bench/serve_clients.py in a separate process and return its result."""
    command = [sys.executable, str(Path(__file__).with_name("serve_clients.py"))]
    done = subprocess.run(command, input=json.dumps([what, *arguments]), stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout)


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
def serving(app: Starlette) -> Iterator[str]:
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
