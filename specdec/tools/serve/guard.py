"""Checks requests before they reach the engine: host, API key, origin and size; and tokenizes their prompts."""

import inspect
import secrets
from collections.abc import Callable, Collection
from typing import Any
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.types import ASGIApp, Receive, Scope, Send

from specdec.core.engine.prompts import as_parts, inputs_of_chat
from specdec.core.errors import CapacityError
from specdec.core.text.inputs import prompts_to_ids, render_chat
from specdec.tools.serve.forms import as_json, problem
from specdec.tools.serve.images import decode_images
from specdec.tools.serve.intake import Gone
from specdec.tools.serve.schema import Body


class Guard:
    """Middleware that refuses requests with a foreign Host header, and those to /v1 without the API key.

    hosts: names that the Host header may have, None for any. Without that check, a page of a foreign site whose name
    resolves to this machine (DNS rebinding) could read what a server on a loopback address answers.
    """

    def __init__(self, app: ASGIApp, hosts: Collection[str] | None, api_key: str | None):
        self.app, self.hosts, self.api_key = app, hosts, api_key

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        error = self._refusal(Headers(scope=scope), scope["path"]) if scope["type"] == "http" else None
        if error is None:
            await self.app(scope, receive, send)
        else:
            status, content = problem(error)
            await as_json(content, status, error.headers)(scope, receive, send)

    def _refusal(self, headers: Headers, path: str) -> HTTPException | None:
        host = headers.get("host")
        if self.hosts is not None and host is not None and _name_of(host) not in self.hosts:
            return HTTPException(400, f"Host {host[:200]!r} is not allowed: add it with --allowed-hosts")
        if self.api_key is not None and path.startswith("/v1/"):
            scheme, _, key = headers.get("authorization", "").partition(" ")
            if scheme.lower() != "bearer" or not secrets.compare_digest(key.encode(), self.api_key.encode()):
                why = "the header 'Authorization: Bearer KEY' is missing, or its key is wrong"
                return HTTPException(401, why, {"WWW-Authenticate": "Bearer"})
        return None


def _name_of(host: str) -> str | None:
    """Return the name in a Host header, without the port."""
    try:
        return urlsplit(f"//{host}").hostname
    except ValueError:  # half a pair of brackets
        return None


async def read_body(request: Request, most_bytes: int) -> bytes:
    """Return the body of a request, whatever content type it names: plain `curl -d` names a form's.

    A browser sends such types from pages of any site without asking the server first, so a request that has an Origin
    must say that it is JSON.
    """
    if "origin" in request.headers and "json" not in request.headers.get("content-type", ""):
        raise HTTPException(415, "a request with an Origin header needs 'Content-Type: application/json'")
    declared, parts, size = request.headers.get("content-length", ""), [], 0
    if declared.isdecimal() and int(declared) > most_bytes:
        raise _too_large(most_bytes)
    try:
        async for part in request.stream():
            size += len(part)
            if size > most_bytes:
                raise _too_large(most_bytes)
            parts.append(part)
    except ClientDisconnect as error:
        raise Gone from error
    return b"".join(parts)


def _too_large(most_bytes: int) -> HTTPException:
    return HTTPException(413, f"the body has more than {most_bytes} bytes: send fewer prompts at once")


SPARE = 64  # extra tokens that cutting a text may cause at the cut


def prompts_of(body: Body, tokenizer: Any, processor: Any, max_seq_len: int) -> list[Any]:
    """Return token ids of every prompt of `body`, or the processor's output for a chat with images; CapacityError if a
    text is too long for `max_seq_len`."""
    if body.is_chat:
        options = _options(body, tokenizer)
        messages = body.get("messages")
        if processor is not None:
            messages = [as_parts(f"messages[{i}]", message) for i, message in enumerate(messages)]
        text = render_chat(messages, processor or tokenizer, **options)
        bos = tokenizer.bos_token  # which processors add where a template does not
        adds = processor is not None and not (bos and text.startswith(bos))
        check_length(text, lambda part: tokenizer(part, add_special_tokens=adds)["input_ids"], max_seq_len)
        if body.has_images:
            return [inputs_of_chat(decode_images(body.get("messages")), processor, **options)]
        return [list(tokenizer(text, add_special_tokens=adds)["input_ids"])]
    prompts = body.get("prompt")
    for text in [prompts] if isinstance(prompts, str) else prompts:
        if isinstance(text, str):
            check_length(text, lambda part: prompts_to_ids(part, tokenizer)[0], max_seq_len)
    return prompts_to_ids(prompts, tokenizer)


def check_length(text: str, encode: Callable[[str], list[int]], max_seq_len: int) -> None:
    """Raise CapacityError if `text` is much longer than `max_seq_len` tokens, without encoding all of it."""
    size = 4 * max_seq_len  # characters; a token of English has four or five
    while len(text) > size:
        if len(encode(text[:size])) > max_seq_len + SPARE:
            raise CapacityError(
                f"the prompt has {len(text)} characters, of which {size} are more than max_seq_len={max_seq_len} "
                "tokens; shorten it"
            )
        size *= 2


def _options(body: Body, tokenizer: Any) -> dict[str, Any]:
    """Return the options of the chat template; ValueError for those that are the server's."""
    if tokenizer is None:
        raise ValueError("messages: the engine has no tokenizer; send token ids to /v1/completions")
    options = body.get("chat_template_kwargs", {})
    parameters = inspect.signature(tokenizer.apply_chat_template).parameters
    reserved = sorted(options.keys() & {"messages", "tokenizer", "self", "conversations", *parameters})
    if reserved:
        raise ValueError(f"chat_template_kwargs: {reserved[0]} is the server's own: leave it out")
    if body.get("tools") and body.get("tool_choice") != "none":
        options = {**options, "tools": body.get("tools")}
    return options
