"""From what a caller hands in to checked requests. Nothing has run yet when a mistake is found here."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from transformers import PreTrainedModel

from specdec.engine import Core
from specdec.errors import CapacityError
from specdec.sampling import SamplingParams
from specdec.scheduler import Request
from specdec.state import MAX_STOP_IDS
from specdec.text import Detokenizer, prompts_to_ids

DEFAULT_NEW_TOKENS = 256


def make_requests(
    core: Core,
    tokenizer: Any,
    prompts: Any,
    *,
    attention_mask: Any = None,
    max_new_tokens: int | Sequence[int] = DEFAULT_NEW_TOKENS,
    sampling: SamplingParams | Sequence[SamplingParams] | None = None,
    stop: str | Sequence[str] = (),
    stop_token_ids: Sequence[int] = (),
    ignore_eos: bool = False,
) -> list[Request]:
    """Requests for `prompts`, one each; the options are those of `Engine.generate`, whose errors these are."""
    batch = prompts_to_ids(prompts, tokenizer, attention_mask)
    limits = _per_prompt("max_new_tokens", max_new_tokens, len(batch))
    laws = _sampling_per_prompt(sampling, len(batch))
    strings = [stop] if isinstance(stop, str) else list(stop)
    if strings and tokenizer is None:
        raise ValueError(f"stop={stop!r} needs a tokenizer; attach(..., tokenizer=...)")
    if not all(strings):
        raise ValueError(f"stop={stop!r}: stop strings must not be empty")
    eos = frozenset() if ignore_eos else _eos_ids(core.target.model)
    stop_ids = tuple(sorted({*eos, *stop_token_ids}))
    if len(stop_ids) > MAX_STOP_IDS:
        raise ValueError(f"{len(stop_ids)} stop ids (EOS included): at most {MAX_STOP_IDS}")
    for i, (ids, limit) in enumerate(zip(batch, limits, strict=True)):
        _check(core, i, ids, limit)
    return [
        Request(ids, limit, law, stop_ids, eos, Detokenizer(tokenizer, strings))
        for ids, limit, law in zip(batch, limits, laws, strict=True)
    ]


def _check(core: Core, index: int, ids: list[int], max_new_tokens: int) -> None:
    if not ids:
        raise ValueError(f"prompt {index} is empty; a target needs at least one token to continue")
    vocab = core.target.spec.vocab_size
    if not all(0 <= t < vocab for t in ids):
        bad = next(t for t in ids if not 0 <= t < vocab)
        raise ValueError(f"prompt {index} holds token {bad}; the target's vocabulary has {vocab} tokens")
    if not isinstance(max_new_tokens, int) or isinstance(max_new_tokens, bool) or max_new_tokens < 1:
        raise ValueError(f"max_new_tokens={max_new_tokens!r} for prompt {index}: expected an integer of at least 1")
    total = len(ids) + max_new_tokens
    if total > core.config.max_seq_len:
        raise CapacityError(
            f"prompt {index} has {len(ids)} tokens and may emit {max_new_tokens}: {total} exceed "
            f"max_seq_len={core.config.max_seq_len}; shorten it, lower max_new_tokens, or attach with more"
        )
    core.slot_tables.check_fits(core.scheduler.slots_needed(len(ids), max_new_tokens))


def _per_prompt(name: str, value: Any, count: int) -> list[Any]:
    """One value for all prompts, or one each."""
    if not isinstance(value, Sequence):
        return [value] * count
    if len(value) != count:
        raise ValueError(f"{name} has {len(value)} values for {count} prompts")
    return list(value)


def _sampling_per_prompt(
    sampling: SamplingParams | Sequence[SamplingParams] | None, count: int
) -> list[SamplingParams]:
    if sampling is None:
        return [SamplingParams(seed=i) for i in range(count)]  # greedy; only synthetic acceptance draws
    if isinstance(sampling, SamplingParams):
        return [replace(sampling, seed=(sampling.seed + i) % 2**63) for i in range(count)]
    laws = _per_prompt("sampling", sampling, count)
    wrong = next((s for s in laws if not isinstance(s, SamplingParams)), None)
    if wrong is not None:
        raise ValueError(f"sampling={wrong!r}: expected SamplingParams")
    return laws


def _eos_ids(model: PreTrainedModel) -> frozenset[int]:
    """EOS ids as `generate` takes them: from the generation config."""
    ids = model.generation_config.eos_token_id
    if ids is None:
        return frozenset()
    return frozenset(ids if isinstance(ids, Iterable) else [ids])
