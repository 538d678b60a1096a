"""Defines the figures of results, with other projects' names for them, for result pages and docs/definitions.md.

`python -m specdec.measure.definitions` prints docs/definitions.md; a test compares the two.
"""

from typing import NamedTuple


class Definition(NamedTuple):
    """A term, what it means here, and what other benches call it or how theirs differs."""

    term: str
    meaning: str
    elsewhere: str


DEFINITIONS = (
    Definition(
        "tau",
        "Tokens emitted by all verify rounds of all requests, over the number of rounds. The bonus token (the target's "
        "own at the end of a round) counts, so plain decoding has tau 1. Tokens cut off by EOS, a stop string or the "
        "length do not count.",
        "Acceptance length (AL; EAGLE, SPEED-Bench), mean accepted tokens (MAT; Spec-Bench), accept length (SGLang), "
        "mean acceptance length (vLLM), τ. Some average over requests or domains (macro); some leave the bonus token "
        "out, and are lower by 1.",
    ),
    Definition(
        "the first token",
        "The prefill's token belongs to no round: tau and a_j do not count it. Tokens/s of acceptance rows count it "
        "and the prefill's time.",
        "Benches that divide all new tokens by all target forwards count it, which shifts tau on short answers.",
    ),
    Definition(
        "a_j, unconditional",
        "The share of all rounds in which draft position j was accepted and kept; it never rises with j. For a chain "
        "tau = 1 + a_1 + a_2 + …. In a tree, j is the depth on the accepted path.",
        "Per-position acceptance rate (vLLM's metrics, speculators).",
    ),
    Definition(
        "a_j, conditional",
        "a_j / a_(j−1): the chance that position j is accepted where the one before was.",
        "n-α (EAGLE), conditional acceptance rate (SPEED-Bench, NeMo-Skills). Acceptance rate (AR) alone is often "
        "accepted over drafted tokens: the mean of a_j over the drafted positions.",
    ),
    Definition(
        "95% interval of tau",
        "Over prompts: the ratio estimator, linearised, since rounds of a prompt are not independent. Other intervals "
        "of a_j are Wilson's, over rounds, and therefore too narrow.",
        "Most benches give none; some give the standard deviation of several runs.",
    ),
    Definition(
        "tau by position and by context",
        "tau of the rounds whose first token lies in that range of the answer, or of prompt plus answer; ends are "
        "half-open.",
        "SPEED-Bench gives domains and input lengths; others one figure.",
    ),
    Definition(
        "prompts",
        "One user turn of a chat, in the target's own chat template with the generation prompt; of MT-bench the first "
        "turns unless a row says otherwise. Hashes are SHA-256 of prompts and template: others give another tau.",
        "If figures differ, compare templates first: a changed one lowers the acceptance of a trained head.",
    ),
    Definition(
        "thinking",
        "The chat template's default. Where thinking is on by default, the reasoning is part of the answer and of tau.",
        "`enable_thinking` in other benches; reasoning text is accepted at another rate than answers.",
    ),
    Definition(
        "temperature",
        "0 is greedy. Above 0, request i has seed request_seed(0, i), and chains sample their drafts unless a row says "
        "greedy drafts; the text follows the target's distribution either way.",
        "T; some benches draft greedily at every temperature, which lowers tau.",
    ),
    Definition(
        "warm-up",
        "Compilation, graph capture and a first call are not timed; start-up rows have them. Acceptance counts every "
        "round.",
        "Servers' benches often time the first requests, too.",
    ),
    Definition(
        "TTFT",
        "Time to the first token: wall clock of a call for one new token, all its prompts together; where a row says "
        "`tokenizer`, text is decoded, too. With clients of the server: from sending a request to its first text.",
        "TTFT, prefill latency, first-token latency.",
    ),
    Definition(
        "TPOT",
        "Time per output token of a request: (time of a call for N + 1 tokens − time for one) / N. Tokens/s of all "
        "requests is batch / TPOT.",
        "TPOT (vLLM, SGLang); mean ITL has the same value without speculation.",
    ),
    Definition(
        "ITL and a round",
        "Inter-token latency, as clients see it, is the time between two pieces of text; with speculation a piece is a "
        "round, several tokens. A round's milliseconds are TPOT × tau, and its ITL.",
        "ITL. Do not compare ITL with speculation to TPOT.",
    ),
    Definition(
        "floor",
        "A lower bound for any implementation on that device: reading weights, keys and values once at the measured "
        "copy rate, or multiplying at the measured rate, whichever takes longer. Per call (TTFT) or per token (TPOT). "
        "With tensor parallelism (`tp`) it is one rank's: its shards, everything unsharded (routers, the draft and its "
        "K/V), and no time for collectives.",
        "Roofline, speed of light (SOL).",
    ),
    Definition(
        "break-even",
        "The tau from which speculation pays: a round's milliseconds over those of a plain step at the same batch, "
        "prompts and mode; in charts, the line of plain decoding.",
        "Speed-up 1×, here against this engine's own plain decoding with graphs, not against eager `generate`.",
    ),
    Definition(
        "eager",
        "Forwards that ran without a captured graph, each with a reason in `report()`.",
        "CUDA graph misses.",
    ),
    Definition(
        "McNemar's p, paired bootstrap",
        "Modes answer the same questions. McNemar's test compares how many only one mode answers correctly; the "
        "bootstrap resamples questions for the interval of the difference of likelihoods.",
        "Unpaired accuracies ± standard error are far less sensitive.",
    ),
    Definition(
        "near tie",
        "In 16 bits, texts may differ first where the target's two best logits are closer than rounding moves them: "
        "the largest change of that gap between the target's eager and sdpa attention on these texts (`near_tie` in "
        "rows, at least 0.25, two bf16 steps at that size). Older files: 0.25. In fp32 rounding explains nothing.",
        "“fp32 rule”, divergence by batch invariance.",
    ),
)


def markdown() -> str:
    """Return docs/definitions.md."""
    lines = ["# Definitions", ""]
    lines += [
        "Figures on result pages and in [results.md](results.md), and what other benchmarks call them.",
        "",
    ]
    lines += ["| term | here | elsewhere |", "|---|---|---|"]
    lines += [f"| {term} | {meaning} | {elsewhere} |" for term, meaning, elsewhere in DEFINITIONS]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(markdown(), end="")
