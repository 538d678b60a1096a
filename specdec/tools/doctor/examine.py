"""The examination of a draft: measures it through the engine, tries other readings, and draws the conclusion."""

import statistics
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, TypeAlias

from transformers import PreTrainedModel

from specdec.api import attach
from specdec.core.draft.head import DraftHead
from specdec.core.outputs import GenerationOutput
from specdec.reach.targets.assistant import is_assistant
from specdec.reach.targets.weight_bytes import VerifyCost, distinct_experts, verify_cost
from specdec.tools.doctor.facts import embedding_likeness, facts_of, untouched_norm, weight_problems
from specdec.tools.doctor.readings import Trial, doubts, search
from specdec.tools.doctor.rows import Agreement, commonest, coverage, model_agreement, observe
from specdec.tools.measure.acceptance import ci95
from specdec.tools.measure.roofline import Floor, floor, measure_bandwidth
from specdec.tools.measure.statistics import conditional, rounded

LOW_TAU = 1.25  # drafts below this are suspect
UNLIKE = 0.05  # correlation below which two embeddings are unrelated
LOW_COVERAGE = 0.5

Draft: TypeAlias = DraftHead | PreTrainedModel
Text: TypeAlias = tuple[Sequence[int], Sequence[int]]  # ids of a prompt and of its answer


def examine(
    model: PreTrainedModel,
    draft: Draft,
    prompts: Sequence[Sequence[int]],
    *,
    num_steps: int = 3,
    max_new_tokens: int = 48,
    gb_s: float | None = None,
    known: Mapping[str, Any] = MappingProxyType({}),
) -> dict[str, Any]:
    """Examine a loaded draft on `prompts` (token ids); return the findings as a JSON object, in order of reading.

    gb_s: memory bandwidth of the device; None measures it. known: facts already read; "tokenizer" is the result of
    `tokenizer_match`. Of the result, "floor_*" follow from bytes and bandwidth, "accept_at" and "accept_given" are
    rates by draft position (given the one before), "agreement" is teacher-forced, by draft step, as the engine reads
    the draft, and "readings" the same of every alternative; "repairs" names those that raise it clearly. "chance" is
    what a draft gets by always saying the most frequent token. "defects" names what is wrong, most likely first, and
    "remarks" says the same in sentences, with other observations. A draft whose weights are broken is not run.
    """
    problems = weight_problems(draft, model)
    plain, plain_ms = _run(model, None, prompts, max_new_tokens)
    answers = list(zip(prompts, plain.tokens, strict=True))
    verify = measure_verify(model, answers, num_steps + 1)
    least = floor(model, draft, num_steps, measure_bandwidth(model.device) if gb_s is None else gb_s, verify)
    found = {**known, **facts_of(draft, model), **_floor_facts(least), "plain_ms": round(plain_ms, 3)}
    closing = [] if verify is None else [verify_remark(verify, least.break_even)]
    if not problems:
        played, round_ms = _run(model, draft, prompts, max_new_tokens, num_steps=num_steps)
        found |= _pace(played, plain, round_ms, plain_ms)
        closing = [*_differences(played, plain), *closing, verdict(found["tau"], found["break_even"])]
    texts = [observe(model, prompt, answer) for prompt, answer in answers]
    found["chance"] = round(commonest(texts), 4)
    base, trials, repairs = None, list[Trial](), list[Trial]()
    if not isinstance(draft, DraftHead):
        base = None if is_assistant(draft) else model_agreement(draft, texts)
    else:
        likeness = embedding_likeness(draft, model)
        found["coverage"] = round(coverage(draft.hot_ids, texts), 4)
        found |= {} if likeness is None else {"embedding_likeness": round(likeness, 4)}
        if any(layer.has_sinks for layer in draft.attention_layers):
            problems.append("its attention has sinks: other readings of it cannot be tried")
        else:
            base, trials, repairs = search(draft, model, texts)
        if untouched_norm(draft) and all(t.alternative.leaks or t.agreement.first < 0.5 for t in repairs):
            repairs = []  # an untrained head agrees as often, by passing its input through
    found |= {} if base is None else {"rows": base.num_rows, "agreement": base.rates}
    found["readings"] = {t.alternative.name: t.agreement.rates for t in trials}
    found["repairs"] = [t.alternative.name for t in repairs]
    defects, why = _conclude(found, draft, base)
    shares = [(t.alternative.defect, *t.agreement.rates) for t in repairs]
    repaired = [f"{defect} (agrees in {first:.0%}, then {second:.0%} of rows)" for defect, first, second in shares]
    unsure = doubts(trials, base) if base is not None and not repairs else []
    return {**found, "defects": defects, "remarks": [*problems, *repaired, *why, *unsure, *closing]}


def _run(
    model: PreTrainedModel, draft: Any, prompts: Sequence[Sequence[int]], max_new_tokens: int, **settings: Any
) -> tuple[GenerationOutput, float]:
    """Decode greedily at batch 1, after a warm-up; draft None is plain decoding. Return the output, and the median over
    prompts of a step's, or a round's, milliseconds without prefills."""
    longest = max(map(len, prompts)) + max_new_tokens
    settings |= {"max_batch": 1, "max_seq_len": longest, "graph_sampling": "greedy"}
    with attach(model, draft, **settings, compile=False) as engine:  # several engines, a few texts each
        engine.generate([list(prompts[0])], max_new_tokens=min(4, max_new_tokens))
        out = engine.generate([list(p) for p in prompts], max_new_tokens=max_new_tokens)
    paces = [(r.time_s - r.first_token_s) / r.acceptance.num_rounds for r in out.requests if r.acceptance.num_rounds]
    if not paces:
        raise ValueError("the target's answers are one token each: give other prompts or raise max_new_tokens")
    return out, 1e3 * statistics.median(paces)


