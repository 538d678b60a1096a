"""Sampling parameters of one request, checked and in plain Python numbers. Knows no tensors and no model."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from hashlib import blake2b
from struct import Struct
from types import MappingProxyType

from specdec.core.ranges import (
    MAX_INT,
    TOKEN,
    TOKEN_IDS,
    Range,
    check_fields,
    list_of,
    mapping_of,
    optional,
    real,
    whole,
)

# Below this, logits / temperature may overflow float32; the distribution is greedy long before.
MIN_TEMPERATURE = 1e-5
MAX_SEED = MAX_INT
MAX_TOKENS = 2**31 - 2  # that can be counted
MAX_NGRAM = 32  # tokens of the longest n-gram or bad word that is looked for
# Fields that sampling needs on the device, in the order of packing: "d" by its float64 bits, "q" as int64, None as 0.
NUMBERS = MappingProxyType({"temperature": "d", "top_k": "q", "top_p": "d", "min_p": "d", "seed": "q"})
_PACKED, _BITS = Struct("".join(NUMBERS.values())), Struct(f"{len(NUMBERS)}q")
_NO_BIAS: Mapping[int, float] = MappingProxyType({})


class SamplingKind(StrEnum):
    """Kind of sampling that a batch needs; a graph is captured for each.

    greedy: the argmax. sampled: no filters. filtered: top-k, top-p or min-p, which sort the vocabulary. The processed
    kinds also apply logits processors; the constrained kinds are for batches in which a request has a grammar. A law,
    here and in what follows, is the distribution [V] that a token is sampled from.
    """

    GREEDY = "greedy"
    SAMPLED = "sampled"
    FILTERED = "filtered"
    PROCESSED_GREEDY = "processed_greedy"
    PROCESSED = "processed"  # serves every batch without a grammar
    CONSTRAINED_GREEDY = "constrained_greedy"
    CONSTRAINED = "constrained"  # serves every batch

    @classmethod
    def of(cls, params: Iterable["SamplingParams"]) -> "SamplingKind":
        """Return the least kind that serves every one of `params`."""
        kinds = [p.kind for p in params]
        if all(kind is kinds[0] for kind in kinds):
            return kinds[0]
        return next(k for k in cls if all(k.serves(other) for other in set(kinds)))

    @property
    def is_greedy(self) -> bool:
        """True if the argmax is taken, without random numbers."""
        return self in (SamplingKind.GREEDY, SamplingKind.PROCESSED_GREEDY, SamplingKind.CONSTRAINED_GREEDY)

    @property
    def has_filters(self) -> bool:
        """True if the vocabulary is sorted."""
        return self in (SamplingKind.FILTERED, SamplingKind.PROCESSED, SamplingKind.CONSTRAINED)

    @property
    def has_processors(self) -> bool:
        """True if logits processors run before the softmax."""
        return self in (SamplingKind.PROCESSED_GREEDY, SamplingKind.PROCESSED, SamplingKind.CONSTRAINED)

    @property
    def is_constrained(self) -> bool:
        """True if grammars mask the logits first."""
        return self in (SamplingKind.CONSTRAINED_GREEDY, SamplingKind.CONSTRAINED)

    @property
    def constrained(self) -> "SamplingKind":
        """The least kind that does the same under grammars."""
        is_plain = self in (SamplingKind.GREEDY, SamplingKind.CONSTRAINED_GREEDY)
        return SamplingKind.CONSTRAINED_GREEDY if is_plain else SamplingKind.CONSTRAINED

    def serves(self, other: "SamplingKind") -> bool:
        """Return whether a batch of kind `other` can run as this kind."""
        needs = [(k.has_processors, not k.is_greedy, k.has_filters, k.is_constrained) for k in (self, other)]
        return all(has or not wants for has, wants in zip(*needs, strict=True))


@dataclass(frozen=True)
class SamplingParams:
    """Sampling settings of one request, with the meaning they have in `transformers`' `generate`.

    temperature: 0 is greedy. top_k 0, top_p 1, min_p 0 are off. seed, not in transformers: of the random numbers; None
    draws a fresh one from torch's CPU generator, so that `torch.manual_seed` makes runs repeatable.
    repetition_penalty (1: off): logits of tokens in prompt and text are divided by it, negative ones multiplied.
    frequency_penalty, presence_penalty (0: off), as in OpenAI's API: subtracted from the logits of emitted tokens, not
    of the prompt's; the first once per occurrence, the second once.
    no_repeat_ngram_size (0: off): no n-gram occurs twice, those of the prompt included. min_new_tokens: EOS is banned
    until so many tokens are emitted. suppress_tokens, begin_suppress_tokens: ids that are never emitted, or not as the
    first token. bad_words_ids: sequences of ids that are never completed. logit_bias, as in OpenAI's API: id -> value
    added to its logit before penalties, filters and temperature; -inf bans it.
    Raises ValueError that names the field, the value and what was expected.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    no_repeat_ngram_size: int = 0
    min_new_tokens: int = 0
    suppress_tokens: Sequence[int] = ()
    begin_suppress_tokens: Sequence[int] = ()
    bad_words_ids: Sequence[Sequence[int]] = ()
    logit_bias: Mapping[int, float] = field(default_factory=lambda: _NO_BIAS, hash=False)

    def __post_init__(self) -> None:
        check_fields(self, RANGES)

    def for_request(self, index: int) -> "SamplingParams":
        """Return the parameters of request `index` of a call: the same, with `request_seed(seed, index)`."""
        return self if self.seed is None or index == 0 else self.with_seed(request_seed(self.seed, index))

    def with_seed(self, seed: int) -> "SamplingParams":
        """Return the same parameters with another `seed`, without checking any field again."""
        seeded = object.__new__(type(self))
        seeded.__dict__.update(self.__dict__, seed=seed)
        return seeded

    @property
    def is_greedy(self) -> bool:
        """True if tokens are chosen by argmax: temperature 0."""
        return self.temperature == 0

    @property
    def has_filters(self) -> bool:
        """True if top-k, top-p or min-p is on."""
        return self.top_k > 0 or self.top_p < 1 or self.min_p > 0

    @cached_property
    def has_processors(self) -> bool:
        """True if a penalty, ban, bias or minimum length changes the logits."""
        lists = (self.suppress_tokens, self.begin_suppress_tokens, self.bad_words_ids, self.logit_bias)
        numbers = (self.frequency_penalty, self.presence_penalty, self.no_repeat_ngram_size, self.min_new_tokens)
        return self.repetition_penalty != 1 or any(map(bool, (*numbers, *lists)))

    @cached_property
    def kind(self) -> SamplingKind:
        """The least kind of sampling that serves this request; grammars are not counted."""
        if self.has_processors:
            return SamplingKind.PROCESSED_GREEDY if self.is_greedy else SamplingKind.PROCESSED
        if self.is_greedy:
            return SamplingKind.GREEDY
        return SamplingKind.FILTERED if self.has_filters else SamplingKind.SAMPLED

    @property
    def bits(self) -> tuple[int, ...]:
        """The values of NUMBERS, as int64."""
        return _BITS.unpack(_PACKED.pack(*(getattr(self, name) or 0 for name in NUMBERS)))

    @property
    def named_tokens(self) -> set[int]:
        """Every token id that a rule names; all must be in the target's vocabulary."""
        words = (token for word in self.bad_words_ids for token in word)
        return {*self.suppress_tokens, *self.begin_suppress_tokens, *words, *self.logit_bias}


