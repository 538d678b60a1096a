"""Fills a corpus with text that the target generates: answers to questions, and chats including their user turns.

It keeps the sampled token ids; text is never tokenised again.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from tqdm import tqdm

from specdec.core.functional.sampling import SamplingParams
from specdec.core.text.inputs import encode, render_chat
from specdec.tools.train.data import Corpus

SENTINEL = "Qx7sentinel7xQ"
MIN_USER_TURN = 3  # tokens; shorter turns are dropped


class TurnJob(NamedTuple):
    """One request: prompt ids and how to sample its answer."""

    prompt: list[int]
    sampling: SamplingParams


@dataclass
class Budget:
    """Wall-clock limit for generating (None: no limit), and counts of what was generated."""

    minutes: float | None = None
    began: float = field(default_factory=time.monotonic)
    num_tokens: int = 0
    num_requests: int = 0

    @property
    def seconds(self) -> float:
        """Seconds since it began."""
        return time.monotonic() - self.began

    def affordable(self, chunk: int) -> int:
        """Return how many requests to start next: `chunk`, fewer near the end by the pace so far, 0 to stop.

        A limited budget begins with a quarter chunk, to learn the pace.
        """
        if self.minutes is None:
            return chunk
        left = 60 * self.minutes - self.seconds
        if not self.num_requests:
            return max(chunk // 4, 1) if left > 0 else 0
        fitting = int(left * self.num_requests / self.seconds)
        return min(chunk, fitting) if fitting >= max(chunk // 8, 1) else 0

    def report(self) -> dict[str, Any]:
        """Return requests, generated tokens, minutes and tokens per second."""
        seconds = max(self.seconds, 1e-9)
        counts = {"requests": self.num_requests, "generated_tokens": self.num_tokens}
        rate = round(self.num_tokens / seconds, 1)
        return {**counts, "gen_minutes": round(seconds / 60, 2), "gen_tokens_per_s": rate}


def user_turn_frame(tokenizer: Any) -> tuple[str, str]:
    """Return the chat template's text before a first user turn, and after it up to where the answer begins."""
    text = render_chat([{"role": "user", "content": SENTINEL}], tokenizer)
    if text.count(SENTINEL) != 1:
        raise ValueError(f"the chat template writes a user turn {text.count(SENTINEL)} times; expected once: {text!r}")
    prefix, suffix = text.split(SENTINEL)
    if not (prefix and suffix):
        raise ValueError(f"the chat template writes nothing before or after a user turn: expected both: {text!r}")
    return prefix, suffix


def self_chat_prompts(
    engine: Any,
    tokenizer: Any,
    n: int,
    seed: int,
    max_new_tokens: int,
    *,
    chunk: int = 512,
    budget: Budget | None = None,
) -> list[list[int]]:
    """Return up to `n` prompts whose user turn the target writes after the template's user prefix, at temperature 1.

    Turns that are cut off at `max_new_tokens`, shorter than MIN_USER_TURN or duplicates are dropped; gives up after
    three tries per prompt.
    """
    prefix, suffix = (encode(tokenizer, part) for part in user_turn_frame(tokenizer))
    ends = {tokenizer.eos_token_id, suffix[0]} - {None}
    turns: dict[tuple[int, ...], None] = {}  # an ordered set
    jobs = [TurnJob(prefix, SamplingParams(temperature=1.0, seed=_seed(seed, i))) for i in range(3 * n)]
    with tqdm(total=n, desc="user turns", unit="turn") as bar:
        for _, out in run_jobs(engine, jobs, max_new_tokens, sorted(ends), chunk, budget or Budget()):
            for tokens, reason in zip(out.tokens, out.finish_reasons, strict=True):
                while tokens and tokens[-1] in ends:
                    tokens = tokens[:-1]
                if reason != "length" and len(tokens) >= MIN_USER_TURN:
                    turns[tuple(tokens)] = None
            bar.update(min(len(turns), n) - bar.n)
            if len(turns) >= n:
                break
    return [prefix + list(turn) + suffix for turn in list(turns)[:n]]


def answer_jobs(
    prompts: Sequence[list[int]], temperatures: Sequence[float], samples_per_prompt: int, seed: int
) -> list[TurnJob]:
    """Return requests for `samples_per_prompt` answers to each prompt, first sample of all prompts first.

    Temperatures rotate over prompts and samples, so the mix holds wherever generation stops; a prompt is answered
    greedily in the first turn of `temperatures` only.
    """
    jobs = []
    for s in range(samples_per_prompt):
        for k, prompt in enumerate(prompts):
            temperature = temperatures[(k + s) % len(temperatures)]
            if temperature == 0 and s >= len(temperatures):
                continue
            job_seed = _seed(seed, s * len(prompts) + k)
            jobs.append(TurnJob(list(prompt), SamplingParams(temperature=temperature, seed=job_seed)))
    return jobs


def answer(
    engine: Any,
    jobs: Sequence[TurnJob],
    max_new_tokens: int,
    *,
    chunk: int = 512,
    budget: Budget | None = None,
    keep: Callable[[Corpus], None] | None = None,
) -> Corpus:
    """Return the corpus of the target's answers to `jobs`. Stops cleanly when the budget is spent.

    keep: called after every chunk with the corpus so far, to save it.
    """
    pairs: list[tuple[list[int], list[int]]] = []
    with tqdm(total=len(jobs), desc="answers", unit="answer") as bar:
        for part, out in run_jobs(engine, jobs, max_new_tokens, [], chunk, budget or Budget()):
            said = zip(part, out.tokens, out.finish_reasons, strict=True)
            pairs += [(job.prompt, list(tokens)) for job, tokens, reason in said if tokens and reason != "error"]
            bar.update(len(part))
            if keep:
                keep(Corpus.of(pairs))
    return Corpus.of(pairs)


def run_jobs(
    engine: Any, jobs: Sequence[TurnJob], max_new_tokens: int, stop_token_ids: list[int], chunk: int, budget: Budget
) -> Iterator[tuple[Sequence[TurnJob], Any]]:
    """Yield (a chunk of `jobs`, the engine's output for it) until the budget is spent.

    engine: any object whose `generate` takes these arguments and returns `tokens` and `finish_reasons`.
    """
    start, common = 0, {"max_new_tokens": max_new_tokens, "ignore_eos": False, "stop_token_ids": stop_token_ids}
    while start < len(jobs) and (size := budget.affordable(chunk)):
        part = jobs[start : start + size]
        out = engine.generate([job.prompt for job in part], sampling=[job.sampling for job in part], **common)
        start += len(part)
        budget.num_requests += len(part)
        budget.num_tokens += sum(map(len, out.tokens))
        yield part, out


def _seed(seed: int, i: int) -> int:
    """Return a seed for request `i` of a run seeded `seed`."""
    return (seed * 1_000_003 + i) % 2**63
