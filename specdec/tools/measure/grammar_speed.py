"""Tokens/s of texts under JSON schemas beside free text: the cost of text that the model writes, the gain of forced
text.

Every text has the same number of tokens; lists of at least 200 items do not end earlier. The measured time is that of
each call's slowest text, from its first token to its last, without prefill and compiling.
"""

from collections.abc import Iterator, Mapping, Sequence
from statistics import median
from typing import Any

from specdec.api import Engine, attach
from specdec.core.text.prompts import chat_ids
from specdec.tools.measure.drafts import DraftShape
from specdec.tools.measure.grammar import Row, mask_costs
from specdec.tools.measure.schemas import QUESTION, SPANS

REPEATS = 5


def run(
    model: Any,
    tokenizer: Any,
    draft: tuple[Any, str | None],
    shapes: Sequence[DraftShape],
    batches: Sequence[int],
    new_tokens: int,
    **settings: Any,
) -> Iterator[Row]:
    """Yield a row per shape, batch and kind of text; settings: of every engine."""
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
    """Time calls of `new_tokens` per request; took: ms of each. schema: of their texts, or None for free ones."""
    options: Row = {"ignore_eos": True} if schema is None else {"grammar": engine.compile_grammar({"json": schema})}

    def call() -> Any:
        out = engine.generate(prompts, max_new_tokens=new_tokens, **options)
        assert all(len(tokens) == new_tokens for tokens in out.tokens), f"texts ended early: {out.finish_reasons}"
        return out

    call()  # not counted: lexers grow with use; cached prefixes let all requests start together
    before = engine.report().grammar
    calls = [call() for _ in range(REPEATS)]
    spans = sorted(max(r.time_s - r.first_token_s for r in out.requests) for out in calls)
    seconds, tau = median(spans), calls[0].stats.tau
    row = {"tokens_per_s": len(prompts) * (new_tokens - 1) / seconds, "tau": tau}
    row["round_ms"] = 1e3 * seconds * tau / (new_tokens - 1)
    after = engine.report().grammar
    counts = {name: after.get(name, 0) - before.get(name, 0) for name in ("forced_tokens", "trusted_rounds", "undone")}
    row["forced_per_token"] = counts.pop("forced_tokens") / (REPEATS * len(prompts) * (new_tokens - 1))
    row |= {name: count / REPEATS for name, count in counts.items()}
    row = {name: round(value, 4) for name, value in (row | mask_costs(before, after)).items()}
    return row | {"took": [round(1e3 * span, 2) for span in spans]}
