"""`specdec bench acceptance`: acceptance lengths on real prompts, which do not depend on the machine."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import zip_longest
from typing import Any

from specdec.api import Engine, attach
from specdec.core.metrics import AcceptanceStats
from specdec.core.outputs import RequestOutput
from specdec.core.text.prompts import template_sha, thinking_of
from specdec.tools.measure.conversations import Answers, Conversations, ask, tau_by_context, tau_by_position
from specdec.tools.measure.drafts import DraftShape
from specdec.tools.measure.statistics import conditional, ratio_half_width, rounded
from specdec.tools.train.acceptance import predict

CHAIN = DraftShape(3, 1, 4)
FIRST_TOKEN = "from the prefill, in no round, not counted in tau"


def acceptance(
    model: Any,
    draft: Any,
    prompts: Mapping[str, Sequence[Sequence[int]] | Conversations],
    *,
    name: str,
    algo: str | None = "auto",
    shape: DraftShape = CHAIN,
    temperatures: Sequence[float] = (0.0,),
    tokenizer: Any = None,
    max_new_tokens: int = 256,
    max_batch: int = 8,
    sample_drafts: bool = True,
    lookup: bool = False,
    draft_vocab: int | Sequence[int] | None = None,
    predicted: bool = False,
    by_category: bool = False,
) -> Iterator[dict[str, Any]]:
    """Yield acceptance rows of `draft`, called `name` in them: one per file of `prompts` (token ids) and temperature.

    One engine serves them all, since attaching captures graphs. prompts: `Conversations`, too; of these every turn is
    asked and counted. draft, algo: as `attach` takes them; without both it measures plain decoding, and `shape` and
    draft_vocab (see `EngineConfig`) are ignored. tokenizer: the target's, compared with a standalone draft's;
    conversations need it. predicted: rows of greedy chains also get what the trainer simulates on the same text.
    by_category: after each row, one for every category of its prompts.
    """
    asked = {file: Conversations.of(some) for file, some in prompts.items()}
    longest = max(one.longest(max_new_tokens, tokenizer) for one in asked.values())
    settings: dict[str, Any] = {"max_batch": max_batch, "max_seq_len": longest, "sample_drafts": sample_drafts}
    settings["compile"] = False  # an engine per draft and shape: acceptance is the same
    settings["graph_sampling"] = tuple(dict.fromkeys("sampled" if t else "greedy" for t in temperatures))
    if draft is not None or algo not in (None, "auto"):
        settings |= {**shape.settings(), "draft_vocab": draft_vocab, "lookup": lookup}
    with attach(model, draft, algo, tokenizer=tokenizer, **settings) as engine:
        for file, some in asked.items():
            for temperature in temperatures:
                answers = ask(engine, some, temperature, max_new_tokens)
                common = {"draft": name, **_setting(engine, file, some, temperature, max_new_tokens)}
                num_tokens = sum(len(r.tokens) for r in answers.flat)
                speed = round(num_tokens / answers.time_s, 1) if answers.time_s else 0.0
                row = {**common, "category": None, **_measured(answers), "tok_s": speed}
                yield _beside_prediction(row, engine, answers.flat) if predicted else row
                for category, numbers in some.by_category().items() if by_category else ():
                    yield {**common, "category": category, **_measured(answers.of(numbers))}


def _setting(
    engine: Engine, file: str, asked: Conversations, temperature: float, max_new_tokens: int
) -> dict[str, Any]:
    """Return the setting of a row, and definitions in which other benches differ; draft_vocab: how many of the scored
    tokens a draft may propose, and how they were chosen, if not all."""
    config, tokenizer, narrow = engine.config, engine.tokenizer, engine.config.draft_vocab
    row = {
        "algo": engine.report().draft["algo"],
        "prompts": file,
        "prompts_sha": asked.prompts_sha(tokenizer),
        "turns": asked.num_turns,
        "steps": config.num_steps,
        "topk": config.topk,
        "draft_tokens": config.verify_width,
        "temperature": temperature,
        "sample_drafts": config.sample_drafts,
    }
    if isinstance(narrow, int):
        row |= {"draft_vocab": narrow, "chosen": "first"}
    elif narrow is not None:
        row |= {"draft_vocab": len(narrow), "chosen": "listed"}
    row |= {"lookup": True} if config.lookup else {}
    row |= {"max_new_tokens": max_new_tokens, "first_token": FIRST_TOKEN, "template_sha": template_sha(tokenizer)}
    return row | {"thinking": thinking_of(tokenizer)}


def _measured(answers: Answers) -> dict[str, Any]:
    """Return the measurements of some conversations; num_prompts counts every turn."""
    stats = AcceptanceStats().merge(parts := answers.stats())
    at = stats.acceptance_at
    return {
        "num_prompts": len(answers.flat),
        "conversations": len(parts),
        "tau": round(stats.tau, 4),
        "ci95": rounded(ci95(parts)),
        "rounds": stats.num_rounds,
        "accept_at": [round(a, 4) for a in at],
        "conditional_at": conditional(at),
        "tau_by_position": tau_by_position(answers.requests),
        "tau_by_context": tau_by_context(answers.requests),
    }


def ci95(parts: Sequence[AcceptanceStats]) -> float:
    """Return the half width of the 95% interval of tau, pooled over independent `parts`: the ratio estimator."""
    return ratio_half_width([p.num_emitted for p in parts], [p.num_rounds for p in parts])


def _beside_prediction(row: dict[str, Any], engine: Engine, requests: Sequence[RequestOutput]) -> dict[str, Any]:
    """Add to a greedy chain's row the a_j that the trainer simulates on its text, and their distance from the measured
    ones."""
    draft = engine.draft_module
    if row["temperature"] or row["topk"] > 1 or draft is None or getattr(draft, "num_modules", 1) > 1:
        return row  # the trainer only supports heads of one module
    text = [(r.prompt_ids, r.tokens) for r in requests]
    stats = predict(engine.target_module, draft, text, row["steps"])
    measured = AcceptanceStats().merge([r.acceptance for r in requests])
    pairs = zip_longest(measured.acceptance_at, stats.acceptance_at, fillvalue=0.0)
    off = [round(m / p - 1, 4) if p else None for m, p in pairs]
    return {**row, "predicted_at": [round(p, 4) for p in stats.acceptance_at], "off_prediction": off}
