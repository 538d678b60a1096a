"""`specdec bench gsm8k`: likelihoods and answers with prefill graphs off, breakable and piecewise, with and without a
draft, each compared with the base: no prefill graphs, plain decoding.

`Engine.score` computes likelihoods of the gold solutions, several items packed in a prefill, so they come from the
prefill graphs. A mode differs beyond chance if McNemar's exact test on right and wrong answers says so (p < 0.01), or
if the paired bootstrap interval of the likelihoods excludes 0 and their mean differs by 1e-3 nats or more: other
kernels round differently, a tiny but systematic difference that shows in any interval with enough items.
"""

import re
import time
from collections.abc import Iterator, Mapping, Sequence
from random import Random
from typing import Any, NamedTuple

from tqdm import tqdm

from specdec.api import Engine, attach
from specdec.core.text.prompts import chat_ids
from specdec.tools.measure.lossless import compare_texts, near_tie
from specdec.tools.measure.statistics import bootstrap_interval, mcnemar

MODES: dict[str, dict[str, Any]] = {
    "off": {"prefill_graph": "off", "compile": False},
    "breakable": {"prefill_graph": "breakable", "compile": False},
    "piecewise": {"prefill_graph": "piecewise", "compile": False},
    "whole": {"prefill_graph": "whole", "compile": False},
    "piecewise, compiled rounds": {"prefill_graph": "piecewise", "compile": True},
}
NAMES = {"eagle": "EAGLE", "eagle3": "EAGLE-3", "nextn": "NextN", None: "plain decoding"}  # names in sentences
CHAIN = {"num_steps": 3}
PLAIN = ((None, None), "off")  # draft and mode of the base
MOST_PACKED = 8  # items per prefill
TOLERANCE = 1e-3  # nats per token: the most that rounding of other kernels may change
LEAST_P = 0.01


class Items(NamedTuple):
    """Settings of a run.

    gold: ids of each question with its gold solution, and the number of ids of the question; prompts: ids of the
    questions to answer; right: their gold numbers.
    """

    gold: list[tuple[list[int], int]]
    prompts: list[list[int]]
    right: list[str]

    @classmethod
    def of(cls, records: Sequence[Mapping[str, str]], tokenizer: Any, num_items: int, num_answers: int) -> "Items":
        """Take the first records with `question` and `answer`: those to score and those to answer."""
        for number, record in enumerate(records, 1):
            if not all(isinstance(record.get(key), str) for key in ("question", "answer")):
                raise ValueError(
                    f"GSM8K item {number} has no `question` and `answer`: give gsm8k/test.jsonl as published"
                )
        answered = records[:num_answers]
        prompts = chat_ids([r["question"] for r in answered], tokenizer)
        right = [r["answer"].split("####")[-1].strip() for r in answered]
        return cls([_gold_ids(r, tokenizer) for r in records[:num_items]], prompts, right)


class Outcome(NamedTuple):
    """Results of one mode: nll of each item (nats per token), the answers' ids, and which answers are right."""

    nll: list[float]
    answers: list[list[int]]
    is_right: list[bool]


def run(
    model: Any,
    tokenizer: Any,
    items: Items,
    drafts: Sequence[tuple[Any, str | None]],
    modes: Sequence[str] = tuple(MODES),
    *,
    max_new_tokens: int = 256,
    seed: int = 0,
    **settings: Any,
) -> Iterator[dict[str, Any]]:
    """Yield a row for every draft and mode. The first is the base, without graphs and draft, whether requested or not.

    drafts: draft and algo as `attach` takes them; (None, None) is plain decoding. seed: decides how many items a
    prefill packs. settings: of every engine, such as backend or max_seq_len.
    """
    base: Outcome | None = None
    tie, dtype = 0.0, str(model.dtype).removeprefix("torch.")
    wanted = [(draft, mode) for draft in drafts for mode in modes]
    for (draft, algo), mode in [PLAIN, *(w for w in wanted if w != PLAIN)]:
        given = {**settings, **MODES[mode], "graph_sampling": "greedy", **({} if algo is None else CHAIN)}
        with attach(model, draft, algo, tokenizer=tokenizer, **given) as engine:
            outcome, row = _measure(engine, items, max_new_tokens, seed)
        if base is None:
            base, tie = outcome, near_tie(model, items.prompts, outcome.answers)
        row = {"what": "gsm8k", "dtype": dtype, "mode": mode, **row, **_against(model, items, outcome, base, tie)}
        yield {**row, "says": in_words(row)}


