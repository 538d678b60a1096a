"""Request bodies: a field is honoured, or refused by name, as an unknown one is. Knows neither HTTP nor the engine.

Checks end at the first error, and lengths are checked before anything is built of a list.
"""

import json
import math
from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

from specdec.core.functional.processors import MAX_ENTRIES
from specdec.core.ranges import shown, whole
from specdec.core.round.state import MAX_STOP_IDS
from specdec.core.sampling_params import SamplingParams
from specdec.core.text.inputs import check_text
from specdec.graphs.captures import collection_paused
from specdec.tools.serve import structure
from specdec.tools.serve.messages import check_count, check_object, messages, refuse_unless

Check = Callable[[str, Any], Any]  # of a field's name and value: returns the value; a ValueError begins with the name

MOST = 2**31  # of a count of tokens
MOST_VALUES = 2**17  # of a body, besides the token ids of one prompt
MOST_PROMPTS = 4096
MOST_STOPS, LONGEST_STOP = 64, 256

LAW = ("temperature", "top_p", "top_k", "min_p")
NEUTRAL = MappingProxyType({"top_p": (1,), "top_k": (0,), "min_p": (0,)})
PENALTIES = ("repetition_penalty", "frequency_penalty", "presence_penalty")
ALSO_CHECKED = (*PENALTIES, "seed", "logit_bias")
PASSED_ON = (*PENALTIES, "stop", "stop_token_ids", "ignore_eos", "logit_bias", "priority", "deadline")  # as they are
LEFT_TO_ENGINE = ("seed", "priority", "deadline")  # to check, as LAW and PENALTIES

# Fields of OpenAI's that change no text, whatever their value.
IGNORED = frozenset(
    ("user", "store", "metadata", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention")
)
# Fields that are not supported, with the values besides null that ask for nothing.
REFUSED: Mapping[str, tuple[Any, ...]] = MappingProxyType(
    {
        "tools": ([],),
        "tool_choice": ("none", "auto"),
        "parallel_tool_calls": (True, False),
        "functions": ([],),
        "function_call": ("none", "auto"),
        "response_format": ({"type": "text"},),
        "modalities": (["text"],),
        "echo": (False,),
        "best_of": (1,),
        "suffix": ("",),
    }
)


def parse(body: bytes, most_values: int) -> Any:
    """Return the JSON value of `body`, which may hold `most_values` values besides those that its text looks like."""
    if sum(map(body.count, b"[{,:")) > most_values:
        raise ValueError(f"the body holds more than {most_values} values: send fewer prompts at once")
    try:
        with collection_paused():  # many lists would start one
            return json.loads(body)
    except RecursionError:
        raise ValueError("the body is nested too deeply") from None
    except ValueError as error:
        raise ValueError(f"the body is not JSON: {error}") from None


class Body:
    """A checked body of a chat or a text completion. fields: what it sets, by name; a null is as if left out.

    reads_images: messages may hold some.
    """

    def __init__(self, raw: Any, is_chat: bool, reads_images: bool = False):
        if not isinstance(raw, dict):
            raise ValueError(f"the body is {type(raw).__name__}: expected a JSON object")
        self.is_chat = is_chat
        fields: Mapping[str, Check] = (
            {**CHAT, "messages": partial(messages, reads_images=reads_images)} if is_chat else TEXT
        )
        self.fields: dict[str, Any] = {}
        for name, value in raw.items():
            if value is None:
                continue
            if name in fields:
                self.fields[name] = fields[name](name, value)
            elif name in REFUSED:
                refuse_unless(name, value, REFUSED[name])
            elif name not in IGNORED:
                raise ValueError(f"{shown(name)[1:-1]}: unknown field: leave it out")
        self._check_together()

    def _check_together(self) -> None:
        required = "messages" if self.is_chat else "prompt"
        if required not in self.fields:
            raise ValueError(f"{required}: required, but missing")
        if {"max_tokens", "max_completion_tokens"} <= self.fields.keys():
            raise ValueError("max_tokens and max_completion_tokens: give one of the two")
        if "stream_options" in self.fields and not self.stream:
            raise ValueError("stream_options: only with stream")
        if self.get("response_format") and self.get("structured_outputs"):
            raise ValueError("structured_outputs: given with response_format: give one of the two")
        if self.get("tool_choice", "auto") not in ("none", "auto") and not self.get("tools"):
            raise ValueError("tool_choice: there are no tools: give some, or leave it out")
        if self.fields.get("top_logprobs") and not self.fields.get("logprobs"):
            raise ValueError("top_logprobs: only with logprobs")

    def get(self, name: str, default: Any = None) -> Any:
        """Return a field, or `default` if it is not set."""
        return self.fields.get(name, default)

    @property
    def wants_grammar(self) -> bool:
        """True if its text is of a grammar, which may take seconds to compile."""
        return any(self.get(name) for name in ("response_format", "structured_outputs", "tools"))

    @property
    def n(self) -> int:
        """Choices for each prompt."""
        return self.fields.get("n", 1)

    @property
    def stream(self) -> bool:
        """True if text is sent as it comes."""
        return self.fields.get("stream", False)

    @property
    def has_images(self) -> bool:
        return any(not isinstance(message["content"], str) for message in self.get("messages", ()))

    @property
    def num_choices(self) -> int:
        """Texts to be generated."""
        prompt = self.fields.get("prompt")
        is_batch = isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list)
        return self.n * (len(prompt) if is_batch else 1)  # type: ignore[arg-type]

    @property
    def num_top(self) -> int | None:
        """Best tokens whose log-probabilities are returned beside a token's own; None: no log-probabilities."""
        asked = self.fields.get("logprobs")
        if self.is_chat:
            return self.fields.get("top_logprobs", 0) if asked else None
        return asked

    def options(self, samples: bool) -> dict[str, Any]:
        """Return options of `Engine.submit`; samples: whether the model does, where the body gives no temperature.

        Raises ValueError for values out of range, and for those that would do nothing; at temperature 0 they are
        honoured: the best token passes.
        """
        law = {name: self.fields[name] for name in LAW if name in self.fields}
        SamplingParams(**law, **{name: self.fields[name] for name in ALSO_CHECKED if name in self.fields})
        if "temperature" in law:
            law = {"do_sample": True, **law} if law["temperature"] else {"do_sample": False}
        elif not samples:
            idle = next((name for name in law if law[name] not in NEUTRAL[name]), None)
            if idle is not None:
                raise ValueError(f"{idle}: this model is greedy by default; give a temperature, too")
            law = {}
        passed = {name: self.fields[name] for name in PASSED_ON if name in self.fields}
        return {**law, **passed, "min_new_tokens": self.fields.get("min_tokens")}


