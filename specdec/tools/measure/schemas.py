"""JSON schemas to measure grammars with: different random ones, and prompts that ask for an example."""

import json
import random
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from specdec.core.grammar.grammar import Grammar
from specdec.core.text.prompts import chat_ids

KEYS = ("name", "title", "city", "color", "count", "price", "is_open", "tags", "author", "year", "items", "address")
QUESTION = "Make up one example of this JSON schema and reply with the JSON alone: {}"
ENDLESS = 200  # items: more than any measurement generates


def _record(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}


def _list_of(item: dict[str, Any]) -> dict[str, Any]:
    return _record(items={"type": "array", "items": item, "minItems": ENDLESS})


# The main content of a text: characters that the model chooses, tokens that the schema forces, or both.
SPANS: Mapping[str, dict[str, Any]] = MappingProxyType(
    {
        "free": _list_of({"type": "string"}),
        "both": _list_of(
            _record(
                id={"type": "integer", "minimum": 0, "maximum": 9999},
                name={"type": "string", "maxLength": 16},
                is_open={"type": "boolean"},
                color={"enum": ["red", "green", "blue"]},
                city={"type": "string", "maxLength": 16},
            )
        ),
        "forced": _list_of(_record(kind={"const": "temperature sensor"}, is_open={"type": "boolean"})),
    }
)


@dataclass(frozen=True)
class Case:
    """A schema, the prompt that asks for it, and its grammar."""

    schema: dict[str, Any]
    prompt: list[int]
    grammar: Grammar


def make_cases(num: int, tokenizer: Any, seed: int = 0) -> list[Case]:
    """Return `num` different random schemas with their prompts."""
    rng = random.Random(seed)
    found: dict[str, dict[str, Any]] = {}
    while len(found) < num:
        schema = _object(rng, 2)
        found[json.dumps(schema)] = schema
    prompts = chat_ids([QUESTION.format(text) for text in found], tokenizer)
    return [Case(s, p, Grammar(json=s)) for s, p in zip(found.values(), prompts, strict=True)]


def _object(rng: random.Random, depth: int) -> dict[str, Any]:
    keys = rng.sample(KEYS, rng.randint(1, 4))
    properties = {key: _value(rng, depth) for key in keys}
    required = [key for key in keys if rng.random() < 0.8]
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def _value(rng: random.Random, depth: int) -> dict[str, Any]:
    kind = rng.choice(("string", "string", "integer", "number", "boolean", "enum", "date", "array", "object"))
    if kind in ("array", "object") and depth == 0:
        kind = "string"
    if kind == "string":
        return {"type": "string", "maxLength": rng.choice((8, 16, 24))}
    if kind == "integer":
        low = rng.choice((0, 1, 1900))
        return {"type": "integer", "minimum": low, "maximum": low + rng.choice((9, 120, 5000))}
    if kind == "number":
        return {"type": "number", "minimum": 0, "maximum": 1000}
    if kind == "enum":
        return {"enum": rng.sample(("red", "green", "blue", "small", "large", 1, 2, None, True), rng.randint(2, 4))}
    if kind == "date":
        return {"type": "string", "pattern": "^[12][0-9]{3}-(0[1-9]|1[0-2])-[0-2][0-9]$"}
    if kind == "array":
        return {"type": "array", "items": _value(rng, depth - 1), "minItems": rng.randint(0, 1), "maxItems": 3}
    return _object(rng, depth - 1) if kind == "object" else {"type": kind}
