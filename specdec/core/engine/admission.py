"""Admission: turns a caller's arguments into checked requests. Mistakes are found here, before anything runs."""

import warnings
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, cast

import numpy as np
import torch

from specdec.core.engine.core import Core
from specdec.core.engine.generation import HONOURED, LENGTHS, Settings
from specdec.core.engine.prompts import embed_prompts, read_prompts
from specdec.core.engine.request import Request
from specdec.core.errors import CapacityError
from specdec.core.functional.processors import MAX_BAD_WORDS, MAX_ENTRIES, TokenRules
from specdec.core.grammar.grammar import Grammar
from specdec.core.grammar.matcher import CompiledGrammar, Constraint
from specdec.core.ranges import FLAG, TOKEN_IDS, is_whole, optional, real, shown, whole
from specdec.core.round.state import MAX_STOP_IDS
from specdec.core.sampling_params import SamplingParams
from specdec.core.text.detokenizer import Detokenizer
from specdec.core.text.inputs import check_text

DEFAULT_NEW_TOKENS = 256
PRIORITY = whole(-1000, 1000)
DEADLINE = optional(real(0, 1e9), " for none")  # seconds


def make_requests(
    core: Core,
    tokenizer: Any,
    processor: Any,
    prompts: Any,
    /,
    *,
    input_ids: Any = None,
    attention_mask: Any = None,
    max_new_tokens: int | Sequence[int] | None = None,
    sampling: SamplingParams | Sequence[SamplingParams] | None = None,
    generation_config: Any = None,
    stop: str | Sequence[str] | None = None,
    stop_token_ids: int | Sequence[int] | None = None,
    ignore_eos: bool = False,
    priority: int = 0,
    deadline: float | None = None,
    adapter: str | Sequence[str | None] | None = None,
    grammar: Any = None,
    skip_special_tokens: bool = True,
    **settings: Any,
) -> list[Request]:
    """Return one request per prompt, not queued yet; the options are those of `Engine.generate`."""
    if input_ids is not None:
        if prompts is not None:
            raise ValueError("input_ids and prompts are both given; give one of the two")
        prompts = input_ids
    if sampling is not None:
        _refuse_two_laws(settings)
    priority, deadline = PRIORITY.check("priority", priority), DEADLINE.check("deadline", deadline)
    names = core.target.images.names
    given = {name: settings.pop(name) for name in names & settings.keys()}
    merged = Settings.merge(core.target.model.generation_config, generation_config, settings)
    batch, images = read_prompts(names, tokenizer, processor, prompts, attention_mask, given)
    limits = _limits(core, merged, max_new_tokens, batch)
    eos = frozenset() if FLAG.check("ignore_eos", ignore_eos) else merged.eos_ids
    if "eos_token_id" not in merged.given:  # a config's default, such as GPT-2's 50256, may lie past the vocabulary
        eos = frozenset(token for token in eos if token < core.target.spec.vocab_size)
    if stop is not None and "stop_strings" in merged.given and merged.get("stop_strings"):
        raise ValueError(f"stop={shown(stop)} and stop_strings are both given; give one of the two")
    skips = FLAG.check("skip_special_tokens", skip_special_tokens)
    strings, special = _stop_strings(stop if stop is not None else merged.get("stop_strings"), tokenizer, skips)
    stop_ids = _stop_ids(core, stop_token_ids, {*eos, *special})
    laws = _laws(sampling, merged, batch)
    if core.config.synthetic_acceptance is not None:  # it draws random numbers even for greedy requests
        laws = [law if law.seed is not None else law.with_seed(i) for i, law in enumerate(laws)]
    arrays = _checked_prompts(core, batch, limits)
    may_be_long = sampling is None and not {"min_new_tokens", "min_length"} & merged.given  # the model's own, then
    for i, (law, limit) in enumerate(zip(laws, limits, strict=True)):
        _check_rules(core, law, eos)
        if law.min_new_tokens > limit and not may_be_long:
            raise ValueError(
                f"min_new_tokens={law.min_new_tokens} of prompt {i} is more than max_new_tokens={limit}: lower it, or "
                "raise max_new_tokens"
            )
    before = batch if stop is None else [()] * len(batch)  # in which stop_strings may begin, and no `stop`
    texts = [Detokenizer(tokenizer, strings, prompt, skips) for prompt in before]
    constraints = _constraints(core, grammar, eos, laws)
    numbers = [adapter_number(core, name) for name in _per_prompt("adapter", adapter, len(batch))]
    requests = [
        Request(prompt, array, limit, law, stop_ids, eos, text, special, priority, number, deadline=deadline)
        for prompt, array, limit, law, text, number in zip(batch, arrays, limits, laws, texts, numbers, strict=True)
    ]
    for request, constraint in zip(requests, constraints, strict=True):
        request.constraint, request.logprobs = constraint, None if core.config.logprobs is None else []
    for places, inputs in images:
        embed_prompts(core, [requests[place] for place in places], inputs)
    return requests


