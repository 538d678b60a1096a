"""`specdec bench grammar`: whether answers to random JSON schemas parse and validate, and what the masks cost.

Greedy text is compared with plain constrained decoding: `model.generate` with a logits processor that masks by a fresh
matcher, a token at a time. Tokens/s of texts under schemas stand beside those of free text of the first prompts (two
batches), by the same engine, of the same length.
"""

import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from tqdm import tqdm
from transformers import LogitsProcessor

from specdec.api import Engine, attach
from specdec.core.functional.sampling import SamplingParams, constrain
from specdec.core.grammar.grammar import Grammar
from specdec.core.grammar.matcher import CompiledGrammar
from specdec.core.text.prompts import chat_ids
from specdec.tools.measure.drafts import DraftShape

Row = dict[str, Any]
KEYS = ("name", "title", "city", "color", "count", "price", "is_open", "tags", "author", "year", "items", "address")
QUESTION = "Make up one example of this JSON schema and reply with the JSON alone: {}"


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


class _Masked(LogitsProcessor):
    """Plain constrained decoding of one text."""

    def __init__(self, compiled: CompiledGrammar, prompt_len: int, vocab_size: int):
        self._matcher, self._seen = compiled.matcher(), prompt_len
        self._mask = np.zeros(-(-vocab_size // 32), np.int32)

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        for token in input_ids[0, self._seen :].tolist():
            self._matcher.accept(token)
        self._seen = input_ids.shape[1]
        self._matcher.fill(self._mask)
        mask = torch.from_numpy(self._mask).to(scores.device).view(1, 1, -1)
        return constrain(scores.clone().unsqueeze(1), mask).squeeze(1)


def references(engine: Engine, cases: Sequence[Case], max_new_tokens: int) -> list[list[int]]:
    """Return the greedy text of each case by plain constrained decoding."""
    model, found = engine.target_module, []
    for case in tqdm(cases, desc="plain constrained decoding"):
        ids = torch.tensor([case.prompt], device=model.device)
        vocab_size = model.get_output_embeddings().weight.shape[0]
        own = _Masked(engine.compile_grammar(case.grammar), ids.shape[1], vocab_size)
        options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": max_new_tokens, "do_sample": False}
        out = model.generate(ids, logits_processor=[own], **options)
        found.append(out[0, ids.shape[1] :].tolist())
    return found


@dataclass(frozen=True)
class Plan:
    """What is measured: every shape, batch and temperature. library: of `EngineConfig.grammar`."""

    shapes: Sequence[DraftShape]
    batches: Sequence[int]
    temperatures: Sequence[float]
    max_new_tokens: int
    library: str = "auto"


def run(
    model: Any, tokenizer: Any, draft: tuple[Any, str | None], cases: Sequence[Case], plan: Plan, **settings: Any
) -> Iterator[Row]:
    """Yield the rows of every shape, batch and temperature of `plan`. settings: of every engine."""
    longest = max(len(case.prompt) for case in cases) + plan.max_new_tokens
    common: Row = {"max_seq_len": longest, "tokenizer": tokenizer, "grammar": plan.library, **settings}
    source, algo = draft
    plain: list[list[int]] | None = None
    for shape in plan.shapes:
        for batch in plan.batches:
            with attach(model, source, algo, **common, **shape.settings(), max_batch=batch) as engine:
                if plain is None and 0 in plan.temperatures:
                    plain = references(engine, cases, plan.max_new_tokens)
                for temperature in plan.temperatures:
                    head: Row = {"batch": batch, **shape.row, "temperature": temperature}
                    yield {**head, **_measure(engine, cases, temperature, plan.max_new_tokens, plain)}


def _measure(
    engine: Engine, cases: Sequence[Case], temperature: float, most: int, plain: list[list[int]] | None
) -> Row:
    prompts, law = [case.prompt for case in cases], SamplingParams(temperature, seed=0)
    options = {"sampling": law, "max_new_tokens": most}
    before = engine.report().grammar
    out = engine.generate(prompts, grammar=[case.grammar for case in cases], **options)
    after = engine.report().grammar
    free = engine.generate(prompts[: 2 * engine.config.max_batch], **options)
    finished = [i for i, reason in enumerate(out.finish_reasons) if reason == "eos"]
    valid = sum(is_valid(out.texts[i], cases[i].schema) for i in finished)
    row: Row = {"check": "grammar", "schemas": len(cases), "finished": len(finished), "valid": valid}
    row["ended"] = {reason: out.finish_reasons.count(reason) for reason in sorted(set(out.finish_reasons))}
    if plain is not None and temperature == 0:
        row["equal"] = sum(own == other for own, other in zip(out.tokens, plain, strict=True))
    forced = after["forced_tokens"] - before.get("forced_tokens", 0)
    speeds = {"tokens_per_s": out.stats.tokens_per_s, "free_tokens_per_s": free.stats.tokens_per_s}
    costs = {"tau": out.stats.tau, "free_tau": free.stats.tau, "mask_ms": after["mask_ms"], "wait_ms": after["wait_ms"]}
    return {**row, "forced_per_token": round(forced / out.stats.num_tokens, 3)} | {
        name: round(value, 3) for name, value in {**speeds, **costs}.items()
    }


def is_valid(text: str, schema: Any) -> bool:
    """Return whether `text` is JSON of `schema`."""
    from jsonschema import ValidationError, validate

    try:
        validate(json.loads(text), schema)
        return True
    except (ValueError, ValidationError):
        return False
