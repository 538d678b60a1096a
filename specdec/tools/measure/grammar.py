"""`specdec bench grammar`: checks that answers to random JSON schemas parse, validate, and equal plain decoding's.

Plain rounds of the engine first decode each greedy text. The live model then reads it in one forward, and every token
must be the best of its logits that a fresh matcher allows. Rounds that draft must give the same text, chosen from
logits with the same bits.
"""

import json
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

import numpy as np
import torch

from specdec.api import Engine, attach
from specdec.core.functional.sampling import SamplingParams, constrain
from specdec.core.grammar.matcher import CompiledGrammar
from specdec.core.outputs import RequestOutput
from specdec.tools.measure.drafts import DraftShape
from specdec.tools.measure.schemas import Case

Row = dict[str, Any]
COMPILING_THREADS = 4


@dataclass(frozen=True)
class Plan:
    """Settings of a check: every shape, batch and temperature; plain rounds first, in the largest batch.

    seconds: limit of each cell; the rest is left out. library: of `EngineConfig.grammar`. has_bits: also compare
    logits' bits, for which all rounds have masks.
    """

    shapes: Sequence[DraftShape]
    batches: Sequence[int]
    temperatures: Sequence[float]
    max_new_tokens: int
    seconds: float = float("inf")
    library: str = "auto"
    has_bits: bool = True


def run(
    model: Any, tokenizer: Any, draft: tuple[Any, str | None], cases: Sequence[Case], plan: Plan, **settings: Any
) -> Iterator[Row]:
    """Yield the rows of every shape, batch and temperature of `plan`. settings: of every engine."""
    longest, most = max(len(case.prompt) for case in cases) + plan.max_new_tokens, max(plan.batches)
    common: Row = {"max_seq_len": longest, "max_batch": most, "tokenizer": tokenizer, "grammar": plan.library}
    common |= {"graph_batches": tuple(sorted({*plan.batches})), "digests": plan.has_bits}
    common |= {"max_prefill_tokens": 2048, **settings}
    plain: list[RequestOutput] = []
    grammars: list[CompiledGrammar] = []
    for shape in dict.fromkeys((DraftShape(), *plan.shapes)):
        source, algo = draft if shape.steps else (None, None)
        laws = plan.temperatures if shape.steps else (0.0,)
        kind = "sampled" if any(laws) else "greedy"
        with attach(model, source, algo, graph_sampling=(kind,), **common, **shape.settings()) as engine:
            if not grammars:  # engines of one tokenizer and library may share them
                with ThreadPoolExecutor(COMPILING_THREADS) as pool:
                    grammars += pool.map(engine.compile_grammar, [case.grammar for case in cases])
            for batch in plan.batches if shape.steps else (most,):
                for temperature in laws:
                    before, start = engine.report().grammar, time.perf_counter()
                    out = _answers(engine, cases, grammars, batch, temperature, plan)
                    seconds = time.perf_counter() - start
                    row: Row = {"check": "grammar", "batch": batch, **shape.row, "temperature": temperature}
                    row |= _verdict(out, cases) | _costs(out, before, engine.report().grammar, seconds)
                    if not shape.steps:
                        plain = out
                        are_equal = [_is_plain(model, g, o) for g, o in zip(grammars, out, strict=False)]
                        row |= {"compared": len(out), "equal": sum(are_equal)}
                    elif temperature == 0:
                        row |= _compared(out, plain, ("equal", "same_bits") if plan.has_bits else ("equal",))
                    yield row


def _answers(
    engine: Engine,
    cases: Sequence[Case],
    grammars: Sequence[CompiledGrammar],
    batch: int,
    temperature: float,
    plan: Plan,
) -> list[RequestOutput]:
    """Return the answers to the first cases, those that begin in time, `batch` at a time."""
    end = time.perf_counter() + plan.seconds

    def answer(i: int) -> RequestOutput | None:
        if time.perf_counter() > end:
            return None
        law = SamplingParams(temperature, seed=i)
        options: Row = {"sampling": law, "max_new_tokens": plan.max_new_tokens, "grammar": grammars[i]}
        return engine.generate([cases[i].prompt], **options).requests[0]

    with ThreadPoolExecutor(batch) as pool:
        found = takewhile(lambda out: out is not None, pool.map(answer, range(len(cases))))
        return [out for out in found if out is not None]


def _compared(out: Sequence[RequestOutput], plain: Sequence[RequestOutput], names: Sequence[str]) -> Row:
    """Return how many texts equal those of plain rounds, and how many were chosen from logits with the same bits."""
    pairs = list(zip(out, plain, strict=False))
    counts = (sum(getattr(a, n) == getattr(b, n) for a, b in pairs) for n in ("tokens", "digests"))
    return {"compared": len(pairs), **dict(zip(names, counts, strict=False))}


def _verdict(out: Sequence[RequestOutput], cases: Sequence[Case]) -> Row:
    """Return how answers ended, and how many of the finished ones validate."""
    finished = [(o.text, case.schema) for o, case in zip(out, cases, strict=False) if o.finish_reason == "eos"]
    reasons = [o.finish_reason for o in out]
    ended = {reason: reasons.count(reason) for reason in sorted({*reasons})}
    valid = sum(is_valid(*answer) for answer in finished)
    return {"schemas": len(out), "finished": len(finished), "valid": valid, "ended": ended}


def _costs(out: Sequence[RequestOutput], before: Row, after: Row, seconds: float) -> Row:
    """Return tau, tokens/s, and the cost of masks per round."""
    tokens = sum(len(o.tokens) for o in out)
    rounds = sum(len(o.round_lens) for o in out)
    costs = {"tau": (tokens - len(out)) / max(rounds, 1), "seconds": seconds, "tokens_per_s": tokens / seconds}
    costs |= {"forced_per_token": (after["forced_tokens"] - before.get("forced_tokens", 0)) / tokens}
    costs |= {name: after[name] - before.get(name, 0) for name in ("trusted_rounds", "undone")}
    return {name: round(value, 3) for name, value in (costs | mask_costs(before, after)).items()}


def mask_costs(before: Row, after: Row) -> dict[str, float]:
    """Return mean ms per round between two values of `Report.grammar`."""
    num = after.get("rounds", 0) - before.get("rounds", 0)
    if not num:
        return {}
    names = ("mask_ms", "wait_ms", "late_ms")
    spent = {name: after[name] * after["rounds"] - before.get(name, 0) * before.get("rounds", 0) for name in names}
    return {name: total / num for name, total in spent.items()}


@torch.inference_mode()
def _is_plain(model: Any, compiled: CompiledGrammar, out: RequestOutput) -> bool:
    """Return whether each token is the model's best that the grammar allows, as in plain constrained decoding."""
    ids = torch.tensor([out.prompt_ids + out.tokens[:-1]], device=model.device)
    logits = model(ids, logits_to_keep=len(out.tokens)).logits.float()
    matcher, masks = compiled.matcher(), np.zeros((len(out.tokens), -(-logits.shape[-1] // 32)), np.int32)
    for i, token in enumerate(out.tokens):
        if not matcher.fill(masks[i]) or (i + 1 < len(out.tokens) and not matcher.accept(token)):
            return False
    best = constrain(logits, torch.from_numpy(masks)[None].to(model.device)).argmax(-1)
    return best[0].tolist() == out.tokens


def is_valid(text: str, schema: Any) -> bool:
    """Return whether `text` is JSON that validates against `schema`."""
    from jsonschema.validators import validator_for

    try:
        return bool(validator_for(schema)(schema).is_valid(json.loads(text)))
    except ValueError:
        return False