def _stop_ids(core: Core, own: int | Sequence[int] | None, others: set[int]) -> tuple[int, ...]:
    """Return the ids that end a request, sorted: its own stop_token_ids, and `others`."""
    ids = TOKEN_IDS.check("stop_token_ids", () if own is None else [own] if is_whole(own) else own)
    stop_ids = tuple(sorted({*ids, *others}))
    if len(stop_ids) > MAX_STOP_IDS:
        raise ValueError(f"{len(stop_ids)} stop ids (EOS included): at most {MAX_STOP_IDS}; pass fewer stop_token_ids")
    check_ids(core, "stop_token_ids: stop ids hold", ids)
    check_ids(core, "stop ids hold", others)
    return stop_ids


def compile_grammar(core: Core, grammar: Any) -> CompiledGrammar:
    """Compile a Grammar or a mapping of its fields; return a compiled grammar unchanged. ValueError for any other."""
    if core.grammars is None:
        raise ValueError(f"grammar={shown(grammar)}: the engine has no grammar library; attach(..., grammar='auto')")
    if not isinstance(grammar, Grammar | Mapping) and hasattr(grammar, "matcher"):
        return grammar
    return core.grammars.compile(Grammar.of(grammar))


def adapter_number(core: Core, name: Any) -> int:
    """Return the number of an adapter, 0 for None; ValueError for a name that the engine does not know."""
    numbers = core.target.adapters
    if name is not None and (not isinstance(name, str) or name not in numbers):
        known = f"one of {', '.join(map(repr, numbers))}" if numbers else "none: attach(..., adapters=[...]) gives some"
        raise ValueError(f"adapter={name!r}: expected {known}")
    return 0 if name is None else numbers[name]


def _constraints(
    core: Core, grammar: Any, eos: frozenset[int], laws: Sequence[SamplingParams]
) -> list[Constraint | None]:
    """Return the constraint of every prompt, from one grammar for all or one, or None, for each."""
    if grammar is None:
        return [None] * len(laws)
    given = _per_prompt("grammar", grammar, len(laws))
    if not eos and any(g is not None for g in given):
        raise ValueError(
            "grammar without EOS (ignore_eos=True, or eos_token_id=None): a complete text must end with EOS"
        )
    return [None if g is None else _constraint(core, g, eos, law) for g, law in zip(given, laws, strict=True)]


def _constraint(core: Core, grammar: Any, eos: frozenset[int], law: SamplingParams) -> Constraint:
    compiled = compile_grammar(core, grammar)
    feed = core.launcher.feed
    assert core.grammars is not None and feed is not None
    return Constraint(compiled.matcher(), eos, core.grammars.eos_ids, feed.num_words, law.min_new_tokens)


def _refuse_two_laws(settings: dict[str, Any]) -> None:
    """Raise ValueError for settings beside SamplingParams, which are complete: the settings would be ignored."""
    both = sorted((HONOURED - {*LENGTHS, "eos_token_id", "stop_strings"}) & settings.keys())
    if both:
        raise ValueError(
            f"sampling=SamplingParams(...) together with {', '.join(both)}: give them in one place; "
            "SamplingParams has these fields, too"
        )


def _limits(core: Core, settings: Settings, given: Any, batch: list[list[int]]) -> list[int]:
    """Return max_new_tokens of every prompt: the caller's, else the model's or 256, up to what the engine holds."""
    if given is not None:
        return _per_prompt("max_new_tokens", given, len(batch))
    limits = [settings.max_new_tokens(len(prompt)) for prompt in batch]
    if any(name in settings.given and settings.get(name) is not None for name in LENGTHS):
        return cast(list[int], limits)
    longest = min(core.config.max_seq_len, core.scheduler.longest_request)
    room = [longest - len(prompt) for prompt in batch]
    if any(limit is not None and limit > most >= 1 for limit, most in zip(limits, room, strict=True)):
        setting = "max_seq_len" if longest == core.config.max_seq_len else "num_slots"
        warnings.warn(
            f"the model's generation_config allows more tokens than {setting}={getattr(core.config, setting)} holds: "
            f"texts end there. Attach with a larger {setting}, or give max_new_tokens",
            stacklevel=5,
        )
    # One token at least: a prompt that leaves no room for it is refused, as everything else that does not fit.
    return [
        min(DEFAULT_NEW_TOKENS if limit is None else limit, max(most, 1))
        for limit, most in zip(limits, room, strict=True)
    ]


def _stop_strings(stop: Any, tokenizer: Any, skips_special: bool) -> tuple[list[str], tuple[int, ...]]:
    """Return the stop strings that text can contain, and the ids of those that are special tokens, which are in text
    only without `skips_special`."""
    strings = [] if stop is None else [stop] if isinstance(stop, str) else stop
    strings = [*strings] if isinstance(strings, Iterable) else [strings]
    if not all(isinstance(s, str) for s in strings):
        raise ValueError(f"stop={stop!r}: expected a string or a list of strings")
    strings = [check_text("stop", s) for s in strings]
    if strings and tokenizer is None:
        raise ValueError(f"stop={stop!r} needs a tokenizer; attach(..., tokenizer=...)")
    if not all(strings):
        raise ValueError(f"stop={stop!r}: stop strings must not be empty")
    special = _special_tokens(tokenizer) if strings else {}
    mixed = [(s, t) for s in strings for t in special if skips_special and t in s and t != s]
    if mixed:
        raise ValueError(
            f"stop={mixed[0][0]!r} holds the special token {mixed[0][1]!r}, which never becomes text: "
            "stop at the token alone, or leave it out of the string"
        )
    in_text = [s for s in strings if s not in special or not skips_special]
    return in_text, tuple(special[s] for s in strings if s in special)


