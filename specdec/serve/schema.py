"""Request bodies: a field is honoured, or refused by name, as an unknown one is. Knows neither HTTP nor the engine."""

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, Field


def only(off: Any) -> AfterValidator:
    """Refuse all values but `off`, which asks for nothing."""

    def check(value: Any) -> Any:
        if value != off:
            raise ValueError("this server does not support it: leave it out")
        return value

    return AfterValidator(check)


def _encodable(text: str) -> str:
    text.encode()  # a ValueError for half a surrogate pair, which JSON may hold, and no tokenizer reads
    return text


Text = Annotated[str, AfterValidator(_encodable)]
Zero = Annotated[float, only(0)]
Off = Annotated[bool, only(False)]
Empty = Annotated[list[Any], only([])]
Share = Annotated[float, Field(ge=0, le=1)]
Length = Annotated[int, Field(ge=1)]
Seed = Annotated[int, Field(ge=0, lt=2**63)]
LAW = ("temperature", "top_p", "top_k", "min_p")
PASSED_ON = ("repetition_penalty", "stop", "stop_token_ids", "ignore_eos")  # as they are


class Strict(BaseModel, extra="forbid", strict=True):
    """No conversions, and no fields but these."""


class StreamOptions(Strict):
    """With include_usage, a last chunk counts tokens."""

    include_usage: bool = False


class Part(Strict):
    """A part of a message; images and audio are refused."""

    type: Literal["text"]
    text: Text


class Message(Strict):
    """One turn of a conversation. Empty fields that clients send back are let through."""

    role: Literal["system", "user", "assistant"]
    content: Text | list[Part]
    name: None = None
    refusal: None = None
    annotations: None = None
    audio: None = None
    function_call: None = None
    tool_calls: None = None

    def plain(self) -> dict[str, str]:
        """Return it as chat templates take it, its parts joined."""
        parts = self.content
        return {"role": self.role, "content": parts if isinstance(parts, str) else "".join(p.text for p in parts)}


class Body(Strict):
    """What both endpoints take. Below the line: what is not supported, with the values that ask for nothing."""

    model: str | None = None
    user: str | None = None
    n: Annotated[int, Field(ge=1, le=128)] | None = None
    max_tokens: Length | None = None
    temperature: Annotated[float, Field(ge=0)] | None = None
    top_p: Share | None = None
    top_k: Annotated[int, Field(ge=0, lt=2**63)] | None = None
    min_p: Share | None = None
    repetition_penalty: Annotated[float, Field(gt=0)] | None = None
    logit_bias: dict[Annotated[str, Field(pattern="^[0-9]{1,18}$")], float] | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    seed: Seed | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    # ---
    presence_penalty: Zero | None = None
    frequency_penalty: Zero | None = None

    def options(self, samples: bool) -> dict[str, Any]:
        """Return options of `Engine.submit`; samples: whether the model does, where the body gives no temperature.

        Raises ValueError for what would do nothing. At temperature 0 they are honoured: the best token passes.
        """
        given = {name: value for name in (*LAW, *PASSED_ON) if (value := getattr(self, name)) is not None}
        law = {name: given[name] for name in LAW if name in given}
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options: only with stream")
        if law and self.temperature is None and not samples:
            raise ValueError(f"{next(iter(law))}: this model is greedy by default; give a temperature, too")
        if self.temperature is not None:
            law = {"do_sample": True, **law} if self.temperature else {"do_sample": False}
        bias = {int(token): value for token, value in (self.logit_bias or {}).items()}
        passed = {name: given[name] for name in PASSED_ON if name in given}
        return {**law, **passed, "logit_bias": bias or None}


class ChatBody(Body):
    """POST /v1/chat/completions."""

    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: Length | None = None
    # ---
    logprobs: Off | None = None
    top_logprobs: Zero | None = None
    tools: Empty | None = None
    tool_choice: Annotated[Any, only("none")] | None = None
    response_format: Annotated[dict[str, Any], only({"type": "text"})] | None = None


class TextBody(Body):
    """POST /v1/completions."""

    prompt: Text | list[Text] | list[int] | list[list[int]]
    # ---
    logprobs: Annotated[int, only(None)] | None = None
    echo: Off | None = None
    best_of: Annotated[int, only(1)] | None = None
    suffix: Annotated[str, only("")] | None = None
