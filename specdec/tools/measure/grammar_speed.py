"""Tokens/s of texts under JSON schemas beside free text: what spans that the model writes cost, and forced ones gain.

Every text has the same number of tokens; lists of at least 200 items do not end before. The first token's time, prefill
and compiling included, is measured alone and taken off.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from statistics import median
from typing import Any

from specdec.api import Engine, attach
from specdec.core.text.prompts import chat_ids
from specdec.tools.measure.drafts import DraftShape
from specdec.tools.measure.grammar import Row, mask_costs
from specdec.tools.measure.schemas import QUESTION, SPANS

REPEATS = 3


def run(
    model: Any,
    tokenizer: Any,
    draft: tuple[Any, str | None],
    shapes: Sequence[DraftShape],
    batches: Sequence[int],
    new_tokens: int,
    **settings: Any,
) -> Iterator[Row]:
    """Yield a row of every shape, batch and kind of text; settings: of every engine."""
    prompts = dict(zip(SPANS, chat_ids([QUESTION.format(schema) for schema in SPANS.values()], tokenizer), strict=True))
    longest = max(map(len, prompts.values())) + new_tokens
    common: Row = {"max_seq_len": longest, "max_batch": max(batches), "tokenizer": tokenizer, "grammar": "auto"}
    common |= {"graph_batches": tuple(sorted({*batches})), "graph_sampling": ("greedy",)}
    common |= {"max_prefill_tokens": 2048, **settings}
    for shape in shapes:
        source, algo = draft if shape.steps else (None, None)
        with attach(model, source, algo, **common, **shape.settings()) as engine:
            for batch in batches:
                text = _timed(engine, [prompts["free"]] * batch, new_tokens, None)
                yield {"speed": "text", **shape.row, "batch": batch, **text}
                for spans, schema in SPANS.items():
                    row = _timed(engine, [prompts[spans]] * batch, new_tokens, schema)
                    for name in ("tokens_per_s", "round_ms"):
                        row[f"{name}_of_text"] = round(row[name] / text[name], 3)
                    yield {"speed": spans, **shape.row, "batch": batch, **row}


def _timed(engine: Engine, prompts: list[list[int]], new_tokens: int, schema: Mapping[str, Any] | None) -> Row:
    """Time calls of `new_tokens` a request. schema: of their texts, or None for free ones."""
    options: Row = {"ignore_eos": True} if schema is None else {"grammar": engine.compile_grammar({"json": schema})}

    def call(num: int) -> tuple[float, Any]:
        start = time.perf_counter()
        out = engine.generate(prompts, max_new_tokens=num, **options)
        assert all(len(tokens) == num for tokens in out.tokens), f"texts ended early: {out.finish_reasons}"
        return time.perf_counter() - start, out

    call(new_tokens)  # not counted: lexers grow with use
    first = median(call(1)[0] for _ in range(REPEATS))
    before = engine.report().grammar
    calls = [call(new_tokens) for _ in range(REPEATS)]
    seconds, out = median(s for s, _ in calls) - first, calls[0][1]
    row = {"tokens_per_s": len(prompts) * (new_tokens - 1) / seconds, "tau": out.stats.tau}
    row["round_ms"] = 1e3 * seconds * out.stats.tau / (new_tokens - 1)
    after = engine.report().grammar
    counts = {name: after.get(name, 0) - before.get(name, 0) for name in ("forced_tokens", "trusted_rounds", "undone")}
    row["forced_per_token"] = counts.pop("forced_tokens") / (REPEATS * len(prompts) * (new_tokens - 1))
    row |= {name: count / REPEATS for name, count in counts.items()}
    return {name: round(value, 4) for name, value in (row | mask_costs(before, after)).items()}
