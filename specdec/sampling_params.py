"""Sampling parameters of one request, checked and in plain Python numbers. Knows no tensors and no model."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from numbers import Integral, Real
from types import MappingProxyType
from typing import Any

# Below this, logits / temperature may overflow float32; the law is greedy long before.
MIN_TEMPERATURE = 1e-5
MAX_SEED = 2**63 - 1
MAX_TOKENS = 2**31 - 2  # that can be counted
MAX_NGRAM = 32  # tokens of the longest n-gram or bad word that is looked for
_NO_BIAS: Mapping[int, float] = MappingProxyType({})


class SamplingKind(StrEnum):
    """Sampling that a batch needs: the argmax, laws, or laws after a sort of the vocabulary; each also with processors.

    A law is the probabilities that a token is sampled from.
    """

    GREEDY = "greedy"
    SAMPLED = "sampled"
    FILTERED = "filtered"
    PROCESSED_GREEDY = "processed_greedy"
    PROCESSED = "processed"  # whatever the law: it serves every batch

    @classmethod
    def of(cls, params: Iterable["SamplingParams"]) -> "SamplingKind":
        """Return the least kind that serves every one of `params`."""
        kinds = [p.kind for p in params]
        if all(kind is kinds[0] for kind in kinds):
            return kinds[0]
        return next(k for k in cls if all(k.serves(other) for other in set(kinds)))

    @property
    def is_greedy(self) -> bool:
        """True if the argmax is enough."""
        return self in (SamplingKind.GREEDY, SamplingKind.PROCESSED_GREEDY)

    @property
    def has_filters(self) -> bool:
        """True if the vocabulary is sorted."""
        return self in (SamplingKind.FILTERED, SamplingKind.PROCESSED)

    @property
    def has_processors(self) -> bool:
        """True if logits are processed before they become a law."""
        return self in (SamplingKind.PROCESSED_GREEDY, SamplingKind.PROCESSED)

    def serves(self, other: "SamplingKind") -> bool:
        """Return whether work of this kind does all that `other` needs."""
        needs = [(k.has_processors, not k.is_greedy, k.has_filters) for k in (self, other)]
        return all(has or not wants for has, wants in zip(*needs, strict=True))


@dataclass(frozen=True)
class SamplingParams:
    """Sampling settings of one request; every field has the meaning it has in `transformers`' `generate`,
    where it has one: `seed` and `logit_bias` are ours.

    temperature: 0 is greedy. top_k 0, top_p 1, min_p 0 are off. seed: of the random numbers; None draws a fresh one
    from torch's CPU generator, so that `torch.manual_seed` makes runs repeatable.
    repetition_penalty (1: off): logits of tokens in prompt and text are divided by it, negative ones multiplied.
    no_repeat_ngram_size (0: off): no n-gram occurs twice, the prompt's included. min_new_tokens: EOS is banned before.
    suppress_tokens, begin_suppress_tokens: ids that are never emitted, or not as the first token. bad_words_ids:
    sequences of ids that are never completed. logit_bias: id -> value added to its logit before everything else.
    Raises ValueError that names the field, the value and what was expected.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    repetition_penalty: float = 1.0
    no_repeat_ngram_size: int = 0
    min_new_tokens: int = 0
    suppress_tokens: Sequence[int] = ()
    begin_suppress_tokens: Sequence[int] = ()
    bad_words_ids: Sequence[Sequence[int]] = ()
    logit_bias: Mapping[int, float] = field(default_factory=lambda: _NO_BIAS, hash=False)

    def __post_init__(self) -> None:
        for name, check in _CHECKS.items():
            value = getattr(self, name)
            if value is not getattr(SamplingParams, name, _NO_BIAS):  # defaults need no check
                # numpy's numbers, lists and dicts become Python's own, which cannot change
                object.__setattr__(self, name, check(name, value))

    def with_seed(self, seed: int) -> "SamplingParams":
        """Return the same parameters with another seed, without checking the others again."""
        seeded = object.__new__(type(self))
        seeded.__dict__.update(self.__dict__, seed=seed)
        return seeded

    @property
    def is_greedy(self) -> bool:
        """True if the argmax is wanted."""
        return self.temperature == 0

    @property
    def has_filters(self) -> bool:
        """True if top-k, top-p or min-p drops anything."""
        return self.top_k > 0 or self.top_p < 1 or self.min_p > 0

    @cached_property
    def has_processors(self) -> bool:
        """True if logits are changed by earlier tokens, or by rules for single tokens."""
        lists = (self.suppress_tokens, self.begin_suppress_tokens, self.bad_words_ids, self.logit_bias)
        numbers = (self.no_repeat_ngram_size, self.min_new_tokens)
        return self.repetition_penalty != 1 or any(map(bool, (*numbers, *lists)))

    @cached_property
    def kind(self) -> SamplingKind:
        """The least kind of sampling that serves it."""
        if self.has_processors:
            return SamplingKind.PROCESSED_GREEDY if self.is_greedy else SamplingKind.PROCESSED
        if self.is_greedy:
            return SamplingKind.GREEDY
        return SamplingKind.FILTERED if self.has_filters else SamplingKind.SAMPLED

    @property
    def named_tokens(self) -> set[int]:
        """Every token id that a rule names; all must be in the target's vocabulary."""
        words = (token for word in self.bad_words_ids for token in word)
        return {*self.suppress_tokens, *self.begin_suppress_tokens, *words, *self.logit_bias}


