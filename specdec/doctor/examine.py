"""The examination: runs the other modules of this package and draws the conclusion."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from transformers import PreTrainedModel

from specdec.doctor.cost import Run, run
from specdec.doctor.experts import measure_verify, remark
from specdec.doctor.facts import embedding_likeness, facts_of, untouched_norm, weight_problems
from specdec.doctor.rows import Agreement, Observed, commonest, coverage, model_agreement, observe
from specdec.doctor.search import Trial, search, unclear
from specdec.heads.base import DraftHead
from specdec.measure.acceptance import ci95
from specdec.measure.roofline import Floor, floor, measure_bandwidth

LOW_TAU = 1.25  # a draft with less is suspect
UNLIKE = 0.05  # correlation below which two embeddings have nothing in common
LOW_COVERAGE = 0.5


@dataclass
class Findings:
    """Findings about one draft.

    plain, speculative: runs of the engine without and with it; None where it cannot run. agreement: teacher-forced, as
    the engine reads it; trials: alternative readings; repairs: those that repair it. chance: agreement of always
    predicting the most frequent token. defects: names of what is wrong, most likely first; remarks: the same in
    sentences, and other observations.
    """

    facts: dict[str, Any]
    floor: Floor
    num_steps: int
    plain: Run
    speculative: Run | None = None
    agreement: Agreement | None = None
    trials: list[Trial] = field(default_factory=list)
    repairs: list[Trial] = field(default_factory=list)
    chance: float = 0.0
    defects: list[str] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)

    @property
    def tau(self) -> float | None:
        """Acceptance length of chains."""
        return None if self.speculative is None else self.speculative.acceptance.tau

    @property
    def break_even(self) -> float | None:
        """Tau at which a measured round is as fast as plain decoding."""
        return None if self.speculative is None else self.speculative.step_ms / self.plain.step_ms

    @property
    def json(self) -> dict[str, Any]:
        """All findings, as a JSON object for programs."""
        found: dict[str, Any] = {
            **self.facts,
            "steps": self.num_steps,
            "bandwidth_gb_s": round(self.floor.gb_s, 1),
            "floor_plain_ms": round(self.floor.plain_ms, 4),
            "floor_round_ms": round(self.floor.round_ms, 4),
            "floor_break_even": round(self.floor.break_even, 4),
            "plain_ms": round(self.plain.step_ms, 3),
            "chance": round(self.chance, 4),
        }
        if self.floor.verify is not None:
            uniform = self.floor.verify.experts.distinct(self.num_steps + 1)
            found["experts"] = {**self.floor.verify.facts, "distinct_if_random": round(uniform, 2)}
        if self.speculative is not None and self.tau is not None and self.break_even is not None:
            half_width = ci95([output.acceptance for output in self.speculative.outputs])
            found |= {
                "tau": round(self.tau, 4),
                "ci95": round(half_width, 4) if half_width < float("inf") else None,
                "rounds": self.speculative.acceptance.num_rounds,
                "accept_at": [round(a, 4) for a in self.speculative.acceptance.acceptance_at],
                "round_ms": round(self.speculative.step_ms, 3),
                "break_even": round(self.break_even, 4),
                "pays": self.tau > self.break_even,
                "equal": self.speculative.tokens == self.plain.tokens,
            }
        if self.agreement is not None:
            found["agreement"] = _rates(self.agreement)
            found["rows"] = self.agreement.num_rows
        found["readings"] = {t.alternative.name: _rates(t.agreement) for t in self.trials}
        return {**found, "defects": self.defects, "remarks": self.remarks}


def _rates(agreement: Agreement) -> list[float]:
    return [round(agreement.first, 4), round(agreement.second, 4)]


def examine(
    model: PreTrainedModel,
    draft: DraftHead | PreTrainedModel,
    prompts: Sequence[Sequence[int]],
    *,
    num_steps: int = 3,
    max_new_tokens: int = 48,
    gb_s: float | None = None,
    known: Mapping[str, Any] = MappingProxyType({}),
) -> Findings:
    """Examine a loaded draft on `prompts` (token ids). gb_s: memory bandwidth of the device; None measures it.

    known: facts already read; "tokenizer" is the result of `tokenizer_match`.
    """
    bandwidth = measure_bandwidth(model.device) if gb_s is None else gb_s
    plain = run(model, None, prompts, max_new_tokens, 0)
    verify = measure_verify(model, list(zip(prompts, plain.tokens, strict=True)), num_steps + 1)
    least = floor(model, draft, num_steps, bandwidth, verify)
    found = Findings({**known, **facts_of(draft, model)}, least, num_steps, plain)
    problems = weight_problems(draft, model)
    if not problems:
        found.speculative = run(model, draft, prompts, max_new_tokens, num_steps)
    texts = [observe(model, prompt, answer) for prompt, answer in zip(prompts, plain.tokens, strict=True)]
    found.chance = commonest(texts)
    if isinstance(draft, DraftHead):
        _read_head(found, draft, model, texts)
    else:
        found.agreement = model_agreement(draft, texts)
    _conclude(found, draft, problems)
    return found


def _read_head(found: Findings, head: DraftHead, model: PreTrainedModel, texts: Sequence[Observed]) -> None:
    found.facts["coverage"] = round(coverage(head.hot_ids, texts), 4)
    likeness = embedding_likeness(head, model)
    if likeness is not None:
        found.facts["embedding_likeness"] = round(likeness, 4)
    if any(layer.has_sinks for layer in head.attention_layers):
        found.remarks.append("its attention has sinks: other readings of it cannot be tried")
        return
    found.agreement, found.trials, found.repairs = search(head, model, texts)


def _conclude(found: Findings, draft: DraftHead | PreTrainedModel, problems: Sequence[str]) -> None:
    """Fill in defects and remarks."""
    found.remarks += problems
    if isinstance(draft, DraftHead) and untouched_norm(draft) and all(_is_idle(trial) for trial in found.repairs):
        found.repairs = []
    for trial in found.repairs:
        found.defects.append(trial.alternative.name)
        first, second = trial.agreement.first, trial.agreement.second
        found.remarks.append(f"{trial.alternative.defect} (agrees in {first:.0%}, then {second:.0%} of rows)")
    if problems and not found.repairs:
        found.defects.append("broken weights")
    is_low = found.tau is not None and found.tau < LOW_TAU
    tokenizer = found.facts.get("tokenizer")
    if tokenizer not in (None, "equal"):
        found.remarks.append(f"its tokenizer is not the target's: {tokenizer}")
        found.defects += ["tokenizer"] if is_low else []
    if is_low and not found.defects:
        name, remark = _why_low(found, draft)
        found.defects += [name] if name else []
        found.remarks.append(remark)
    found.remarks += doubts(found)


def _is_idle(trial: Trial) -> bool:
    """Return whether an untrained head reaches this agreement, by passing its input through."""
    return trial.alternative.leaks or trial.agreement.first < 0.5


def _why_low(found: Findings, draft: DraftHead | PreTrainedModel) -> tuple[str | None, str]:
    """Explain a tau near 1 that no other reading raises: (a defect or None, a sentence)."""
    agreement, covered = found.agreement, found.facts.get("coverage", 1.0)
    if covered < LOW_COVERAGE:
        return "hot vocabulary", (
            f"its hot vocabulary holds {covered:.0%} of what the target says here: choose it on such text, train anew"
        )
    if agreement is None:
        return None, "it says little of what the target says"
    noise = found.chance + 2 * agreement.num_rows**-0.5
    first_accepted = next(iter(found.speculative.acceptance.acceptance_at), 0.0) if found.speculative else 0.0
    if agreement.first > max(noise, 2 * first_accepted + 0.1):
        return "engine", (
            f"outside the engine it agrees in {agreement.first:.0%} of rows, inside {first_accepted:.0%} of its first "
            "drafts are accepted: this may be a defect of the engine; please report it"
        )
    if agreement.first > noise:
        return None, "it is read as it was trained, as far as other readings tell; it knows little of such text"
    if found.facts.get("embedding_likeness", 1.0) < UNLIKE:
        why = "its own embedding has nothing in common with the target's"
    elif isinstance(draft, DraftHead) and untouched_norm(draft):
        why = f"{untouched_norm(draft)} is all of one value, as norms are made"
    else:
        why = "it is untrained, or was trained for another target"
    return "untrained or random", f"it agrees no more than chance under every reading: {why}"


def doubts(found: Findings) -> list[str]:
    """Return remarks on a reading that may be better, texts that differ, what a verify reads, and whether the draft
    pays."""
    remarks = []
    base = found.agreement
    maybe = None if base is None or found.repairs else unclear(found.trials, base)
    if base is not None and maybe is not None:
        remarks.append(
            f"it may read better with {maybe.alternative.name!r} ({maybe.agreement.score:.2f} of two drafts accepted, "
            f"not {base.score:.2f}); {base.num_rows} rows do not tell, give more prompts"
        )
    if found.speculative is not None and found.speculative.tokens != found.plain.tokens:
        differing = sum(a != b for a, b in zip(found.speculative.tokens, found.plain.tokens, strict=True))
        remarks.append(
            f"{differing} of {len(found.plain.tokens)} texts differ from plain decoding: in bf16 these are near-ties "
            "(specdec bench lossless traces them); in fp32 please report it"
        )
    if found.floor.verify is not None:
        remarks.append(remark(found.floor.verify, found.floor.break_even))
    if found.tau is not None and found.break_even is not None:
        speed = found.tau / found.break_even
        verdict = f"{'it pays' if speed > 1 else 'it does not pay'} ({speed:.2f}x)"
        if found.break_even < 1:  # a verify is a plain step of more tokens
            verdict = "no round is as cheap, so the times are not to be trusted; run it again on a quiet machine"
        remarks.append(f"a round costs {found.break_even:.2f} plain steps and yields {found.tau:.2f}: {verdict}")
    return remarks
