"""`specdec bench serve`: load on a running server, or on a server in this process."""

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from specdec.api import Engine, attach
from specdec.tools.commands.choices import Recorded, Row, WithDraft, listed, name_of_target, numbers
from specdec.tools.measure.results import ResultFile
from specdec.tools.measure.shapes import IMPOSED, acceptance_rates, make_head, make_target
from specdec.tools.options import option
from specdec.tools.train.target import device_of, dtype_of

NAME = "model"
CLIENTS = (1, 8, 32, 64, 256)
DRAFTING = ("draft", "steps", "topk", "draft_tokens", "draft_weights")
STEPS = 3  # of a --shape's draft
MAX_WAITING = 256  # as in `specdec serve`


class BenchServe(WithDraft, Recorded):
    """Measure requests/s, tokens/s and time to first text of an OpenAI-compatible server through an HTTP client.

    --url names a running server; without it this process serves --target, or a --shape, as `specdec serve` does.
    Clients are separate processes. Each of --clients sends one request after the other; --rates are random arrivals
    (Poisson). Lengths of prompts and texts are lognormal; the default means are those of ShareGPT.
    """

    url: str | None = option("URL of a running server, such as http://127.0.0.1:8000.")
    clients: list[str] | None = option(
        f"Concurrent clients; default: {','.join(map(str, CLIENTS))}; with --rates none."
    )
    rates: list[str] | None = option("Request rates per second, such as 0.5,4.")
    seconds: float = option("Seconds to measure per row.", 20.0, min=0.1)
    warm_up: float = option("Seconds of warm-up per row, not measured.", 5.0, min=0)
    prompt_tokens: float = option("Mean prompt length in tokens.", 161.0, min=1)
    new_tokens: float = option("Mean output length in tokens.", 338.0, min=1)
    spread: float = option("Standard deviation of the logarithm of lengths; 0: equal lengths.", 1.0, min=0, max=5)
    soak: float = option("Seconds of a final soak test whose clients also leave early and send bad requests.", 0.0)
    api_key: str | None = option("API key of the server.", envvar="SPECDEC_API_KEY")
    shape: str | None = option("Serve random weights of a named shape such as 8b; acceptance is imposed.")
    max_batch: int = option("Requests decoded together.", 64)
    max_seq_len: int = option("Longest prompt plus output, in tokens.", 2048)

    def run(self) -> None:
        try:
            from specdec.tools.measure import load
            from specdec.tools.serve.api_server import ApiServer
        except ImportError as error:
            raise ValueError(f"{error.name} is missing: pip install 'specdec-toolkit[bench,serve]'") from error

        rates = _rates(self.rates)
        clients = numbers("clients", self.clients, 1) or (() if rates else CLIENTS)
        if self.url is not None and (self.soak or self.shape):
            raise ValueError(f"--url {self.url} with --soak or --shape: those need an engine in this process; drop one")
        self._check_unused()
        names = ("seconds", "warm_up", "prompt_tokens", "new_tokens", "spread")
        law: dict[str, Any] = {name: getattr(self, name) for name in names}
        with ExitStack() as until_the_end:
            engine, url, pid = None, self.url, 0
            if url is None:
                engine = until_the_end.enter_context(self._engine())
                server = until_the_end.enter_context(ApiServer("127.0.0.1", 0))
                how: dict[str, Any] = {"api_key": self.api_key, "grace": 0.0, "log_level": "warning"}
                server.start(engine, NAME, max_waiting=max(MAX_WAITING, *clients, 0), **how)
                url, pid = server.url, server.pid
            name, longest = load.served_model(url, self.api_key)
            vocab = engine.target_module.config.vocab_size if engine is not None and self.shape is not None else None
            longest = longest or self.max_seq_len
            one = load.Load(url, name, longest=longest, vocab=vocab, api_key=self.api_key, **law)
            loads = [replace(one, clients=n) for n in clients] + [replace(one, rate=rate) for rate in rates]

            def measured() -> Iterator[Row]:
                yield from map(load.measure, loads)
                if self.soak and engine is not None:
                    harm = replace(one, clients=max(clients, default=64), seconds=self.soak, does_harm=True)
                    yield {"seconds": self.soak, **soaked(engine, pid, lambda: load.measure(harm))}

            file = ResultFile(
                self.out,
                "serve",
                self.shape or name_of_target(self.target if engine else name),
                law | self._setup(engine),
            )
            self.finish({"rows": self.record(file, measured(), _line)}, file.name)

    def _check_unused(self) -> None:
        """Raise ValueError for an option of the draft that neither a running server nor a --shape supports."""
        if self.url is None and self.shape is None:
            return
        other = f"--url {self.url}" if self.shape is None else f"--shape {self.shape}"
        for name in DRAFTING:
            value = getattr(self, name)
            if value is not None and (name, value, self.url) != ("draft", "none", None):
                raise ValueError(
                    f"--{name.replace('_', '-')} {value} with {other}: it has a draft of its own; drop one"
                )

    def _engine(self) -> Engine:
        settings: dict[str, Any] = {"max_batch": self.max_batch, "max_seq_len": self.max_seq_len}
        if self.shape is None:
            model, tokenizer = self.load()
            return self.drafting(model, self.max_batch).attach(model, tokenizer, prefix_cache="auto", **settings)
        device = device_of(self.device)
        model = make_target(self.shape, device, dtype_of(self.dtype, device))
        if self.draft == "none":
            return attach(model, tokenizer=Letters(), **settings)
        settings |= {"num_steps": STEPS, "synthetic_acceptance": acceptance_rates(STEPS)}
        return attach(model, make_head(self.shape, model), tokenizer=Letters(), **settings)

    def _setup(self, engine: Engine | None) -> dict[str, Any]:
        """Return the description of the server for a result file."""
        if engine is None:
            return {"server": "given by --url"}
        config = engine.config
        sizes = {"max_batch": config.max_batch, "max_seq_len": config.max_seq_len, "steps": config.num_steps}
        acceptance = {"acceptance": IMPOSED} if config.synthetic_acceptance is not None else {}
        return {"target": self.shape or self.target, "dtype": str(engine.target_module.dtype), **sizes, **acceptance}


