"""`specdec bench acceptance --speed`: tokens/s of real prompts with 95% intervals, for every batch and temperature."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from typing import Any, NamedTuple

from specdec.api import Engine, attach
from specdec.core.functional.sampling import SamplingParams
from specdec.core.metrics import AcceptanceStats
from specdec.tools.measure.acceptance import ci95
from specdec.tools.measure.conversations import Conversations
from specdec.tools.measure.drafts import DraftShape
from specdec.tools.measure.statistics import ratio_half_width, rounded

MOST_CALLS = 24  # timed calls per row


class Call(NamedTuple):
    """One call of `generate`: tokens after the first ones and their seconds; all tokens and all seconds."""

    later_tokens: int
    later_s: float
    tokens: int
    time_s: float
    acceptance: AcceptanceStats


def speeds(
    model: Any,
    draft: Any,
    prompts: Mapping[str, Conversations],
    *,
    name: str,
    algo: str | None,
    shape: DraftShape,
    batches: Sequence[int],
    temperatures: Sequence[float],
    tokenizer: Any = None,
    max_new_tokens: int = 129,
    sample_drafts: bool = True,
    lookup: bool = False,
    draft_vocab: int | Sequence[int] | None = None,
) -> Iterator[dict[str, Any]]:
    """Yield rows of `draft`, called `name` in them: one per file of `prompts` (first turns), batch and temperature.

    The options are those of `acceptance`. A row covers up to `MOST_CALLS` calls with different prompts, each of which
    emits `max_new_tokens`, past EOS. tok_s: tokens after the first ones over the time after these; its interval is over
    calls, as for tau.
    """
    longest = max(len(ids) for asked in prompts.values() for ids in asked.ids) + max_new_tokens
    settings: dict[str, Any] = {"max_batch": max(batches), "max_seq_len": longest, "graph_batches": tuple(batches)}
    settings["graph_sampling"] = tuple(dict.fromkeys("sampled" if t else "greedy" for t in temperatures))
    if algo is not None:
        settings |= {**shape.settings(), "draft_vocab": draft_vocab, "lookup": lookup, "sample_drafts": sample_drafts}
    with attach(model, draft, algo, tokenizer=tokenizer, **settings) as engine:
        config = engine.config
        key = {"draft": name, "algo": engine.report().draft["algo"], "steps": config.num_steps, "topk": config.topk}
        key |= {"draft_tokens": config.verify_width, "max_new_tokens": max_new_tokens}
        for (file, asked), batch, temperature in product(prompts.items(), batches, temperatures):
            own = asked.ids
            groups = [own[i * batch : (i + 1) * batch] for i in range(min(len(own) // batch, MOST_CALLS))]
            if not groups:
                raise ValueError(f"--speed {batch}: {file} has {len(own)} prompts; expected at least {batch}")
            _call(engine, groups[-1], temperature, max_new_tokens, -1)  # not counted: kernels may have to be loaded
            calls = [_call(engine, group, temperature, max_new_tokens, i) for i, group in enumerate(groups)]
            case = {"prompts": file, "batch": batch, "temperature": temperature}
            yield {"what": "speed", **key, **case, **_measured(calls)}


def _call(engine: Engine, prompts: Sequence[list[int]], temperature: float, num: int, number: int) -> Call:
    laws = [SamplingParams(temperature=temperature, seed=1000 * (number + 1) + i) for i in range(len(prompts))]
    out = engine.generate(list(prompts), max_new_tokens=num, sampling=laws, ignore_eos=True)
    stats, first_s = out.stats, max(r.first_token_s for r in out.requests)
    later = stats.num_tokens - len(prompts), stats.time_s - first_s
    return Call(*later, stats.num_tokens, stats.time_s, stats.acceptance)


def _measured(calls: Sequence[Call]) -> dict[str, Any]:
    """Return tokens/s and tau of some calls, pooled, with the half widths of their 95% intervals."""
    later, seconds = [c.later_tokens for c in calls], [c.later_s for c in calls]
    parts = [c.acceptance for c in calls]
    return {
        "calls": len(calls),
        "tok_s": round(sum(later) / sum(seconds), 1),
        "tok_s_ci95": rounded(ratio_half_width(later, seconds), 1),
        "with_prefill_tok_s": round(sum(c.tokens for c in calls) / sum(c.time_s for c in calls), 1),
        "tau": round(AcceptanceStats().merge(parts).tau, 4),
        "ci95": rounded(ci95(parts)),
    }
