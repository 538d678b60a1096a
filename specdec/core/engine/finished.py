"""Results for users, made of finished requests."""

from collections.abc import Sequence

from specdec.core.engine.request import Request
from specdec.core.metrics import AcceptanceStats
from specdec.core.outputs import GenerationOutput, GenerationStats, RequestOutput


def output_of(requests: Sequence[Request], time_s: float) -> GenerationOutput:
    """Return outputs in the order of the prompts, and totals."""
    outputs = []
    for r in requests:
        assert r.finish_reason is not None and r.time_s is not None
        first = r.first_token_s if r.first_token_s is not None else r.time_s
        known = (r.prompt_ids, r.tokens, r.decode(), r.finish_reason, r.acceptance, first, r.time_s, r.round_lens)
        outputs.append(RequestOutput(*known, logprobs=r.logprobs, num_cached=r.num_cached, digests=r.digests))
    stats = GenerationStats(
        num_requests=len(outputs),
        num_prompt_tokens=sum(len(r.prompt_ids) for r in outputs),
        num_cached_tokens=sum(r.num_cached for r in outputs),
        num_tokens=sum(len(r.tokens) for r in outputs),
        acceptance=AcceptanceStats().merge([r.acceptance for r in outputs]),
        time_s=time_s,
    )
    return GenerationOutput(outputs, stats)