def _floor_facts(least: Floor) -> dict[str, Any]:
    """Return the lower bounds, and the bytes that a verify of a mixture of experts reads."""
    facts: dict[str, Any] = {"steps": least.num_steps, "bandwidth_gb_s": round(least.gb_s, 1)}
    facts |= {f"floor_{name}": round(getattr(least, name), 4) for name in ("plain_ms", "round_ms", "break_even")}
    if least.verify is not None:
        uniform = least.verify.experts.distinct(least.num_steps + 1)
        facts["experts"] = {**least.verify.facts, "distinct_if_random": round(uniform, 2)}
    return facts


def _pace(played: GenerationOutput, plain: GenerationOutput, round_ms: float, plain_ms: float) -> dict[str, Any]:
    """Return acceptance and pace of rounds beside plain steps."""
    stats, break_even = played.stats.acceptance, round_ms / plain_ms
    return {
        "tau": round(stats.tau, 4),
        "ci95": rounded(ci95([r.acceptance for r in played.requests])),
        "rounds": stats.num_rounds,
        "accept_at": [round(a, 4) for a in stats.acceptance_at],
        "accept_given": conditional(stats.acceptance_at),
        "round_ms": round(round_ms, 3),
        "break_even": round(break_even, 4),
        "pays": stats.tau > break_even,
        "equal": played.tokens == plain.tokens,
    }


def _differences(played: GenerationOutput, plain: GenerationOutput) -> list[str]:
    differing = sum(a != b for a, b in zip(played.tokens, plain.tokens, strict=True))
    if not differing:
        return []
    return [
        f"{differing} of {len(plain.tokens)} texts differ from plain decoding: in bf16 these are near-ties (specdec "
        "bench lossless traces them); in fp32 please report it"
    ]


def measure_verify(model: PreTrainedModel, texts: Sequence[Text], num_nodes: int) -> VerifyCost | None:
    """Return the VerifyCost of chains of `num_nodes` tokens on `texts`; None if the model has no routed experts."""
    if verify_cost(model, num_nodes) is None:
        return None
    return verify_cost(model, num_nodes, distinct_experts(model, texts, num_nodes))


def _conclude(found: Mapping[str, Any], draft: Draft, base: Agreement | None) -> tuple[list[str], list[str]]:
    """Return (defects, most likely first; remarks on the tokenizer and on a tau near 1 that nothing else explains)."""
    defects, remarks = list(found["repairs"]), list[str]()
    is_low, tokenizer = found.get("tau", LOW_TAU) < LOW_TAU, found.get("tokenizer")
    if "tau" not in found and not defects:
        defects.append("broken weights")
    if tokenizer not in (None, "equal"):
        remarks.append(f"its tokenizer is not the target's: {tokenizer}")
        defects += ["tokenizer"] if is_low else []
    if is_low and not defects:
        name, why = _why_low(found, draft, base)
        return [name] if name else [], [*remarks, why]
    return defects, remarks


def _why_low(found: Mapping[str, Any], draft: Draft, base: Agreement | None) -> tuple[str | None, str]:
    """Explain a tau near 1 that no other reading raises: (a defect or None, a sentence)."""
    covered = found.get("coverage", 1.0)
    if covered < LOW_COVERAGE:
        return "hot vocabulary", (
            f"its hot vocabulary holds {covered:.0%} of the target's tokens here: choose it on such text, train again"
        )
    if base is None:
        return None, "it rarely predicts the target's tokens"
    noise = found["chance"] + 2 * base.num_rows**-0.5
    accepted = next(iter(found["accept_at"]), 0.0)
    if base.first > max(noise, 2 * accepted + 0.1):
        return "engine", (
            f"outside the engine it agrees in {base.first:.0%} of rows, inside {accepted:.0%} of its first drafts are "
            "accepted: this may be a defect of the engine; please report it"
        )
    if base.first > noise:
        return None, "no other reading fits it better; it predicts such text poorly"
    if found.get("embedding_likeness", 1.0) < UNLIKE:
        why = "its own embedding has nothing in common with the target's"
    elif isinstance(draft, DraftHead) and untouched_norm(draft):
        why = f"{untouched_norm(draft)} has one value within 1%, as norms are initialised"
    else:
        why = "it is untrained, or was trained for another target"
    return "untrained or random", f"it agrees no more than chance under every reading: {why}"


def verify_remark(cost: VerifyCost, break_even: float) -> str:
    """Describe what a verify of a mixture of experts reads, and the tau from which drafts pay off; this draft's is
    break_even."""
    experts = cost.experts
    what = (
        f"a verify of {cost.num_nodes} tokens reads {cost.distinct:.1f} of {experts.num_experts} experts a layer "
        f"({experts.distinct(cost.num_nodes):.1f} if choices were random; a step {experts.per_token}), "
        f"{cost.ratio:.2f} times the bytes of a step: at batch 1 this draft cannot pay below tau {break_even:.2f}, nor "
        f"any draft below {cost.ratio:.2f}"
    )
    if break_even < cost.num_nodes:
        return what
    return f"{what}; a round yields {cost.num_nodes} at most, so that speculation of this depth cannot pay"


def verdict(tau: float, break_even: float) -> str:
    """Describe whether a draft pays off. break_even: a round's time in plain steps."""
    speed = tau / break_even
    pays = f"{'it pays' if speed > 1 else 'it does not pay'} ({speed:.2f}x)"
    if break_even < 1:  # a verify is a plain step of more tokens
        pays = "no round is as cheap, so the times are not to be trusted; run it again on a quiet machine"
    return f"a round costs {break_even:.2f} plain steps and yields {tau:.2f}: {pays}"