def _temperature(name: str, value: Any) -> float:
    is_hot = is_real(value) and MIN_TEMPERATURE <= value < math.inf
    if not is_hot and not (is_real(value) and value == 0):
        raise ValueError(
            f"{name} must be 0 or a finite number >= {MIN_TEMPERATURE}, got {value!r}; pass 0 for greedy decoding"
        )
    return float(value)


def _share(off: float) -> Callable[[str, Any], float]:
    def check(name: str, value: Any) -> float:
        if not (is_real(value) and 0 <= value <= 1):
            raise ValueError(f"{name} must be in [0, 1], got {value!r}; pass {off} to turn it off")
        return float(value)

    return check


def _count(most: int) -> Callable[[str, Any], int]:
    def check(name: str, value: Any) -> int:
        if not (is_whole(value) and 0 <= value <= most):
            limit = f" and at most {most}" if most < MAX_SEED else ""
            raise ValueError(f"{name} must be an integer >= 0{limit}, got {value!r}; pass 0 to turn it off")
        return int(value)

    return check


def _seed(name: str, value: Any) -> int | None:
    if value is None:
        return None
    if not (is_whole(value) and 0 <= value <= MAX_SEED):
        raise ValueError(f"{name} must be None or an integer in [0, 2**63), got {value!r}; pass seed % 2**63")
    return int(value)


def _penalty(name: str, value: Any) -> float:
    if not (is_real(value) and 0 < value < math.inf):
        raise ValueError(f"{name} must be a finite number above 0, got {value!r}; pass 1.0 to turn it off")
    return float(value)


def check_ids(name: str, value: Any) -> tuple[int, ...]:
    """Return token ids as a tuple of ints, from any list of whole numbers; ValueError for anything else."""
    is_list = isinstance(value, Iterable) and not isinstance(value, str | bytes | Mapping)
    ids: list[Any] = list(value) if is_list else [None]
    if not all(is_whole(token) and 0 <= token <= MAX_SEED for token in ids):
        raise ValueError(f"{name}={value!r}: expected a list of token ids (integers >= 0); pass () for none")
    return tuple(int(token) for token in ids)


def _words(name: str, value: Any) -> tuple[tuple[int, ...], ...]:
    if not isinstance(value, Iterable) or isinstance(value, str | bytes | Mapping):
        raise ValueError(f"{name}={value!r}: expected a list of lists of token ids; pass () for none")
    words = tuple(check_ids(name, word) for word in value)
    wrong = next((word for word in words if not 1 <= len(word) <= MAX_NGRAM), None)
    if wrong is not None:
        raise ValueError(f"{name} holds a word of {len(wrong)} tokens: expected 1 to {MAX_NGRAM}")
    return words


def _biases(name: str, value: Any) -> Mapping[int, float]:
    if not isinstance(value, Mapping):
        raise ValueError(f"{name}={value!r}: expected a mapping from token id to what is added to its logit")
    check_ids(name, list(value))
    wrong = next(((t, b) for t, b in value.items() if not is_real(b) or math.isnan(b) or b == math.inf), None)
    if wrong is not None:
        raise ValueError(f"{name}: token {wrong[0]} has bias {wrong[1]!r}; expected a finite number, or -inf to ban it")
    return MappingProxyType({int(token): float(bias) for token, bias in value.items()})


def is_whole(value: Any) -> bool:
    """Return whether `value` is an integer, numpy's included; bools are not."""
    return type(value) is int or (isinstance(value, Integral) and not isinstance(value, bool))


def is_real(value: Any) -> bool:
    """Return whether `value` is a real number, numpy's included; bools are not."""
    return type(value) in (int, float) or (isinstance(value, Real) and not isinstance(value, bool))


_CHECKS: Mapping[str, Callable[[str, Any], Any]] = MappingProxyType(
    {
        "temperature": _temperature,
        "top_k": _count(MAX_SEED),
        "top_p": _share(1.0),
        "min_p": _share(0.0),
        "seed": _seed,
        "repetition_penalty": _penalty,
        "no_repeat_ngram_size": _count(MAX_NGRAM),
        "min_new_tokens": _count(MAX_TOKENS),
        "suppress_tokens": check_ids,
        "begin_suppress_tokens": check_ids,
        "bad_words_ids": _words,
        "logit_bias": _biases,
    }
)
