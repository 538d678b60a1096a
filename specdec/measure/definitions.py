"""What the figures of results mean, and what other projects call them: the page and docs/definitions.md say this.

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
        "Pooled: tokens that all verify rounds of all requests emitted, over the number of these rounds. The bonus "
        "token (the target's own at the end of a round) is included, so tau is at least 1; plain decoding has 1. What "
        "EOS, a stop string or the length cuts off is not counted.",
        "Acceptance length (AL; EAGLE, SPEED-Bench), mean accepted tokens (MAT; Spec-Bench), accept length (SGLang), "
        "mean acceptance length (vLLM), τ. Some take the mean over requests or over domains (macro), which is another "
        "number; some leave the bonus token out, and are lower by 1.",
    ),
    Definition(
        "the first token",
        "The token that the prefill gives belongs to no round: tau and a_j do not count it. Tokens/s of acceptance "
        "rows do count it, and the prefill's time with it.",
        "Benches that divide all new tokens by all target forwards count it, which on short answers raises or lowers "
        "their figure.",
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
        "Over prompts: the ratio estimator, linearised. A prompt is the unit that is drawn, its rounds are not "
        "independent. Intervals of a_j without one of their own are Wilson's, over rounds, and therefore too narrow.",
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
        "Each is the single user turn of a chat, in the target's own chat template with the generation prompt. Of "
        "MT-bench the first turns unless a row says otherwise. A record that has a hash has the prompts' or the "
        "template's SHA-256: other prompts, templates or system messages give another tau.",
        "Check the template first where figures differ: a changed one lowers the acceptance of a trained head.",
    ),
    Definition(
        "thinking",
        "As the chat template does when it is not told: nothing is passed to it. Where thinking is on by default, the "
        "reasoning is part of the answer and of tau.",
        "`enable_thinking` in other benches; reasoning text is accepted at another rate than answers.",
    ),
    Definition(
        "temperature",
        "0 is greedy. Above 0, request i is sampled with seed request_seed(0, i), and chains draw their drafts from "
        "the draft's own law unless a row says greedy drafts; the law of the text is the target's either way.",
        "T; some benches draft greedily at every temperature, which lowers tau.",
    ),
    Definition(
        "warm-up",
        "Compiling, capture of graphs and a call before the clock starts are not timed; they are in the start-up rows. "
        "Acceptance counts every round, since it does not depend on speed.",
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
        "What no implementation on that device can be below: reading weights (and keys and values) once at the "
        "measured copy rate, or multiplying at the measured rate, whichever is more. Rows give it per call (TTFT) or "
        "per token (TPOT). Where ranks share the target (`tp`) it is one rank's: its part of the weights, K/V and "
        "states that are cut, all of the others (routers, the draft and its K/V), and no time for collectives.",
        "Roofline, speed of light (SOL).",
    ),
    Definition(
        "break-even",
        "The tau from which speculation pays: a round's milliseconds over a step of plain decoding at the same batch, "
        "prompts and mode; in charts, the line of plain decoding.",
        "Speed-up 1×. Ours is against this engine's own plain decoding, graphs and all, not against eager `generate`.",
    ),
    Definition(
        "eager",
        "Forwards that ran without a captured graph, each with a reason in `report()`.",
        "CUDA graph misses.",
    ),
    Definition(
        "McNemar's p, paired bootstrap",
        "Modes answer the same questions. McNemar's test asks whether those that only one mode answers correctly fall "
        "to both alike; the bootstrap draws questions anew for the interval of the difference of likelihoods.",
        "Unpaired accuracies ± standard error see much less.",
    ),
    Definition(
        "near tie",
        "In 16 bits: texts first part where the target's own two logits are no further apart than rounding moves them: "
        "the most that the target's eager and sdpa attentions change the gap between its two best tokens on these "
        "texts (`near_tie` in rows, at least 0.25, two steps of bfloat16 at that size). Older files: 0.25. In fp32 "
        "nothing is explained by rounding.",
        "“fp32 rule”, divergence by batch invariance.",
    ),
)


def markdown() -> str:
    """Return docs/definitions.md."""
    lines = ["# Definitions", ""]
    lines += [
        "What the figures on result pages and in [results.md](results.md) mean, and what other benches call them.",
        "",
    ]
    lines += ["| term | here | elsewhere |", "|---|---|---|"]
    lines += [f"| {term} | {meaning} | {elsewhere} |" for term, meaning, elsewhere in DEFINITIONS]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(markdown(), end="")
