"""The JSON of responses: complete ones, chunks of a stream, errors."""

import json
import re
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from starlette.exceptions import HTTPException
from starlette.responses import Response

from specdec.core.errors import CapacityError, DetachedError
from specdec.tools.serve.intake import Busy, Closing, Failed, StreamPiece
from specdec.tools.serve.schema import NAMES
from specdec.tools.serve.splitting import Part, Splitter

REASONS = {"eos": "stop", "stop_id": "stop", "stop_string": "stop"} | dict.fromkeys(
    ("length", "deadline", "dead_end"), "length"
)
STATUS = ((Busy, 429), (Closing, 503), (DetachedError, 503), (Failed, 500), (ValueError, 400))
LEAST_LOGPROB = -9999.0  # OpenAI's, for tokens that a grammar forbids: JSON has no infinity
LONGEST_MESSAGE = 1000  # characters of an error


@dataclass(frozen=True)
class AnswerForm:
    """One answer of a chat, or of a text completion.

    num_top: best tokens whose log-probabilities are sent beside each token's own; None: no log-probabilities are.
    spell: returns a token's text and bytes, see `tokens`. splitters: of a chat, one a choice, where answers have more
    than content.
    """

    is_chat: bool
    model: str
    num_top: int | None
    spell: Callable[[int], tuple[str, list[int] | None]]
    splitters: Sequence[Splitter] = ()
    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    created: int = field(default_factory=lambda: int(time.time()))
    _frames: dict[int, tuple[str, str]] = field(default_factory=dict, init=False)  # of each choice, see `events`
    _lengths: Counter[int] = field(default_factory=Counter, init=False)  # of each choice's text, see `_logprobs`

    def whole(self, choices: Sequence[Sequence[StreamPiece]], usage: dict[str, Any]) -> dict[str, Any]:
        """The answer in one piece, from all pieces of every choice."""
        made = []
        for index, pieces in enumerate(choices):
            text = "".join(piece.text for piece in pieces)
            part = {"message": {"role": "assistant", "content": text}} if self.is_chat else {"text": text}
            if self.splitters:
                part = {"message": message_of(self.splitters[index].feed(text, True))}
            made.append(self._choice(index, part, pieces[-1].finish_reason, self._logprobs(pieces)))
        return {**self._head(""), "choices": made, "usage": usage}

    def begin(self, num_choices: int) -> Iterator[dict[str, Any]]:
        """The first chunks of a stream: a chat says who speaks."""
        for index in range(num_choices if self.is_chat else 0):
            yield self._chunk(index, {"delta": {"role": "assistant", "content": ""}})

    def events(self, piece: StreamPiece) -> str:
        """The events for `piece`. Of most, only the text differs from others of its choice."""
        if self.splitters or self.num_top is not None or piece.finish_reason is not None or not piece.text:
            return "".join(map(event, self.chunks(piece)))
        if piece.choice not in self._frames:
            before, _, after = event(self._chunk(piece.choice, self._content(""))).rpartition('""')
            self._frames[piece.choice] = before, after
        before, after = self._frames[piece.choice]
        return f"{before}{json.dumps(piece.text)}{after}"

    def chunks(self, piece: StreamPiece) -> Iterator[dict[str, Any]]:
        """The chunks for `piece`: its text, and why it ends."""
        scores = self._logprobs([piece])
        if self.splitters:
            parts = self.splitters[piece.choice].feed(piece.text, piece.finish_reason is not None)
            for part in parts or ([Part("content", "")] if scores is not None and piece.tokens else []):
                yield self._chunk(piece.choice, {"delta": delta_of(part)}, logprobs=scores)
                scores = None
        elif piece.text or (scores is not None and piece.tokens):
            yield self._chunk(piece.choice, self._content(piece.text), logprobs=scores)
        if piece.finish_reason:
            yield self._chunk(piece.choice, {"delta": {}} if self.is_chat else {"text": ""}, piece.finish_reason)

    def usage_chunk(self, usage: dict[str, Any]) -> dict[str, Any]:
        """The last chunk, where usage was asked for."""
        return {**self._head(".chunk"), "choices": [], "usage": usage}

    def _chunk(
        self, index: int, part: dict[str, Any], reason: str | None = None, logprobs: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        return {**self._head(".chunk"), "choices": [self._choice(index, part, reason, logprobs)]}

    def _content(self, text: str) -> dict[str, Any]:
        return {"delta": {"content": text}} if self.is_chat else {"text": text}

    def _logprobs(self, pieces: Sequence[StreamPiece]) -> dict[str, Any] | None:
        """Return the log-probabilities of the tokens of `pieces`, in the form of chats or of text completions."""
        if self.num_top is None:
            return None
        scored = [pair for piece in pieces for pair in zip(piece.tokens, piece.logprobs, strict=True)]
        tops = [[(*self.spell(t), max(p, LEAST_LOGPROB)) for t, p in of.top[: self.num_top]] for _, of in scored]
        own = [(*self.spell(token), of.logprob) for token, of in scored]
        if self.is_chat:
            content = [
                {**_scored(*one), "top_logprobs": [_scored(*t) for t in top]}
                for one, top in zip(own, tops, strict=True)
            ]
            return {"content": content, "refusal": None}
        offsets = []
        for text, _, _ in own:
            offsets.append(self._lengths[pieces[0].choice])
            self._lengths[pieces[0].choice] += len(text)
        return {
            "tokens": [text for text, _, _ in own],
            "text_offset": offsets,
            "token_logprobs": [logprob for _, _, logprob in own],
            "top_logprobs": [_best(top) for top in tops],
        }

    def _head(self, suffix: str) -> dict[str, Any]:
        prefix, kind = ("chatcmpl", f"chat.completion{suffix}") if self.is_chat else ("cmpl", "text_completion")
        return {"id": f"{prefix}-{self.id}", "object": kind, "created": self.created, "model": self.model}

    def _choice(
        self, index: int, part: dict[str, Any], reason: str | None, logprobs: dict[str, Any] | None
    ) -> dict[str, Any]:
        finish_reason = None if reason is None else REASONS[reason]
        if finish_reason == "stop" and self.splitters and self.splitters[index].has_calls:
            finish_reason = "tool_calls"
        return {"index": index, **part, "logprobs": logprobs, "finish_reason": finish_reason}


def call_id() -> str:
    """Return a new id of a tool call: Mistral's templates take exactly nine letters and digits."""
    return uuid.uuid4().hex[:9]


def delta_of(part: Part) -> dict[str, Any]:
    """Return the delta of a stream for `part`."""
    if part.call < 0:
        return {part.kind: part.text}
    if part.kind == "arguments":
        return {"tool_calls": [{"index": part.call, "function": {"arguments": part.text}}]}
    call = {"index": part.call, "id": call_id(), "type": "function"}
    return {"tool_calls": [{**call, "function": {"name": part.text, "arguments": ""}}]}


def message_of(parts: Sequence[Part]) -> dict[str, Any]:
    """Assemble the message of a complete answer from its `parts`."""
    texts = {"content": "", "reasoning_content": ""}
    calls: dict[int, dict[str, Any]] = {}
    for part in parts:
        if part.call < 0:
            texts[part.kind] += part.text
        elif part.kind == "call":
            calls[part.call] = {"id": call_id(), "type": "function"}
            calls[part.call]["function"] = {"name": part.text, "arguments": ""}
        else:
            calls[part.call]["function"]["arguments"] += part.text
    message: dict[str, Any] = {"role": "assistant", "content": texts["content"] or (None if calls else "")}
    if texts["reasoning_content"]:
        message["reasoning_content"] = texts["reasoning_content"]
    return message | ({"tool_calls": list(calls.values())} if calls else {})


def _best(top: Sequence[tuple[str, list[int] | None, float]]) -> dict[str, float]:
    """Return `top`, best first, as an object: of tokens with the same text, parts of characters mostly, the best."""
    found: dict[str, float] = {}
    for text, _, logprob in top:
        found.setdefault(text, logprob)
    return found


def _scored(text: str, data: list[int] | None, logprob: float) -> dict[str, Any]:
    """Return a token of a chat's log-probabilities."""
    return {"token": text, "logprob": logprob, "bytes": data}


def as_json(content: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """Make a JSON response in ASCII: quoted client text may not be encodable."""
    return Response(json.dumps(content), status, headers, media_type="application/json")


def event(content: Any) -> str:
    """Format a server-sent event."""
    return f"data: {json.dumps(content)}\n\n"


def problem(error: Exception) -> tuple[int, dict[str, Any]]:
    """Return status and body for `error`; param: the field whose name begins the message."""
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