class Letters:
    """A tokenizer for models without one: one letter per token."""

    def decode(self, tokens: Sequence[int], **_: Any) -> str:
        return "".join(chr(97 + token % 26) for token in tokens)


def soaked(engine: Engine, pid: int, send: Callable[[], Row]) -> Row:
    """Return the row of a soak that `send` runs: memory before and after, and pages at the end. pid: the server's."""
    before = held_mib(pid)
    sent = send()
    row: Row = {
        name: sent[name] for name in ("clients", "finished", "vanished", "refused", "errors", "notes") if name in sent
    }
    while (report := engine.report()).num_free_pages < report.num_pages:
        time.sleep(0.1)
    engine.check_integrity()
    memory = {f"{name}_{when}": v for when, m in (("start", before), ("end", held_mib(pid))) for name, v in m.items()}
    return {"what": "soak", **row, **memory, "free_pages": report.num_free_pages, "pages": report.num_pages}


def held_mib(pid: int) -> dict[str, float]:
    """Return the MiB used by this process, the API server's and, if there is one, the device."""
    held = {"rss_mib": _rss_mib("self"), "api_server_rss_mib": _rss_mib(str(pid))}
    if torch.cuda.is_available():
        held["device_mib"] = round(torch.cuda.memory_allocated() / 2**20, 1)
    return held


def _rss_mib(process: str) -> float:
    pages = int(Path(f"/proc/{process}/statm").read_text("ascii").split()[1])
    return round(pages * os.sysconf("SC_PAGE_SIZE") / 2**20, 1)


def _rates(values: list[str] | None) -> list[float]:
    """Return the numbers of an option that may be repeated, or separated by commas."""
    try:
        found = [float(part) for part in listed(values)]
    except ValueError:
        found = [0.0]
    if not all(0 < rate < 1e6 for rate in found):
        raise ValueError(f"--rates {','.join(values or ())!r}: expected numbers of requests per second, such as 0.5,4")
    return found


def _line(row: Row) -> str:
    if row["what"] == "soak":
        return ", ".join(f"{name}: {value}" for name, value in row.items())
    load = f"{row['rate']:g} requests/s arrive" if "rate" in row else f"{row['clients']} clients"
    first = f"first text {row.get('ttft_ms_p50')} ms (p99 {row.get('ttft_ms_p99')})"
    return f"{load}: {row['requests_s']} requests/s, {row['tok_s']} tokens/s, {first}, {row['errors']} errors"