def _special_tokens(tokenizer: Any) -> dict[str, int]:
    """Return the id of every special token (decoding leaves them out) by its text."""
    added = getattr(tokenizer, "added_tokens_decoder", None) or {}
    found = {str(token): index for index, token in added.items() if getattr(token, "special", False)}
    names, ids = getattr(tokenizer, "all_special_tokens", ()), getattr(tokenizer, "all_special_ids", ())
    return {**found, **dict(zip(map(str, names), ids, strict=False))}


def _checked_prompts(core: Core, batch: list[list[int]], limits: list[Any]) -> list[np.ndarray]:
    """Return the prompts as `Request.prompt`; ValueError (CapacityError) names the first that cannot be served."""
    for i, (ids, limit) in enumerate(zip(batch, limits, strict=True)):
        if not ids:
            raise ValueError(f"prompt {i} is empty; a target needs at least one token to continue")
        check_ids(core, f"prompt {i} holds token", ids)
        if not is_whole(limit) or limit < 1:
            raise ValueError(f"max_new_tokens={limit!r} for prompt {i}: expected an integer of at least 1")
        total = len(ids) + limit
        if total > core.config.max_seq_len:
            raise CapacityError(
                f"prompt {i} has {len(ids)} tokens and may emit {limit}: {total} exceed "
                f"max_seq_len={core.config.max_seq_len}; shorten it, lower max_new_tokens, or raise max_seq_len"
            )
        core.slot_tables.check_fits(core.scheduler.slots_needed(total, 0))
    return [np.array([*ids, 0], dtype=np.int64) for ids in batch]


def _per_prompt(name: str, value: Any, count: int) -> list[Any]:
    """Return one value per prompt, from one value for all or one for each."""
    if not isinstance(value, Sequence) or isinstance(value, str):
        return [value] * count
    if len(value) != count:
        raise ValueError(f"{name} has {len(value)} values for {count} prompts: expected one value, or one per prompt")
    return list(value)


def _laws(
    sampling: SamplingParams | Sequence[SamplingParams] | None, settings: Settings, batch: list[list[int]]
) -> list[SamplingParams]:
    """Return the seeded law of every prompt; one law for all gives `request_seed`s; a missing one is drawn."""
    if isinstance(sampling, SamplingParams):
        laws = [sampling] * len(batch)
    elif sampling is None:
        lens = [len(prompt) if settings.counts_prompts else 0 for prompt in batch]
        by_length = {n: settings.params(n) for n in set(lens)}
        laws = [by_length[n] for n in lens]
    else:
        laws = _per_prompt("sampling", sampling, len(batch))
        wrong = next((s for s in laws if not isinstance(s, SamplingParams)), None)
        if wrong is not None:
            raise ValueError(f"sampling={wrong!r}: expected SamplingParams, one for all prompts or one per prompt")
        return [_seeded(law, 0) for law in laws]
    if all(law.is_greedy and law.seed is None for law in laws):
        return laws
    return [_seeded(law, i) for i, law in enumerate(laws)]


def _seeded(law: SamplingParams, index: int) -> SamplingParams:
    """Return `law` with a seed of its own: `request_seed`, or one drawn from torch's generator."""
    if law.seed is not None or law.is_greedy:
        return law.for_request(index)
    return law.with_seed(int(torch.randint(2**63 - 1, (), device="cpu")))


def _check_rules(core: Core, law: SamplingParams, eos: frozenset[int]) -> None:
    """Raise ValueError if the rules of `law` name tokens outside the vocabulary, or are too many."""
    if not law.has_processors:
        return
    check_ids(core, "suppressed, banned and biased tokens hold", law.named_tokens)
    rules = TokenRules.of(law, sorted(eos))
    counts = {
        "tokens suppressed, banned or biased": (len(rules.tokens), MAX_ENTRIES),
        "bad words of several tokens": (len(rules.bad_words), MAX_BAD_WORDS),
    }
    for what, (count, most) in counts.items():
        if count > most:
            raise ValueError(f"{count} {what}: at most {most} per request; pass fewer")


def check_ids(core: Core, what: str, ids: Collection[int]) -> None:
    """Raise ValueError, which begins with `what` and the first wrong id, unless all `ids` are in the vocabulary."""
    vocab = core.target.spec.vocab_size
    if ids and not (min(ids) >= 0 and max(ids) < vocab):
        wrong = next(token for token in ids if not 0 <= token < vocab)
        raise ValueError(f"{what} {wrong}; the target's vocabulary has {vocab} tokens: expected 0 to {vocab - 1}")
