"""`specdec serve`: an OpenAI-compatible server with continuous batching."""

import re
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import typer

from specdec.reach.grammars.compiler import installed_library
from specdec.reach.targets.pretrained import read_processor
from specdec.tools.commands.choices import TARGET, WithDraft, engine_line, listed
from specdec.tools.options import argument, command_of, option

LOOPBACK = ("127.0.0.1", "localhost", "::1")


def chosen_library(given: str | None, tokenizer: Any, has_end: bool) -> str | None:
    """Map --grammar to `EngineConfig.grammar`. has_end: the model has EOS ids."""
    if given is None:
        return "auto" if tokenizer is not None and has_end and installed_library("auto") else None
    return None if given == "off" else given


def adapters_of(given: Sequence[str]) -> dict[str, str]:
    """Parse NAME=FOLDER options into the folder or Hub id of each adapter."""
    pairs = [value.partition("=") for value in given]
    wrong = [value for value, (name, _, folder) in zip(given, pairs, strict=True) if not name or not folder]
    names = [name for name, _, _ in pairs]
    if wrong or len(set(names)) < len(names):
        raise ValueError(f"--lora {wrong[0] if wrong else given[-1]}: expected NAME=FOLDER, each name once")
    return {name: folder for name, _, folder in pairs}


class Serve(WithDraft):
    """Serve a target over HTTP: /v1/chat/completions, /v1/completions, /v1/models, /health and /metrics.

    Fields of a request that are not honoured are refused by name. SIGTERM and Ctrl-C let running requests end.
    """

    target: str = argument(TARGET)
    max_batch: int | None = option("Requests decoded together; more wait. Default: 32, on a CPU 8.", min=1)
    max_seq_len: int | None = option("Longest prompt plus output, in tokens; default: up to 2048.")
    num_slots: int | None = option("Size of the KV pool in tokens; default: room for a full batch at maximum length.")
    max_waiting: int = option("Requests that may wait; further ones are answered with 429.", 256, min=0)
    host: str = option("Address to listen on; 0.0.0.0 for all.", "127.0.0.1")
    port: int = option("Port to listen on.", 8000)
    api_key: str | None = option("API key that requests to /v1 must send; default: none.", envvar="SPECDEC_API_KEY")
    allowed_origins: list[str] | None = option("Origin allowed by CORS, or '*'; may be repeated. Default: none.")
    allowed_hosts: list[str] | None = option(
        "Name allowed in the Host header; may be repeated. Default: any; on loopback its own names."
    )
    max_logprobs: int | None = option("Most log-probabilities per token that a request may ask for; default: none.")
    grammar: str | None = option(
        "Library for response_format, tool_choice and structured_outputs: auto, llguidance, xgrammar or off. Default: "
        "auto where one is installed."
    )
    lora: list[str] | None = option(
        "LoRA adapter, NAME=FOLDER or NAME=HUB_ID; requests select it as their model. May be repeated."
    )
    name: str | None = option("Name of the model in requests; default: the target's.")
    log: Path | None = option("File to log token ids of finished requests to, for `specdec train adapt --from-log`.")
    grace: float = option("Seconds that running requests may take after SIGTERM or Ctrl-C.", 10.0)
    compile: bool | None = option("Compile the target's layers; default: on CUDA.", None, "--compile/--no-compile")
    prefix_cache: bool = option("Reuse the K/V of shared prompt prefixes, where the model allows it.", True)

    def run(self) -> None:
        try:
            from specdec.tools.serve.api_server import SIGNALS, ApiServer
        except ImportError as error:
            raise ValueError(f"{error.name} is missing: pip install 'specdec-toolkit[serve]'") from error

        if self.api_key is not None and not re.fullmatch("[!-~]+", self.api_key):
            raise ValueError("--api-key: expected visible ASCII characters, which any client can send; choose another")
        if self.log is not None:
            self.log.open("a").close()  # an OSError before the target is loaded
        with ApiServer(self.host, self.port) as server:
            model, tokenizer = self.load()
            # on a CPU a larger batch slows each request, and its pool fills the memory
            max_batch = (8 if model.device.type == "cpu" else 32) if self.max_batch is None else self.max_batch
            drafting = self.drafting(model, max_batch)
            settings = self._settings(max_batch, tokenizer, model.generation_config.eos_token_id is not None)
            with drafting.attach(model, read_processor(self.target, model) or tokenizer, **settings) as engine:
                for number in SIGNALS:
                    signal.signal(number, lambda number, _: server.send_signal(number))
                server.start(
                    engine,
                    self.name or self.target,
                    max_waiting=self.max_waiting,
                    grace=self.grace,
                    log=self.log,
                    api_key=self.api_key,
                    allowed_origins=listed(self.allowed_origins) if self.allowed_origins else (),
                    allowed_hosts=self.allowed_hosts or (LOOPBACK if self.host in LOOPBACK else None),
                )
                for line in (f"{engine_line(engine)}; {server.url}/v1", drafting.note):
                    if line:
                        typer.echo(line, err=True)
                status = server.wait()
        if status:
            typer.echo(f"the API server ended with status {status}", err=True)
            raise typer.Exit(1)

    def _settings(self, max_batch: int, tokenizer: Any, has_end: bool) -> dict[str, Any]:
        given = {"compile": self.compile, "max_seq_len": self.max_seq_len}
        settings: dict[str, Any] = {"num_slots": self.num_slots, "logprobs": self.max_logprobs}
        settings |= {"max_batch": max_batch, "prefix_cache": "auto" if self.prefix_cache else False}
        settings |= {"grammar": chosen_library(self.grammar, tokenizer, has_end)}
        settings |= {"adapters": adapters_of(self.lora)} if self.lora else {}
        return settings | {name: value for name, value in given.items() if value is not None}


serve = command_of(Serve)
