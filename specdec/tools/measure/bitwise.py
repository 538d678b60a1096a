"""Bits of `specdec bench lossless`: tokens and logits of speculation against plain decoding of the same engine.

Logits are compared by a checksum of the bits of each emitted token's row (`EngineConfig.digests`), computed inside the
round from the logits that verification used. Every draft and shape is compared at the first batch size; other batch
sizes and ways to serve take the first draft's first and last shape. Plain decoding of each is compared with that of the
first. A difference counts as unexplained where both engines' `report().bits` is "equal". Rows have `algo` and `check`.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from types import MappingProxyType
from typing import Any, NamedTuple

from specdec.api import Engine, attach
from specdec.tools.measure.drafts import DraftShape
from specdec.tools.measure.lossless import first_difference

# Ways to serve prompts; "prefixes": the prompts were served before; "mixed": they arrive one by one.
WAYS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "default": {},
        "chunks": {"max_prefill_tokens": 48},
        "prefixes": {"prefix_cache": True},
        "mixed": {"mixed_prefill_tokens": 32},
        **{mode: {"prefill_graph": mode} for mode in ("whole", "piecewise", "breakable", "off")},
    }
)
# Few graphs, since a run attaches dozens of engines; prefills of few enough requests for one whole graph.
FEW: Mapping[str, Any] = MappingProxyType(
    {"graph_batches": (1, 8, 32), "max_prefill_tokens": 512, "prefill_buckets": (32, 128, 512)}
)
ON_CPU = ("default", "chunks", "prefixes", "mixed")  # graphs of prefills take a CPU minutes to record
A_REQUEST = 8  # most prompts per request of a batch: small batches are slow


class Plan(NamedTuple):
    """Settings of a comparison: shapes at the first batch size; ways of WAYS; tokens of every text."""

    shapes: Sequence[DraftShape]
    batches: Sequence[int]
    ways: Sequence[str]
    max_new_tokens: int

    @property
    def cells(self) -> list[tuple[int, str]]:
        """Batch sizes and ways: all ways at the first size, the other sizes by the first way."""
        return [*product(self.batches[:1], self.ways), *product(self.batches[1:], self.ways[:1])]


class Texts(NamedTuple):
    """Tokens and digests of every prompt from one engine, its `Report.bits`, and its keys in rows."""

    tokens: list[list[int]]
    digests: list[list[int]]
    bits: str
    facts: dict[str, Any]


def run(
    model: Any, prompts: Sequence[list[int]], drafts: Mapping[str, tuple[Any, str | None]], plan: Plan, **settings: Any
) -> Iterator[dict[str, Any]]:
    """Yield a row per comparison. drafts: by name, draft and algo as `attach` takes them; settings: of every engine."""
    longest = max(map(len, prompts)) + plan.max_new_tokens
    settings |= {**FEW, "max_seq_len": longest, "graph_sampling": "greedy", "digests": True}
    chosen = list(product(drafts.items(), plan.shapes))
    ends = [chosen[i] for i in sorted({0, len(plan.shapes) - 1}) if i < len(chosen)]
    first: Texts | None = None
    for batch, way in plan.cells:
        own, given = prompts[: A_REQUEST * batch], {**settings, **WAYS[way], "max_batch": batch}
        about: dict[str, Any] = {"check": "bits", "way": way, "batch": batch}
        plain = serve(model, None, None, own, way, plan.max_new_tokens, **given)
        if first is not None:
            yield {"draft": "none", **about, "against": "plain, the first", **compare(plain, first)}
        for (name, (draft, algo)), shape in chosen if first is None else ends:
            if algo == "lookup" and shape.topk > 1:
                continue
            drafting = {key: value for key, value in shape.settings().items() if value is not None}
            found = serve(model, draft, algo, own, way, plan.max_new_tokens, **given, **drafting)
            yield {"draft": name, **drafting, **about, "against": "plain", **compare(found, plain)}
        first = first or plain


def serve(
    model: Any,
    draft: Any,
    algo: str | None,
    prompts: Sequence[list[int]],
    way: str,
    max_new_tokens: int,
    **settings: Any,
) -> Texts:
    """Decode `prompts` greedily, past EOS, on a new engine."""
    with attach(model, draft, algo, **settings) as engine:
        start = time.perf_counter()
        found = _requests(engine, prompts, way, max_new_tokens)
        seconds = time.perf_counter() - start
        engine.check_integrity()
        report = engine.report()
    facts = {"algo": report.draft["algo"], "tau": round(report.acceptance.tau, 3), "seconds": round(seconds, 1)}
    return Texts([r.tokens for r in found], [r.digests for r in found], report.bits, facts)


def _requests(engine: Engine, prompts: Sequence[list[int]], way: str, max_new_tokens: int) -> Sequence[Any]:
    options: dict[str, Any] = {"max_new_tokens": max_new_tokens, "do_sample": False, "ignore_eos": True}
    if way == "prefixes":
        engine.generate(list(prompts), **{**options, "max_new_tokens": 1})
    if way != "mixed":
        return engine.generate(list(prompts), **options).requests
    requests = []
    for prompt in prompts:
        requests += engine.submit([prompt], **options)
        engine.step()
        engine.step()
    while engine.step():
        pass
    return requests


def compare(ours: Texts, theirs: Texts) -> dict[str, Any]:
    """Return a row: the number of differing texts and where each first differs; how many logits up to that place
    differ."""
    where, num_logits, num_differ, num_texts, failed = [], 0, 0, 0, 0
    for a, b, bits, other in zip(ours.tokens, theirs.tokens, ours.digests, theirs.digests, strict=False):
        same = first_difference(a, b)
        differ = sum(x != y for x, y in zip(bits[: same + 1], other[: same + 1], strict=False))
        where += [same] if a != b else []
        num_texts, num_logits, num_differ = num_texts + 1, num_logits + min(same + 1, len(bits)), num_differ + differ
        failed += a != b or differ > 0
    is_claimed = ours.bits == theirs.bits == "equal"
    return {
        "compared": num_texts,
        "equal": num_texts - len(where),
        "first_difference": sorted(where),  # tokens
        "emitted": sum(map(len, ours.tokens)),
        "logits": num_logits,
        "logits_differ": num_differ,
        "bits": next((t.bits for t in (ours, theirs) if t.bits != "equal"), "equal"),
        "unexplained": failed if is_claimed else 0,
        **ours.facts,
    }


def in_words(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield what the engines' reports say of their bits, then a summary of all bits rows."""
    own = [row for row in rows if row["check"] == "bits"]
    yield from dict.fromkeys(f"bits: {row['bits']}" for row in own)
    if own:
        texts, emitted, differ = (sum(row[key] for row in own) for key in ("compared", "emitted", "logits_differ"))
        parted = texts - sum(row["equal"] for row in own)
        yield f"{emitted:,} tokens: {parted} of {texts} texts and {differ:,} rows of logits differ from plain decoding"
