"""The app: OpenAI's chat and text completions, models, health and metrics, over one engine."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager
from typing import Any

from fastapi import FastAPI, HTTPException, Request, Response
from fastapi.responses import StreamingResponse
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, generate_latest
from starlette.exceptions import HTTPException as StarletteHTTPException

from specdec.api import Engine
from specdec.errors import CapacityError
from specdec.serve.forms import STATUS, Form, as_json, event, problem
from specdec.serve.metrics import EngineCollector
from specdec.serve.schema import Body, ChatBody, TextBody
from specdec.serve.stepper import Job, Piece, Stepper
from specdec.text.inputs import prompts_to_ids

NUM_TEXT_TOKENS = 16  # of a text completion that gives no length, as OpenAI's
MOST_BYTES = 16 * 2**20  # of a body


class Gone(Exception):
    """The client has left."""


def build_app(engine: Engine, name: str, max_waiting: int = 256) -> FastAPI:
    """Return the app that serves `engine` as model `name`; `app.state.stepper` drains it. The caller detaches it.

    max_waiting: requests that may wait beside those that run; more are refused with 429.
    """
    stepper, registry = Stepper(engine, max_waiting), CollectorRegistry()
    samples = bool(engine.report().generation.get("do_sample"))
    answers = Counter("specdec_requests", "Answers by HTTP status; 499: the client left", ["status"], registry=registry)
    registry.register(EngineCollector(engine, stepper))

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        stepper.start(asyncio.get_running_loop())
        yield
        await asyncio.to_thread(stepper.close)

    app = FastAPI(lifespan=lifespan, openapi_url=None, max_body_size=MOST_BYTES)
    app.state.stepper = stepper
    model = {"id": name, "object": "model", "created": 0, "owned_by": "-"}

    @app.post("/v1/chat/completions")
    async def chat(body: ChatBody, request: Request) -> Response:
        if None not in (body.max_tokens, body.max_completion_tokens):
            raise ValueError("max_tokens and max_completion_tokens: give one of the two")
        jobs = await make_jobs(body, [m.plain() for m in body.messages], None)
        return await answer(body, request, jobs)

    @app.post("/v1/completions")
    async def text(body: TextBody, request: Request) -> Response:
        return await answer(body, request, await make_jobs(body, body.prompt, NUM_TEXT_TOKENS))

    @app.get("/v1/models")
    async def models() -> Response:
        return as_json({"object": "list", "data": [model]})

    @app.get("/v1/models/{wanted:path}")
    async def one_model(wanted: str) -> Response:
        check_name(wanted)
        return as_json(model)

    @app.get("/health")
    async def health() -> Response:
        return as_json({"status": "ok"}) if stepper.is_open else as_json({"status": "closing"}, 503)

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(await asyncio.to_thread(generate_latest, registry), media_type=CONTENT_TYPE_LATEST)

    def check_name(wanted: str | None) -> None:
        if wanted not in (None, name):
            raise HTTPException(404, f"model={wanted!r}: only {name!r} is served")

    async def make_jobs(body: Body, prompts: Any, length: int | None) -> list[Job]:
        """A job a choice; length: of texts if the body gives none; None: what fits."""
        check_name(body.model)
        options = body.options(samples)
        ids = await asyncio.to_thread(prompts_to_ids, prompts, engine.tokenizer)
        events: asyncio.Queue[Piece | Exception] = asyncio.Queue()
        jobs = []
        for index, prompt in enumerate(p for p in ids for _ in range(body.n or 1)):
            own = {**options, "max_new_tokens": new_tokens(body, len(prompt), engine.config.max_seq_len, length)}
            if body.seed is not None:
                own["seed"] = (body.seed + index) % 2**63  # as `Engine.generate` for a batch
            jobs.append(Job(index, prompt, own, events))
        return jobs

    async def answer(body: Body, request: Request, jobs: list[Job]) -> Response:
        """Generate, and answer with the whole text or a stream of it."""
        stepper.submit(jobs)
        pieces, form = follow(jobs, request), Form(isinstance(body, ChatBody), name)
        for _ in jobs:  # what the engine refuses has no part in a stream
            await anext(pieces)
        if body.stream:
            return StreamingResponse(stream(body, form, jobs, pieces), media_type="text/event-stream")
        texts, reasons = [""] * len(jobs), [""] * len(jobs)
        async with aclosing(pieces):
            async for piece in pieces:
                texts[piece.choice] += piece.text
                reasons[piece.choice] = piece.finish_reason or ""
        answers.labels(200).inc()
        return as_json(form.whole(texts, reasons, usage(body, jobs)))

    async def stream(
        body: Body, form: Form, jobs: list[Job], pieces: AsyncGenerator[Piece, None]
    ) -> AsyncIterator[str]:
        status = 499  # unless it comes to an end
        try:
            async with aclosing(pieces):
                for chunk in form.begin(len(jobs)):
                    yield event(chunk)
                async for piece in pieces:
                    for chunk in form.chunks(piece):
                        yield event(chunk)
            if body.stream_options is not None and body.stream_options.include_usage:
                yield event(form.usage_chunk(usage(body, jobs)))
            yield "data: [DONE]\n\n"
            status = 200
        except Gone:
            pass
        except Exception as error:
            status, content = problem(error)
            yield event(content)
        finally:
            answers.labels(status).inc()

    async def fail(_: Request, error: Exception) -> Response:
        status, content = (499, {}) if isinstance(error, Gone) else problem(error)
        answers.labels(status).inc()
        return as_json(content, status)

    for kind in (StarletteHTTPException, Gone, Exception, *(kind for kind, _ in STATUS)):
        app.add_exception_handler(kind, fail)
    return app


def new_tokens(body: Body, prompt_len: int, max_seq_len: int, default: int | None) -> int:
    """Return the length of a text: what the body asks for, else what fits, up to `default`. CapacityError if none fits,
    or less than was asked for."""
    room = max_seq_len - prompt_len
    if room < 1:
        raise CapacityError(
            f"the prompt has {prompt_len} tokens: with one of text they exceed max_seq_len={max_seq_len}; shorten it"
        )
    lengths = {name: getattr(body, name, None) for name in ("max_tokens", "max_completion_tokens")}
    for name, asked in lengths.items():
        if asked is not None and asked > room:
            raise CapacityError(
                f"{name}={asked}: with the prompt's {prompt_len} tokens they exceed max_seq_len={max_seq_len}; give "
                f"{room} at most, or shorten the prompt"
            )
    given = next((asked for asked in lengths.values() if asked is not None), None)
    return given or min(default or room, room)


async def follow(jobs: Sequence[Job], request: Request) -> AsyncGenerator[Piece, None]:
    """Yield the events of `jobs` until all have ended; raises what ended one. Jobs that are not read on are dropped."""
    events, left = jobs[0].events, len(jobs)
    watch = asyncio.create_task(_say_when_gone(request, events))
    try:
        while left:
            piece = await events.get()
            if isinstance(piece, Exception):
                raise piece
            left -= piece.finish_reason is not None
            yield piece
    finally:
        watch.cancel()
        for job in jobs:
            job.is_dropped = True


async def _say_when_gone(request: Request, events: asyncio.Queue[Piece | Exception]) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
    events.put_nowait(Gone())


def usage(body: Body, jobs: Sequence[Job]) -> dict[str, Any]:
    """Tokens of the prompts, each counted once whatever `n` is, and of the texts."""
    firsts = jobs[:: body.n or 1]
    prompt = sum(len(job.prompt) for job in firsts)
    cached = sum(job.request.num_cached for job in firsts if job.request is not None)
    completion = sum(len(job.request.tokens) for job in jobs if job.request is not None)
    counts = {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}
    return {**counts, "prompt_tokens_details": {"cached_tokens": cached}}
