"""Ranges that settings declare: what a value may be, and one message for every other value. Knows no setting."""

import difflib
import operator
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from numbers import Integral, Real
from reprlib import Repr
from types import MappingProxyType
from typing import Any

MAX_INT = 2**63 - 1
SHOWN = 200  # characters of a value in a message


class Culprit(ValueError):
    """Names the invalid item of a list or mapping."""


@dataclass(frozen=True)
class Range:
    """Values that a setting may have. expected: their description; read: converts a value to plain Python, and raises
    TypeError, ValueError or OverflowError for one that is out of range."""

    expected: str
    read: Callable[[Any], Any]

    def check(self, name: str, value: Any) -> Any:
        """Return `value` as Python's own; ValueError names the setting, the value and what was expected."""
        try:
            return self.read(value)
        except (TypeError, ValueError, OverflowError) as error:
            culprit = f" ({error})" if isinstance(error, Culprit) else ""
            raise ValueError(f"{name}={shown(value)}{culprit}: expected {self.expected}") from None

    def read_item(self, at: Any, value: Any) -> Any:
        """Return an item of a list or mapping as Python's own; Culprit names it."""
        try:
            return self.read(value)
        except (TypeError, ValueError, OverflowError):
            raise Culprit(f"item {at!r} is {shown(value)}") from None


def check_fields(settings: Any, ranges: Mapping[str, Range]) -> None:
    """Check fields of a frozen dataclass, and make them Python's own numbers, tuples and mappings."""
    cls = type(settings)
    for name, allowed in ranges.items():
        value = getattr(settings, name)
        if value is not getattr(cls, name, cls):  # a default needs no check
            object.__setattr__(settings, name, allowed.check(name, value))


def shown(value: Any) -> str:
    """Return a value for a message, cut where it is long; most of a long list is not looked at."""
    short = Repr()
    short.maxstring = short.maxother = SHOWN
    text = short.repr(value)
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}..."


def suggest(name: str, known: Iterable[str], aliases: Mapping[str, str] = MappingProxyType({})) -> str:
    """Return "; did you mean X?" for an unknown name, if any is near. aliases: names that others use."""
    near = [aliases[name]] if name in aliases else difflib.get_close_matches(name, list(known), n=1)
    return f"; did you mean {near[0]}?" if near else ""


def whole(low: int, high: int = MAX_INT, cure: str = "") -> Range:
    """Integers, numpy's included; bools are none. cure: what the message ends with."""
    limits = f"of at least {low}" if high == MAX_INT else f"from {low} to {high}"
    return Range(f"an integer {limits}{cure}", lambda value: _within(low, operator.index(_no_bool(value)), high))


def real(low: float, high: float, also: tuple[float, ...] = (), cure: str = "") -> Range:
    """Real numbers from `low` to `high`, numpy's included, and the numbers `also`; bools are none."""

    def read(value: Any) -> float:
        if not isinstance(_no_bool(value), Real):
            raise TypeError
        return float(value if value in also else _within(low, value, high))

    others = "".join(f"{number} or " for number in also)
    return Range(f"{others}a number from {low:g} to {high:g}{cure}", read)


def one_of(*choices: Any) -> Range:
    """One of `choices`: strings by value, True, False and None by themselves, so that 1 is not True."""

    def read(value: Any) -> Any:
        for choice in choices:
            if value is choice or (isinstance(choice, str) and isinstance(value, str) and value == choice):
                return choice
        raise ValueError

    return Range(repr(choices[0]) if len(choices) == 1 else f"one of {choices}", read)


def list_of(item: Range, what: str, low: int = 0, high: int = MAX_INT) -> Range:
    """Lists of `low` to `high` items, as tuples: any iterable but text and mappings. what: the list in words."""

    def read(value: Any) -> tuple[Any, ...]:
        if not isinstance(value, Iterable) or isinstance(value, str | bytes | bytearray | Mapping):
            raise TypeError
        items = tuple(item.read_item(i, one) for i, one in enumerate(value))
        _within(low, len(items), high)
        return items

    return Range(f"a list of {what}", read)


def mapping_of(key: Range, item: Range, what: str) -> Range:
    """Mappings, as ones that cannot change. what: the mapping in words."""

    def read(value: Any) -> Mapping[Any, Any]:
        if not isinstance(value, Mapping):
            raise TypeError
        return MappingProxyType({key.read_item(k, k): item.read_item(k, v) for k, v in value.items()})

    return Range(f"a mapping from {what}", read)


def either(one: Range, other: Range) -> Range:
    """Values of any of two ranges."""

    def read(value: Any) -> Any:
        try:
            return one.read(value)
        except (TypeError, ValueError, OverflowError):
            return other.read(value)

    return Range(f"{one.expected} or {other.expected}", read)


def optional(allowed: Range, none: str = "") -> Range:
    """Values of `allowed`, and None. none: what None is for."""
    return Range(f"{allowed.expected}, or None{none}", lambda value: None if value is None else allowed.read(value))


def is_whole(value: Any) -> bool:
    """Return whether `value` is an integer, numpy's included; bools are not."""
    return type(value) is int or (isinstance(value, Integral) and not isinstance(value, bool))


def _no_bool(value: Any) -> Any:
    if isinstance(value, bool):
        raise TypeError
    return value


def _within(low: Any, value: Any, high: Any) -> Any:
    if not low <= value <= high:
        raise ValueError
    return value


TOKEN = whole(0)
TOKEN_IDS = list_of(TOKEN, "token ids (integers >= 0)")
FLAG = one_of(True, False)
