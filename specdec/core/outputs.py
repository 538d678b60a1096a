"""Results for users: outputs of requests, totals of a call, and the engine's report."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from specdec.core.metrics import AcceptanceStats


class TokenLogprob(NamedTuple):
    """Natural log-probability of an emitted token; `top`: (id, log-probability) of the most likely tokens, descending.

    Under the target's own softmax, before temperature, filters, penalties and bans, over the tokens a grammar allows.
    """

    logprob: float
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True)
class RequestOutput:
    """Result of one request: tokens, text, finish reason, acceptance and times.

    tokens: ids emitted, EOS or stop id included; text: without special tokens, cut before a stop string.
    finish_reason: "eos", "stop_id", "stop_string", "length", "deadline", "dead_end" (its grammar allows no further
    token), or "error" (the target's logits were not finite).
    acceptance: rounds and acceptance of this request; first_token_s, time_s: seconds from queueing to the first token
    and to the end.
    round_lens: tokens that each verify round emitted, in order; the first of `tokens` comes from the prefill instead.
    logprobs: one for each of `tokens`; None unless the engine was attached with `logprobs`.
    num_cached: prompt tokens whose K/V came from the prefix cache.
    digests: for each of `tokens`, a checksum of the bits of the logits it was chosen from; empty unless the engine was
    attached with `digests`.
    """

    prompt_ids: list[int]
    tokens: list[int]
    text: str
    finish_reason: str
    acceptance: AcceptanceStats
    first_token_s: float
    time_s: float
    round_lens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] | None = None
    num_cached: int = 0
    digests: list[int] = field(default_factory=list)

    @property
    def is_drafted(self) -> list[bool]:
        """For each of `tokens`, True if it was drafted and accepted, False if the target chose it.

        The last token of a round is the target's own. Where the request ended within a round, the last token kept may
        have been drafted; it still counts as the target's.
        """
        marks = [i < n - 1 for n in self.round_lens for i in range(n)]
        return [False] * (len(self.tokens) - len(marks)) + marks


@dataclass(frozen=True)
class GenerationStats:
    """Totals of one call of `generate`.

    acceptance: over all requests; time_s: seconds of the whole call; num_tokens: tokens emitted, first tokens (from
    prefills) included; num_cached_tokens: prompt tokens whose K/V came from the prefix cache.
    """

    num_requests: int
    num_prompt_tokens: int
    num_tokens: int
    acceptance: AcceptanceStats
    time_s: float
    num_cached_tokens: int = 0

    @property
    def tau(self) -> float:
        """Acceptance length (`specdec.core.metrics.acceptance_length`); 1.0 for plain decoding."""
        return self.acceptance.tau

    @property
    def acceptance_at(self) -> list[float]:
        """Per-position acceptance a_j: share of rounds in which draft position j was accepted."""
        return self.acceptance.acceptance_at

    @property
    def num_rounds(self) -> int:
        """Verify rounds, summed over requests."""
        return self.acceptance.num_rounds

    @property
    def tokens_per_s(self) -> float:
        """Emitted tokens per second of wall time, prefill included."""
        return self.num_tokens / self.time_s if self.time_s else 0.0


@dataclass(frozen=True)
class GenerationOutput:
    """Result of `generate`: a RequestOutput for each prompt, in their order, and totals."""

    requests: list[RequestOutput]
    stats: GenerationStats

    @property
    def tokens(self) -> list[list[int]]:
        """Emitted ids of every request."""
        return [r.tokens for r in self.requests]

    @property
    def texts(self) -> list[str]:
        """Text of every request; empty strings without a tokenizer."""
        return [r.text for r in self.requests]

    @property
    def finish_reasons(self) -> list[str]:
        """Finish reason of every request."""
        return [r.finish_reason for r in self.requests]


@dataclass(frozen=True)
class GraphCost:
    """Capture cost of one graph, in seconds and device bytes. The graph of `runner` holds `size` requests or tokens
    (`unit`); see `graphs.ShapeKey`."""

    runner: str
    size: int
    unit: str
    variant: str
    seconds: float
    num_bytes: int


@dataclass(frozen=True)
class Report:
    """Setup and counters of an engine; str() formats it as text.

    capture: kind of the rounds' graphs ("full", "recorded" or "eager"); prefill_graph: kind of the prefills' graphs
    ("piecewise", "breakable" or "off", with "whole, " in front if small prefills are one graph); compile_seconds: spent
    on tracing and compiling, 0 without; compiled: whether the target's layers are compiled, and if not, why;
    bits: "equal" if the target's logits had the same bits in every batch, chain and tree compared at attach; else what
    differs, or why nothing was compared;
    latents: number of attention layers that store latents as K/V (MLA);
    kv_bytes: device bytes of the KV pool; num_pages, num_free_pages: its pages of `page_size` slots;
    generation: settings of the model's own generation_config that `generate` applies;
    experts: of an MoE target, its experts, weight bytes, and how many distinct experts and bytes a verify of one
    request reads, relative to a decode step (verify_over_step), if routing were random; empty without experts;
    prefix_cache: tokens whose K/V is cached (kept), prompt tokens of all requests (asked) and those found in the cache
    (found); empty if it is off;
    preemption: times that a request gave up its pages to others (preemptions), and the tokens prefilled again for it
    (recomputed_tokens);
    grammar: of rounds with constrained requests: their number (rounds), mean ms that the host computed masks (mask_ms)
    and waited for drafts and choices (wait_ms), mean ms that the device waited for masks after verification (late_ms),
    tokens drafted because a grammar allows no other (forced_tokens); rounds without masks (trusted_rounds), and how
    often such a round emitted a forbidden token and was rolled back (undone); empty if there were none;
    policy: with num_steps="auto", for each tier (a shape of rounds): its rounds, their mean ms and tokens per request,
    expected tokens of the next one (expected_tokens), ms by batch size in a short context (cost_ms); and how often the
    policy switched tiers (switches, last_switches in words), tried another one (probes), and had the draft catch up
    with tokens of plain rounds (catch_ups). Empty with a fixed num_steps;
    graphs: cost of each graph; runners: name -> {replays, eager, rejects by reason};
    paths: forward mode -> {replays, eager, attention}; forwards in a replayed graph count as replays; attention names
    the kernels.
    """

    model: str
    draft: dict[str, Any]
    backend: str
    backend_reason: str
    config: dict[str, Any]
    generation: dict[str, Any]
    kv_bytes: int
    latents: int
    num_free_pages: int
    num_pages: int
    prefix_cache: dict[str, int]
    preemption: dict[str, int]
    grammar: dict[str, Any]
    policy: dict[str, Any]
    capture: str
    prefill_graph: str
    compile_seconds: float
    compiled: str
    bits: str
    experts: dict[str, Any]
    graphs: list[GraphCost]
    runners: dict[str, dict[str, Any]]
    paths: dict[str, dict[str, Any]]
    acceptance: AcceptanceStats

    @property
    def graph_bytes(self) -> int:
        """Device bytes of all graphs."""
        return sum(g.num_bytes for g in self.graphs)

    @property
    def graph_bytes_of(self) -> dict[str, int]:
        """Device bytes of the graphs of each runner, by name."""
        return {name: sum(g.num_bytes for g in self.graphs if g.runner == name) for name in self.runners}

    @property
    def graph_seconds(self) -> float:
        """Seconds that captures took, warm-ups not counted."""
        return sum(g.seconds for g in self.graphs)

    def __str__(self) -> str:
        lines = [
            f"model      {self.model}",
            "draft      " + ", ".join(f"{k}={v}" for k, v in self.draft.items()),
            f"backend    {self.backend} ({self.backend_reason})",
            "config     " + ", ".join(f"{k}={v}" for k, v in self.config.items()),
            "generation "
            + (", ".join(f"{k}={v}" for k, v in self.generation.items()) or "no defaults")
            + " (set by the model; SamplingParams override all but EOS)",
            f"KV pool    {self.kv_bytes / 2**20:.1f} MiB, {self.num_free_pages} of {self.num_pages} pages free"
            + f", {self.latents} layers of latents" * bool(self.latents),
            f"tau        {self.acceptance.tau:.3f} over {self.acceptance.num_rounds} rounds, a_j = "
            + (" ".join(f"{a:.2f}" for a in self.acceptance.acceptance_at) or "-"),
            f"graphs     {self.capture}, prefill {self.prefill_graph}: {len(self.graphs)} captured in "
            f"{self.graph_seconds:.1f} s, {self.graph_bytes / 2**20:.0f} MiB",
            f"layers     {self.compiled}",
            f"bits       {self.bits}",
        ]
        if self.prefix_cache:
            text = "{kept} tokens cached, hits for {found} of {asked} prompt tokens"
            lines.append(f"prefixes   {text.format(**self.prefix_cache)}")
        if self.preemption["preemptions"]:
            text = "{preemptions} preemptions, {recomputed_tokens} tokens prefilled again"
            lines.append(f"preempted  {text.format(**self.preemption)}")
        if self.grammar:
            text = "{rounds} rounds: mask {mask_ms:.2f} ms, host wait {wait_ms:.2f} ms, device wait {late_ms:.2f} ms; "
            text += "{forced_tokens} tokens forced; {trusted_rounds} rounds without masks, {undone} undone"
            lines.append(f"grammar    {text.format(**self.grammar)}")
        if self.policy:
            text = "{switches} switches, {probes} probes, {catch_ups} catch-ups"
            lines.append(f"policy     {text.format(**self.policy)}")
            lines += [f"           {name}: {_told(tier)}" for name, tier in self.policy["tiers"].items()]
            lines += [f"           {switch}" for switch in self.policy["last_switches"]]
        if self.experts:
            lines.append("experts    " + ", ".join(f"{k}={v}" for k, v in self.experts.items()))
        for runner in self.runners:
            own = [g for g in self.graphs if g.runner == runner]
            for variant in dict.fromkeys(g.variant for g in own):
                alike = [g for g in own if g.variant == variant]
                sizes = " ".join(str(g.size) for g in alike)
                cost = f"{sum(g.seconds for g in alike):.2f} s, {sum(g.num_bytes for g in alike) / 2**20:.0f} MiB"
                what = f"{runner} ({variant})" if variant else runner
                lines.append(f"           {what} of {sizes} {alike[0].unit}: {cost}")
        lines.append("runner           replays    eager  why not replayed")
        for name, c in self.runners.items():
            rejects = ", ".join(f"{reason}: {n}" for reason, n in c["rejects"].items()) or "-"
            lines.append(f"{name:15s} {c['replays']:8d} {c['eager']:8d}  {rejects}")
        lines.append("forward mode     replays    eager  (forwards inside a replayed graph count as replays)")
        for mode, path in self.paths.items():
            lines.append(f"{mode:15s} {path['replays']:8d} {path['eager']:8d}  {path['attention']}")
        return "\n".join(lines)


def _told(tier: Mapping[str, Any]) -> str:
    """Return what the report says of a tier of rounds."""
    costs = ", ".join(f"{batch}: {ms:.3g}" for batch, ms in tier["cost_ms"].items())
    seen = "" if tier["ms"] is None else f" of {tier['ms']:.3g} ms"
    if tier["tokens"] is not None:
        seen += f", {tier['tokens']:.2f} tokens each"
    expected = f"{tier['expected_tokens']:.2f} tokens expected"
    return f"{tier['rounds']} rounds{seen}; {expected}, ms by batch {costs}"
