"""The JSON of answers: whole ones, chunks of a stream, errors."""

import json
import re
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from starlette.exceptions import HTTPException
from starlette.responses import Response

from specdec.core.errors import CapacityError, DetachedError
from specdec.tools.serve.intake import Busy, Closing, Failed, StreamPiece
from specdec.tools.serve.schema import NAMES

REASONS = {"eos": "stop", "stop_id": "stop", "stop_string": "stop", "length": "length", "deadline": "length"}
STATUS = ((Busy, 429), (Closing, 503), (DetachedError, 503), (Failed, 500), (ValueError, 400))
LONGEST_MESSAGE = 1000  # characters of an error


@dataclass(frozen=True)
class AnswerForm:
    """One answer of a chat, or of a text completion.

    num_top: best tokens whose log-probabilities are sent beside each token's own; None: no log-probabilities are.
    token_text: returns the text of one token.
    """

    is_chat: bool
    model: str
    num_top: int | None
    token_text: Callable[[int], str]
    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    created: int = field(default_factory=lambda: int(time.time()))

    def whole(self, choices: Sequence[Sequence[StreamPiece]], usage: dict[str, Any]) -> dict[str, Any]:
        """The answer in one piece, from all pieces of every choice."""
        made = []
        for index, pieces in enumerate(choices):
            text = "".join(piece.text for piece in pieces)
            part = {"message": {"role": "assistant", "content": text}} if self.is_chat else {"text": text}
            made.append(self._choice(index, part, pieces[-1].finish_reason, self._logprobs(pieces)))
        return {**self._head(""), "choices": made, "usage": usage}

    def begin(self, num_choices: int) -> Iterator[dict[str, Any]]:
        """The first chunks of a stream: a chat says who speaks."""
        for index in range(num_choices if self.is_chat else 0):
            yield self._chunk(index, {"delta": {"role": "assistant", "content": ""}})

    def chunks(self, piece: StreamPiece) -> Iterator[dict[str, Any]]:
        """The chunks for `piece`: its text, and why it ends."""
        scores = self._logprobs([piece])
        if piece.text or (scores is not None and piece.tokens):
            part = {"delta": {"content": piece.text}} if self.is_chat else {"text": piece.text}
            yield self._chunk(piece.choice, part, logprobs=scores)
        if piece.finish_reason:
            yield self._chunk(piece.choice, {"delta": {}} if self.is_chat else {"text": ""}, piece.finish_reason)

    def usage_chunk(self, usage: dict[str, Any]) -> dict[str, Any]:
        """The last chunk, where usage was asked for."""
        return {**self._head(".chunk"), "choices": [], "usage": usage}

    def _chunk(
        self, index: int, part: dict[str, Any], reason: str | None = None, logprobs: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        return {**self._head(".chunk"), "choices": [self._choice(index, part, reason, logprobs)]}

    def _logprobs(self, pieces: Sequence[StreamPiece]) -> dict[str, Any] | None:
        """Return the log-probabilities of the tokens of `pieces`, in the form of chats or of text completions."""
        if self.num_top is None:
            return None
        scored = [pair for piece in pieces for pair in zip(piece.tokens, piece.logprobs, strict=True)]
        tops = [[(self.token_text(t), p) for t, p in of.top[: self.num_top]] for _, of in scored]
        own = [(self.token_text(token), of.logprob) for token, of in scored]
        if self.is_chat:
            content = [
                {**_scored(*one), "top_logprobs": [_scored(*t) for t in top]}
                for one, top in zip(own, tops, strict=True)
            ]
            return {"content": content, "refusal": None}
        return {
            "tokens": [text for text, _ in own],
            "token_logprobs": [logprob for _, logprob in own],
            "top_logprobs": [dict(top) for top in tops],
        }

    def _head(self, suffix: str) -> dict[str, Any]:
        prefix, kind = ("chatcmpl", f"chat.completion{suffix}") if self.is_chat else ("cmpl", "text_completion")
        return {"id": f"{prefix}-{self.id}", "object": kind, "created": self.created, "model": self.model}

    @staticmethod
    def _choice(
        index: int, part: dict[str, Any], reason: str | None, logprobs: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        finish_reason = None if reason is None else REASONS[reason]
        return {"index": index, **part, "logprobs": logprobs, "finish_reason": finish_reason}


def _scored(text: str, logprob: float) -> dict[str, Any]:
    """Return a token of a chat's log-probabilities; it has no bytes where it is a part of a character."""
    return {"token": text, "logprob": logprob, "bytes": None if "\ufffd" in text else list(text.encode())}


def as_json(content: Any, status: int = 200) -> Response:
    """A response in ASCII: text of clients that is quoted may not be encodable."""
    return Response(json.dumps(content), status, media_type="application/json")


def event(content: Any) -> str:
    """A server-sent event."""
    return f"data: {json.dumps(content)}\n\n"


def problem(error: Exception) -> tuple[int, dict[str, Any]]:
    """Status and body for what went wrong; param: the field at fault, where a message begins with its name."""
    message, param, code = str(error)[:LONGEST_MESSAGE], None, None
    status = next((number for kind, number in STATUS if isinstance(error, kind)), 500)
    if isinstance(error, HTTPException):
        status, message = error.status_code, str(error.detail)
    elif isinstance(error, CapacityError):
        code = "context_length_exceeded"
    if status < 500:
        word = re.match(r"\w*", message)[0]  # type: ignore[index]
        param = word if word in NAMES else None
    kind = "invalid_request_error" if status < 500 else "server_error"
    return status, {"error": {"message": message, "type": kind, "param": param, "code": code}}
