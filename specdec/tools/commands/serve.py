"""`specdec serve`: an engine behind an HTTP server in the form of OpenAI's API."""

import signal
from types import FrameType
from typing import Annotated, Any

import typer

from specdec.tools.commands.choices import DraftTokens, Steps, TopK, drafting_of, engine_line, listed, named_draft
from specdec.tools.train.cli import Device, Dtype
from specdec.tools.train.target import load

LOOPBACK = ("127.0.0.1", "localhost", "::1")


def command(
    target: Annotated[str, typer.Argument(help="Hub id, folder, .gguf file or 'bundled' (SmolLM2-135M-Instruct).")],
    draft: Annotated[
        str | None,
        typer.Option(help="Folder, .gguf file, Hub id, 'lookup' or 'none'; default: none, but 'shipped' for bundled."),
    ] = None,
    steps: Steps = None,
    topk: TopK = None,
    draft_tokens: DraftTokens = None,
    max_batch: Annotated[
        int | None, typer.Option(help="Requests decoded together; more wait. Default: 32, on a CPU 8.")
    ] = None,
    max_seq_len: Annotated[int | None, typer.Option(help="Longest prompt plus text; default: up to 2048.")] = None,
    num_slots: Annotated[
        int | None, typer.Option(help="Tokens of the KV pool; default: all rows at their most.")
    ] = None,
    max_waiting: Annotated[int, typer.Option(help="Requests that may wait; more are answered with 429.")] = 256,
    host: Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0 for all.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on.")] = 8000,
    api_key: Annotated[
        str | None, typer.Option(envvar="SPECDEC_API_KEY", help="Key that requests to /v1 must have; default: none.")
    ] = None,
    allowed_origins: Annotated[
        list[str] | None, typer.Option(help="Site whose pages may ask (CORS), or '*'; may be repeated. Default: none.")
    ] = None,
    allowed_hosts: Annotated[
        list[str] | None,
        typer.Option(help="Name that the Host header may have; may be repeated. Default: any, of loopback its own."),
    ] = None,
    max_logprobs: Annotated[
        int | None, typer.Option(help="Log-probabilities of so many best tokens may be asked for; default: none.")
    ] = None,
    name: Annotated[str | None, typer.Option(help="Name of the model in requests; default: the target's.")] = None,
    grace: Annotated[float, typer.Option(help="Seconds that running requests have after SIGTERM or Ctrl-C.")] = 10.0,
    compile: Annotated[
        bool | None, typer.Option("--compile/--no-compile", help="Compile the target's layers; default: on CUDA.")
    ] = None,
    prefix_cache: Annotated[
        bool, typer.Option(help="Keep K/V of what was served for prompts that begin alike, where the model allows it.")
    ] = True,
    device: Device = "auto",
    dtype: Dtype = "auto",
) -> None:
    """Serve a target over HTTP: /v1/chat/completions, /v1/completions, /v1/models, /health and /metrics.

    Fields of a request that are not honoured are refused by name. SIGTERM and Ctrl-C let running requests end.
    """
    try:
        import uvicorn

        from specdec.tools.serve.server import build_app
    except ImportError as error:
        raise ValueError(f"{error.name} is missing: pip install 'specdec-toolkit[serve]'") from error

    model, tokenizer = load(target, dtype, device)
    if max_batch is None:  # on a CPU a larger batch is slower for each, and its pool fills the memory
        max_batch = 8 if model.device.type == "cpu" else 32
    settings: dict[str, Any] = {"max_batch": max_batch, "num_slots": num_slots, "logprobs": max_logprobs}
    settings["prefix_cache"] = "auto" if prefix_cache else False
    if compile is not None:
        settings["compile"] = compile
    if max_seq_len is not None:
        settings["max_seq_len"] = max_seq_len
    drafting = drafting_of(named_draft(draft, target), model, max_batch, steps, topk, draft_tokens)
    engine = drafting.attach(model, tokenizer, **settings)
    if allowed_hosts is None and host in LOOPBACK:
        allowed_hosts = list(LOOPBACK)
    app = build_app(
        engine,
        name or target,
        max_waiting,
        api_key=api_key,
        allowed_origins=listed(allowed_origins) if allowed_origins else (),
        allowed_hosts=allowed_hosts,
    )
    url = f"http://{f'[{host}]' if ':' in host else host}:{port}/v1"
    for line in (f"{engine_line(engine)}; {url}", drafting.note):
        if line:
            typer.echo(line, err=True)

    class Server(uvicorn.Server):
        def handle_exit(self, sig: int, frame: FrameType | None) -> None:
            app.state.stepper.drain(grace)
            super().handle_exit(sig, frame)

    # The server sends itself the signal again when it has ended; that must not keep us from detaching.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: None)
    try:
        # Requests that are ended after `grace` are told so; the server's own limit, which cuts connections, is later.
        Server(uvicorn.Config(app, host, port, timeout_graceful_shutdown=int(grace) + 3)).run()
    finally:
        app.state.stepper.close()
        engine.detach()
