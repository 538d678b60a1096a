"""The app: OpenAI's chat and text completions, models, health and metrics, over one engine."""

import asyncio
import socket
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, aclosing, asynccontextmanager, contextmanager, nullcontext
from functools import partial
from typing import Any, TextIO

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Metric, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from specdec.api import Engine
from specdec.core.errors import CapacityError
from specdec.tools.serve.channel import COMPILING
from specdec.tools.serve.client import EngineClient, Facts, Text
from specdec.tools.serve.dialect import Dialect
from specdec.tools.serve.forms import STATUS, AnswerForm, as_json, event, problem
from specdec.tools.serve.guard import Guard, prompts_of, read_body
from specdec.tools.serve.host import hosted
from specdec.tools.serve.images import MOST_BYTES as MOST_IMAGE_BYTES
from specdec.tools.serve.intake import Gone, Intake, StreamPiece
from specdec.tools.serve.schema import MOST_VALUES, Body, parse
from specdec.tools.serve.tokens import Tokens

NUM_TEXT_TOKENS = 16  # of a text completion that gives no length, as OpenAI's
MOST_BYTES = 2 * 2**20  # of a body, besides 16 for every token of the longest request


def build_app(engine: Engine, name: str, max_waiting: int = 256, **options: Any) -> Starlette:
    """Return the app that serves `engine` as model `name` from this process; `specdec serve` runs it in another one.

    `app.state.intake` drains it; the caller detaches the engine. Each adapter is served as a model under its name.
    options: those of `app_of`. While it serves, the process has the settings of `shared_fairly`.
    """

    @contextmanager
    def connected() -> Iterator[socket.socket]:
        own, its = socket.socketpair()
        with hosted(engine, its):
            yield own

    return app_of(EngineClient(Facts.of(engine), rests=True), connected, name, max_waiting, **options)


def app_of(
    client: EngineClient,
    connected: Callable[[], AbstractContextManager[socket.socket]],
    name: str,
    max_waiting: int,
    *,
    api_key: str | None = None,
    allowed_origins: Sequence[str] = (),
    allowed_hosts: Collection[str] | None = None,
    log: TextIO | None = None,
    on_lost: Callable[[], None] = lambda: None,
) -> Starlette:
    """Return the app that serves the engine of `client`, at the other end of the socket of `connected`.

    max_waiting: requests that may wait beside those that run; more are refused with 429. api_key: required of requests
    to /v1. allowed_origins: sites whose pages may ask (CORS), "*" for all. allowed_hosts: names that the Host header
    may have; None: any. log: takes a line of JSON for every text that is complete, which `specdec train adapt` reads.
    on_lost: called when the engine is gone.
    """
    served = Endpoints(client, name, Intake(client, max_waiting, log))

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        served.intake.start(asyncio.get_running_loop())
        with connected() as sock:
            await client.connect(sock, on_lost)
            try:
                yield
            finally:
                served.intake.drain(0)
                await client.close()

    routes = [
        Route("/v1/chat/completions", partial(served.complete, is_chat=True), methods=["POST"]),
        Route("/v1/completions", partial(served.complete, is_chat=False), methods=["POST"]),
        Route("/v1/models", served.models),
        Route("/v1/models/{wanted:path}", served.one_model),
        Route("/health", served.health),
        Route("/metrics", served.metrics),
    ]
    middleware = [Middleware(Guard, hosts=allowed_hosts, api_key=api_key)]
    if allowed_origins:
        everything: dict[str, Any] = {"allow_methods": ("*",), "allow_headers": ("*",)}
        middleware.insert(0, Middleware(CORSMiddleware, allow_origins=allowed_origins, **everything))
    kinds = (HTTPException, Gone, Exception, *(kind for kind, _ in STATUS))
    handlers: dict[Any, Any] = dict.fromkeys(kinds, served.fail)
    app = Starlette(routes=routes, middleware=middleware, exception_handlers=handlers, lifespan=lifespan)
    app.state.intake = served.intake
    return app