def request_seed(seed: int, index: int) -> int:
    """Return the seed of request `index` of a call with `seed`: `seed` itself for index 0, else a 63-bit BLAKE2b hash
    of "seed index", so that calls with different seeds share no samples. The same on every machine."""
    digest = blake2b(f"{seed} {index}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1 if index else seed


_HUGE = 1e10  # of logits that are biased, penalised and divided by a temperature none overflows float32
_OFF = "; pass 0 to turn it off"
_WORD = list_of(TOKEN, "token ids", 1, MAX_NGRAM)
RANGES: Mapping[str, Range] = MappingProxyType(
    {
        "temperature": real(MIN_TEMPERATURE, _HUGE, also=(0,), cure="; pass 0 for greedy decoding"),
        "top_k": whole(0, cure=_OFF),
        "top_p": real(0, 1, cure="; pass 1.0 to turn it off"),
        "min_p": real(0, 1, cure=_OFF),
        "seed": optional(whole(0, MAX_SEED, cure="; pass seed % 2**63"), " for a fresh one"),
        "repetition_penalty": real(MIN_TEMPERATURE, _HUGE, cure="; pass 1.0 to turn it off"),
        "frequency_penalty": real(-2, 2, cure=_OFF),
        "presence_penalty": real(-2, 2, cure=_OFF),
        "no_repeat_ngram_size": whole(0, MAX_NGRAM, cure=_OFF),
        "min_new_tokens": whole(0, MAX_TOKENS, cure=_OFF),
        "suppress_tokens": TOKEN_IDS,
        "begin_suppress_tokens": TOKEN_IDS,
        "bad_words_ids": list_of(_WORD, f"words, each a list of 1 to {MAX_NGRAM} token ids (integers >= 0)"),
        "logit_bias": mapping_of(
            TOKEN,
            real(-math.inf, _HUGE),
            f"token ids (integers >= 0) to biases of their logits, up to {_HUGE:g}; -inf bans a token",
        ),
    }
)
