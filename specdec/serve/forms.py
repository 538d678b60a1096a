"""The JSON of answers: whole ones, chunks of a stream, errors."""

import json
import re
import time
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from fastapi import Response
from fastapi.exceptions import RequestValidationError
from jinja2 import TemplateError
from starlette.exceptions import HTTPException

from specdec.errors import CapacityError, DetachedError
from specdec.serve.schema import ChatBody, TextBody
from specdec.serve.stepper import Busy, Closing, Failed, Piece

REASONS = {"eos": "stop", "stop_id": "stop", "stop_string": "stop", "length": "length"}
STATUS = (
    *((Busy, 429), (Closing, 503), (DetachedError, 503), (Failed, 500)),
    *((RequestValidationError, 400), (ValueError, 400), (TemplateError, 400)),
)
FIELDS = (frozenset(ChatBody.model_fields) | frozenset(TextBody.model_fields)) - {"prompt"}  # "prompt 0": of any body

_TYPE = re.compile(r"^(str|int)$|\]$")  # list[Part], function-after[.., str], [key]


@dataclass(frozen=True)
class Form:
    """One answer of a chat, or of a text completion."""

    is_chat: bool
    model: str
    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    created: int = field(default_factory=lambda: int(time.time()))

    def whole(self, texts: list[str], reasons: list[str], usage: dict[str, Any]) -> dict[str, Any]:
        """The answer in one piece."""
        parts = [{"message": {"role": "assistant", "content": t}} if self.is_chat else {"text": t} for t in texts]
        choices = [self._choice(i, part, reason) for i, (part, reason) in enumerate(zip(parts, reasons, strict=True))]
        return {**self._head(""), "choices": choices, "usage": usage}

    def begin(self, num_choices: int) -> Iterator[dict[str, Any]]:
        """The first chunks of a stream: a chat says who speaks."""
        for index in range(num_choices if self.is_chat else 0):
            yield self._chunk(index, {"delta": {"role": "assistant", "content": ""}})

    def chunks(self, piece: Piece) -> Iterator[dict[str, Any]]:
        """The chunks for `piece`: its text, and why it ends."""
        if piece.text:
            part = {"delta": {"content": piece.text}} if self.is_chat else {"text": piece.text}
            yield self._chunk(piece.choice, part)
        if piece.finish_reason:
            yield self._chunk(piece.choice, {"delta": {}} if self.is_chat else {"text": ""}, piece.finish_reason)

    def usage_chunk(self, usage: dict[str, Any]) -> dict[str, Any]:
        """The last chunk, where usage was asked for."""
        return {**self._head(".chunk"), "choices": [], "usage": usage}

    def _chunk(self, index: int, part: dict[str, Any], reason: str | None = None) -> dict[str, Any]:
        return {**self._head(".chunk"), "choices": [self._choice(index, part, reason)]}

    def _head(self, suffix: str) -> dict[str, Any]:
        prefix, kind = ("chatcmpl", f"chat.completion{suffix}") if self.is_chat else ("cmpl", "text_completion")
        return {"id": f"{prefix}-{self.id}", "object": kind, "created": self.created, "model": self.model}

    @staticmethod
    def _choice(index: int, part: dict[str, Any], reason: str | None) -> dict[str, Any]:
        finish_reason = None if reason is None else REASONS[reason]
        return {"index": index, **part, "logprobs": None, "finish_reason": finish_reason}


def as_json(content: Any, status: int = 200) -> Response:
    """A response in ASCII: text of clients that is quoted may not be encodable."""
    return Response(json.dumps(content), status, media_type="application/json")


def event(content: Any) -> str:
    """A server-sent event."""
    return f"data: {json.dumps(content)}\n\n"


def problem(error: Exception) -> tuple[int, dict[str, Any]]:
    """Status and body for what went wrong; param: the field at fault, where a message begins with its name."""
    message, param, code = str(error), None, None
    status = next((number for kind, number in STATUS if isinstance(error, kind)), 500)
    if isinstance(error, HTTPException):
        status, message = error.status_code, str(error.detail)
    elif isinstance(error, RequestValidationError):
        param = _field(error.errors()[0]["loc"])
        message = "; ".join(_said(error))
    elif isinstance(error, CapacityError):
        code = "context_length_exceeded"
    if param is None and status < 500:
        word = re.match(r"\w*", message)[0]  # type: ignore[index]
        param = word if word in FIELDS else None
    kind = "invalid_request_error" if status < 500 else "server_error"
    return status, {"error": {"message": message, "type": kind, "param": param, "code": code}}


def _field(place: Sequence[str | int]) -> str | None:
    """The field of a body that `place` ("body", field, ...) is in; a place in text that is no JSON is a number."""
    return str(place[1]) if len(place) > 1 and isinstance(place[1], str) else None


def _said(error: RequestValidationError) -> list[str]:
    """What is wrong, each with its place as one would write it: messages[3].content[1].text. Of alternatives those are
    named that went on furthest: where parts of a message are bad, nobody meant its content to be a string."""
    said = [(_keys(e["loc"]), e["msg"].removeprefix("Value error, ")) for e in error.errors()]
    within = {keys[:i] for keys, _ in said for i in range(len(keys))}
    last = [(_written(keys), text) for keys, text in said if not keys or keys not in within]
    return list(dict.fromkeys(f"{place}: {text}" if place else text for place, text in last))


def _keys(place: Sequence[str | int]) -> tuple[str | int, ...]:
    """The keys and indices of `place`, without the names of types that pydantic puts between them."""
    if _field(place) is None:
        return ()
    return (place[1], *(k for k in place[2:] if isinstance(k, int) or not _TYPE.search(k)))


def _written(keys: Sequence[str | int]) -> str:
    return "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in keys).removeprefix(".")