class Endpoints:
    """The handler of each path, for one engine and the texts that `intake` admits."""

    def __init__(self, engine: EngineClient, name: str, intake: Intake):
        self.engine, self.name, self.intake = engine, name, intake
        self.registry = CollectorRegistry()
        what = "Answers by HTTP status; 499: the client left"
        self.answers = Counter("specdec_requests", what, ["status"], registry=self.registry)
        self.registry.register(EngineCollector(engine))
        adapters = engine.facts.adapters
        if name in adapters:
            raise ValueError(f"{name!r} is the name of the model and of an adapter: expected different ones")
        length = engine.config.max_seq_len
        own = {"object": "model", "created": int(time.time()), "owned_by": "specdec", "max_model_len": length}
        adapted = {adapter: {"id": adapter, **own, "parent": name} for adapter in adapters}
        self.served: dict[str, dict[str, Any]] = {name: {"id": name, **own}, **adapted}
        self.most_bytes, self.most_values = MOST_BYTES + 16 * length, MOST_VALUES + length
        self.most_bytes += MOST_IMAGE_BYTES * engine.facts.reads_images
        self.dialect = Dialect(engine)
        self._compiling = asyncio.Semaphore(COMPILING)
        self.tokens = Tokens(engine.tokenizer)

    async def models(self, _: Request) -> Response:
        return as_json({"object": "list", "data": [*self.served.values()]})

    async def one_model(self, request: Request) -> Response:
        return as_json(self.served[self._named(request.path_params["wanted"])])

    async def health(self, _: Request) -> Response:
        return as_json({"status": "ok"}) if self.intake.is_open else as_json({"status": "closing"}, 503)

    async def metrics(self, _: Request) -> Response:
        """GET /metrics, for Prometheus."""
        return Response(await asyncio.to_thread(generate_latest, self.registry), media_type=CONTENT_TYPE_LATEST)

    async def fail(self, _: Request, error: Exception) -> Response:
        status, content = (499, {}) if isinstance(error, Gone) else problem(error)
        self.answers.labels(status).inc()
        return as_json(content, status, getattr(error, "headers", None))  # a 405 says what is allowed

    async def complete(self, request: Request, is_chat: bool) -> "Response | EventStream":
        """POST /v1/chat/completions and /v1/completions: answer with the whole text or a stream of it."""
        raw = parse(await read_body(request, self.most_bytes), self.most_values)
        body = Body(raw, is_chat, self.engine.facts.reads_images)
        name = self._named(body.get("model"))
        self._check_logprobs(body)
        with self.intake.room_for(body.num_choices):
            async with self._compiling if body.wants_grammar else nullcontext():
                asked = await asyncio.to_thread(self._asked, body, name)
            call = await self.engine.start(*asked, body.stream, goes_on=not is_chat)
            pieces = self.intake.follow(call, partial(_until_gone, request))
            await anext(pieces)  # raises for a refused request, before a stream begins
        texts = call.texts
        form = AnswerForm(is_chat, name, body.num_top, self.tokens.spell, self.dialect.splitters(body, texts))
        if body.stream:
            return EventStream(self._stream(body, form, texts, pieces))
        choices: list[list[StreamPiece]] = [[] for _ in texts]
        async with aclosing(pieces):
            async for piece in pieces:
                choices[piece.choice].append(piece)
        self.answers.labels(200).inc()
        return as_json(form.whole(choices, usage(body, texts)))

    def _named(self, wanted: str | None) -> str:
        """Resolve the model or adapter that a request names; 404 for one that is not served."""
        if wanted is not None and wanted not in self.served:
            names = ", ".join(map(repr, self.served))
            are = "are" if len(self.served) > 1 else "is"
            raise HTTPException(404, f"model={wanted[:200]!r}: only {names} {are} served")
        return self.name if wanted is None else wanted

    def _check_logprobs(self, body: Body) -> None:
        most = self.engine.config.logprobs
        if body.num_top is None:
            return
        if most is None:
            raise ValueError("logprobs: not enabled: start the server with --max-logprobs N, or leave it out")
        if body.num_top > most:
            name = "top_logprobs" if body.is_chat else "logprobs"
            raise ValueError(f"{name}={body.num_top}: at most {most}, which --max-logprobs sets")

    def _asked(self, body: Body, name: str) -> tuple[list[Any], list[list[int]], dict[str, Any]]:
        """Tokenise the prompts and check the options, in a thread. Return a prompt for each choice, its ids, and
        options of `generate` for the model `name`."""
        engine, longest = self.engine, self.engine.config.max_seq_len
        once = prompts_of(body, engine.tokenizer, engine.processor, longest)
        prompts = [prompt for prompt in once for _ in range(body.n)]
        ids = [p["input_ids"][0].tolist() if isinstance(p, Mapping) else p for p in prompts]
        lengths = [new_tokens(body, len(own), longest) for own in ids]
        options = {**body.options(engine.facts.samples), "seed": body.get("seed"), "max_new_tokens": lengths}
        options["adapter"] = None if name == self.name else name
        return prompts, ids, {**options, **self.dialect.options(body, ids)}

    async def _stream(
        self, body: Body, form: AnswerForm, texts: Sequence[Text], pieces: AsyncGenerator[StreamPiece, None]
    ) -> AsyncGenerator[str, None]:
        status = 499  # unless it comes to an end
        try:
            async with aclosing(pieces):
                if begin := "".join(map(event, form.begin(len(texts)))):
                    yield begin
                async for piece in pieces:
                    if events := form.events(piece):
                        yield events
            end = event(form.usage_chunk(usage(body, texts))) if body.get("stream_options") else ""
            yield f"{end}data: [DONE]\n\n"
            status = 200
        except Gone:
            pass
        except Exception as error:
            status, content = problem(error)
            yield event(content)
        finally:
            self.answers.labels(status).inc()