def _flag(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError(f"{name}={shown(value)}: expected true or false")
    return value


def _stop_ids(name: str, value: Any) -> Any:
    if isinstance(value, list):
        check_count(name, value, 0, MAX_STOP_IDS, "token ids")
    elif type(value) is not int:
        raise ValueError(f"{name}={shown(value)}: expected token ids")
    return value


def _prompt(name: str, value: Any) -> Any:
    if not isinstance(value, str | list):
        raise ValueError(f"{name}={shown(value)}: expected a string, token ids, or a list of them")
    if isinstance(value, list) and value and isinstance(value[0], str | list):
        check_count(name, value, 0, MOST_PROMPTS, "prompts")
        return [_one_prompt(f"{name}[{i}]", prompt) for i, prompt in enumerate(value)]
    return _one_prompt(name, value)


def _one_prompt(name: str, value: Any) -> Any:
    if isinstance(value, str):
        return check_text(name, value)
    if not isinstance(value, list) or set(map(type, value)) - {int}:
        raise ValueError(f"{name}={shown(value)}: expected a string, or a list of token ids")
    return value


def _stop(name: str, value: Any) -> Any:
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list):
        raise ValueError(f"{name}={shown(value)}: expected a string, or a list of them")
    check_count(name, stops, 0, MOST_STOPS, "strings")
    for i, text in enumerate(stops):
        check_count(f"{name}[{i}]", check_text(f"{name}[{i}]", text), 1, LONGEST_STOP, "characters")
    return stops


def _logit_bias(name: str, value: Any) -> dict[int, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"{name}={shown(value)}: expected an object from token ids to biases of their logits")
    check_count(name, value, 0, MAX_ENTRIES, "tokens")
    wrong = next((token for token in value if not (token.isascii() and token.isdigit() and len(token) < 19)), None)
    if wrong is not None:
        raise ValueError(f"{name}: key {shown(wrong)}: expected a token id")
    for token, bias in value.items():
        if isinstance(bias, float) and not math.isfinite(bias):
            raise ValueError(f"{name}.{token}={bias}: expected a finite number")
    return {int(token): bias for token, bias in value.items()}


def _stream_options(name: str, value: Any) -> bool:
    """Return whether a last chunk counts tokens."""
    for key, item in check_object(name, value).items():
        if key not in ("include_usage", "include_obfuscation"):
            raise ValueError(f"{name}.{shown(key)[1:-1]}: unknown field: leave it out")
        _flag(f"{name}.{key}", item)
    return value.get("include_usage", False)


_BOTH: Mapping[str, Check] = MappingProxyType(
    {
        "model": check_text,
        "n": whole(1, 128).check,
        "max_tokens": whole(1, MOST).check,
        "min_tokens": whole(0, MOST).check,
        **dict.fromkeys((*LAW, *PENALTIES, *LEFT_TO_ENGINE), lambda name, value: value),
        "top_k": lambda _, value: 0 if type(value) is int and value == -1 else value,  # vLLM says -1 for "off"
        "logit_bias": _logit_bias,
        "stop": _stop,
        "stop_token_ids": _stop_ids,
        "ignore_eos": _flag,
        "stream": _flag,
        "stream_options": _stream_options,
        "structured_outputs": structure.structured_outputs,
    }
)
CHAT: Mapping[str, Check] = MappingProxyType(
    {
        **_BOTH,
        "messages": messages,
        "response_format": structure.response_format,
        "tools": structure.tools,
        "tool_choice": structure.tool_choice,
        "parallel_tool_calls": _flag,
        "max_completion_tokens": whole(1, MOST).check,
        "logprobs": _flag,
        "top_logprobs": whole(0, MOST).check,
        "chat_template_kwargs": check_object,
    }
)
TEXT: Mapping[str, Check] = MappingProxyType({**_BOTH, "prompt": _prompt, "logprobs": whole(0, MOST).check})
NAMES = (CHAT.keys() | TEXT.keys() | REFUSED.keys()) - {"prompt"}  # "prompt 0" is of any body