def _measure(engine: Engine, items: Items, max_new_tokens: int, seed: int) -> tuple[Outcome, dict[str, Any]]:
    totals = score(engine, items.gold, seed)
    lens = [len(ids) - asked for ids, asked in items.gold]
    start = time.perf_counter()
    out = engine.generate(items.prompts, max_new_tokens=max_new_tokens)
    seconds = round(time.perf_counter() - start, 1)
    is_right = [last_number(text) == gold for text, gold in zip(out.texts, items.right, strict=True)]
    report = engine.report()
    row = {
        "draft": report.draft["algo"],
        "items": len(lens),
        "tokens": sum(lens),
        "nll": round(sum(totals) / sum(lens), 6),
        "answer_s": seconds,
        "answers": len(is_right),
        "correct": sum(is_right),
        "tau": round(out.stats.tau, 4),
        "runners": report.runners,
    }
    return Outcome([t / n for t, n in zip(totals, lens, strict=True)], out.tokens, is_right), row


def score(engine: Engine, gold: Sequence[tuple[list[int], int]], seed: int) -> list[float]:
    """Return the negative log-likelihood of every solution, nats; `seed` decides how many share a prefill."""
    random = Random(seed)
    totals: list[float] = []
    progress = tqdm(total=len(gold), desc="nll", leave=False)
    while len(totals) < len(gold):
        some = gold[len(totals) : len(totals) + random.randint(1, MOST_PACKED)]
        scores = engine.score([ids[:asked] for ids, asked in some], [ids[asked:] for ids, asked in some])
        totals += [-s.logprob for s in scores]
        progress.update(len(some))
    progress.close()
    return totals


def _against(model: Any, items: Items, outcome: Outcome, base: Outcome, tie: float) -> dict[str, Any]:
    """Compare one mode with the base: likelihoods item by item, right answers, and gaps in logits where texts diverge.

    tie: gap in logits up to which rounding explains a difference, 0 in fp32.
    """
    differences = [ours - theirs for ours, theirs in zip(outcome.nll, base.nll, strict=True)]
    pairs = list(zip(outcome.is_right, base.is_right, strict=True))
    only_here, only_base = pairs.count((True, False)), pairs.count((False, True))
    return {
        "nll_difference": round(sum(differences) / len(differences), 7),
        "nll_ci95": [round(edge, 7) for edge in bootstrap_interval(differences)],
        "only_here": only_here,
        "only_base": only_base,
        "mcnemar_p": mcnemar(only_here, only_base),
        **compare_texts(model, items.prompts, outcome.answers, base.answers, tie, 3),
    }


def name_of(row: Mapping[str, Any]) -> str:
    """Return the name of a row, such as "float32 piecewise, EAGLE-3"."""
    return f"{row['dtype']} {row['mode']}, {NAMES.get(row['draft'], row['draft'])}"


def in_words(row: Mapping[str, Any]) -> str:
    """Return the comparison with the base as a sentence."""
    low, high = row["nll_ci95"]
    return (
        f"{name_of(row)}: {row['only_here']} answers right only here, {row['only_base']} only in the base: McNemar p = "
        f"{row['mcnemar_p']:.2g}; {row['equal']} of {row['answers']} answers equal, {row['near_ties']} part at "
        f"near-ties; likelihood {row['nll_difference']:+.2g} nats per token (95%: {low:+.2g} to {high:+.2g})"
    )


def problems(row: Mapping[str, Any]) -> list[str]:
    """List the problems of a row: differences that are neither chance nor rounding."""
    found, (low, high) = [], row["nll_ci95"]
    if row["mcnemar_p"] < LEAST_P:
        only = f"{row['only_here']} right only here, {row['only_base']} only in the base"
        found.append(f"answers differ beyond chance: {only}: McNemar p = {row['mcnemar_p']:.2g} < {LEAST_P}")
    if abs(row["nll_difference"]) >= TOLERANCE and not low <= 0 <= high:
        found.append(
            f"likelihoods differ beyond chance: {row['nll_difference']:+.2g} nats per token, 95% interval {low:+.2g} "
            f"to {high:+.2g}, tolerance {TOLERANCE:g}"
        )
    differing = row["answers"] - row["equal"] - (row["near_ties"] if row["near_tie"] else 0)
    if differing > 0:
        found.append(f"{differing} answers differ where there is no near-tie")
    replays = row["runners"]["target_prefill"]["replays"]
    if (replays > 0) != (row["mode"] != "off"):
        found.append(f"{replays} prefills were replayed")
    return [f"{name_of(row)}: {one}" for one in found]


def last_number(text: str) -> str | None:
    """Return the last number in an answer, in the format of GSM8K's gold answers."""
    numbers = re.findall(r"-?\d[\d,]*(?:\.\d+)?", text)
    return numbers[-1].rstrip(".") if numbers else None


def _gold_ids(record: Mapping[str, str], tokenizer: Any) -> tuple[list[int], int]:
    """Return ids of a question with its gold solution, and the number of ids of the question."""
    question = tokenizer(f"Question: {record['question']}\nAnswer:", add_special_tokens=False)["input_ids"]
    solution = tokenizer(f" {record['answer']}", add_special_tokens=False)["input_ids"]
    return question + solution, len(question)