class EventStream:
    """A response of server-sent events, one ASGI message for each text. It does not watch for disconnects: `texts` ends
    when the client leaves."""

    def __init__(self, texts: AsyncGenerator[str, None]):
        self.texts = texts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = [(b"content-type", b"text/event-stream; charset=utf-8")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        async with aclosing(self.texts):
            async for text in self.texts:
                await send({"type": "http.response.body", "body": text.encode(), "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def new_tokens(body: Body, prompt_len: int, max_seq_len: int) -> int:
    """Return max_new_tokens: what the body asks for, else what fits; for text completions up to a default.

    CapacityError if none fits, or less than was asked for; ValueError if it is less than `min_tokens`.
    """
    room = max_seq_len - prompt_len
    if room < 1:
        raise CapacityError(
            f"the prompt has {prompt_len} tokens: with one new token they exceed max_seq_len={max_seq_len}; shorten it"
        )
    name = "max_completion_tokens" if body.get("max_completion_tokens") else "max_tokens"
    asked, least = body.get(name), body.get("min_tokens", 0)
    if asked is not None and asked > room:
        raise CapacityError(
            f"{name}={asked}: with the prompt's {prompt_len} tokens they exceed max_seq_len={max_seq_len}; give "
            f"{room} at most, or shorten the prompt"
        )
    length = asked or (room if body.is_chat else min(max(NUM_TEXT_TOKENS, least), room))
    if least > length:
        raise ValueError(f"min_tokens={least}: the text has at most {length} tokens")
    return length


async def _until_gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def usage(body: Body, texts: Sequence[Text]) -> dict[str, Any]:
    """Count the tokens of prompts, once each whatever `n` is, and of texts."""
    firsts = texts[:: body.n]
    prompt = sum(len(text.prompt_ids) for text in firsts)
    cached = sum(text.num_cached for text in firsts)
    completion = sum(len(text.tokens) for text in texts)
    counts = {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}
    return {**counts, "prompt_tokens_details": {"cached_tokens": cached}}


class EngineCollector(Collector):
    """Reads the engine's metrics at each scrape; waits for the current step."""

    def __init__(self, engine: EngineClient):
        self.engine = engine

    def describe(self) -> list[Metric]:
        """Nothing, so that registering does not collect."""
        return []

    def collect(self) -> Iterator[Metric]:
        """Yield every metric; tokens are of requests that have ended."""
        report, running, waiting, tokens = self.engine.load()
        yield GaugeMetricFamily("specdec_requests_running", "Requests that hold KV slots", running)
        yield GaugeMetricFamily("specdec_requests_waiting", "Requests that wait for them", waiting)
        yield GaugeMetricFamily("specdec_kv_pages_free", "Free pages of the KV pool", report.num_free_pages)
        yield GaugeMetricFamily("specdec_kv_pages", "Pages of the KV pool", report.num_pages)
        yield GaugeMetricFamily("specdec_tau", "Tokens emitted over verify rounds", report.acceptance.tau)
        yield CounterMetricFamily("specdec_tokens", "Tokens emitted", tokens)
        for key, what in (("asked", "Prompt tokens"), ("found", "Prompt tokens that the prefix cache had")):
            if report.prefix_cache:
                yield CounterMetricFamily(f"specdec_prefix_tokens_{key}", what, report.prefix_cache[key])
        for path, what in (("replays", "Graph replays"), ("eager", "Runs without a graph")):
            family = CounterMetricFamily(f"specdec_{path}", f"{what}, by runner", labels=["runner"])
            for runner, counts in report.runners.items():
                family.add_metric([runner], counts[path])
            yield family
