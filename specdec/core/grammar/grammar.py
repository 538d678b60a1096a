"""A grammar as users give it: plain data, checked and limited in size. Knows no library."""

import json as _json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any

from specdec.core.ranges import shown

KINDS = ("json", "json_object", "regex", "choice", "lark", "ebnf", "structural_tag")
MOST_CHARACTERS = 2**18  # of a grammar's text
MOST_DEPTH = 64  # objects and lists within each other
MOST_CHOICES = 4096


@dataclass(frozen=True)
class Grammar:
    """Constrains the text of a request; set exactly one field besides `any_whitespace`.

    json: a JSON schema, as an object or as text. json_object: True for any JSON object. regex: a regular expression
    (Rust's syntax, no look-around) for the whole text. choice: strings, one of which is the text. lark: a grammar in
    llguidance's Lark. ebnf: one in llama.cpp's GBNF, from the rule `root`. structural_tag: free text with constrained
    parts, as vLLM takes it: {"structures": [{"begin": .., "schema": .., "end": ..}, ..], "triggers": [..]}.
    any_whitespace: JSON may be indented in any way; otherwise it is one line with ", " and ": ", most of which can be
    drafted without a model.

    ValueError names the field that is wrong, or too large: at most 2**18 characters, nested 64 deep, 4096 choices.
    """

    json: Mapping[str, Any] | bool | str | None = None
    json_object: bool = False
    regex: str | None = None
    choice: Sequence[str] | None = None
    lark: str | None = None
    ebnf: str | None = None
    structural_tag: Mapping[str, Any] | None = None
    any_whitespace: bool = False

    def __post_init__(self) -> None:
        given = self._given
        if len(given) != 1:
            raise ValueError(f"a Grammar with {given or 'nothing'} set: expected exactly one of {', '.join(KINDS)}")
        for name in ("regex", "lark", "ebnf"):
            if not isinstance(getattr(self, name), str | None):
                raise ValueError(f"{name}={shown(getattr(self, name))}: expected a string")
        if self.choice is not None:
            _check_choice(self.choice)
        if self.structural_tag is not None:
            _check_tags(self.structural_tag)
        if len(self.text) > MOST_CHARACTERS:
            raise ValueError(f"{given[0]}: {len(self.text)} characters: expected at most {MOST_CHARACTERS}")

    @classmethod
    def of(cls, value: Any) -> "Grammar":
        """Return `value` if it is a Grammar, or the Grammar with the fields of a mapping."""
        if isinstance(value, Grammar):
            return value
        known = [f.name for f in fields(cls)]
        if not isinstance(value, Mapping) or not all(name in known for name in value):
            raise ValueError(f"grammar={shown(value)}: expected a Grammar, or a dict with some of {', '.join(known)}")
        return cls(**value)

    @property
    def _given(self) -> list[str]:
        """The fields that are set; False is a schema."""
        return [n for n in KINDS if getattr(self, n) not in (None, False) or (n == "json" and self.json is False)]

    @property
    def kind(self) -> str:
        """The name of the field that is set."""
        return self._given[0]

    @cached_property
    def value(self) -> Any:
        """The field that is set; JSON text is parsed."""
        value = getattr(self, self.kind)
        if self.kind == "json" and isinstance(value, str):
            value = _parsed(value)
        if self.kind in ("json", "structural_tag"):
            _check_depth(self.kind, value)
        return value

    @cached_property
    def text(self) -> str:
        """Return it as text: equal texts mean equal grammars. The order of a schema's properties counts."""
        value = self.value  # has messages of its own
        try:
            return _json.dumps([self.kind, value, self.any_whitespace])
        except (TypeError, ValueError, RecursionError) as error:
            raise ValueError(f"{self.kind}: it is not JSON: {error}") from None


def _parsed(text: str) -> Any:
    try:
        return _json.loads(text)
    except RecursionError:
        raise ValueError(f"json: nested too deeply: expected at most {MOST_DEPTH} levels") from None
    except ValueError as error:
        raise ValueError(f"json: it is not JSON: {error}") from None


def _check_depth(name: str, value: Any) -> None:
    level = [value]
    for _ in range(MOST_DEPTH + 1):
        items = [v.values() if isinstance(v, Mapping) else v for v in level if isinstance(v, Mapping | list | tuple)]
        level = [item for own in items for item in own]
        if not level:
            return
    raise ValueError(f"{name}: nested too deeply: expected at most {MOST_DEPTH} levels")


def _check_choice(choice: Any) -> None:
    is_list = isinstance(choice, Sequence) and not isinstance(choice, str)
    if not is_list or not all(isinstance(text, str) and text for text in choice):
        raise ValueError(f"choice={shown(choice)}: expected a list of strings that are not empty")
    if not 1 <= len(choice) <= MOST_CHOICES:
        raise ValueError(f"choice: {len(choice)} strings: expected 1 to {MOST_CHOICES}")


def _check_tags(tag: Any) -> None:
    if not isinstance(tag, Mapping) or set(tag) != {"structures", "triggers"}:
        raise ValueError(f"structural_tag={shown(tag)}: expected an object with 'structures' and 'triggers'")
    triggers, structures = tag["triggers"], tag["structures"]
    if not isinstance(triggers, list) or not all(isinstance(t, str) and t for t in triggers):
        raise ValueError(f"structural_tag.triggers={shown(triggers)}: expected a list of strings")
    if not isinstance(structures, list) or not structures:
        raise ValueError(f"structural_tag.structures={shown(structures)}: expected a list of objects")
    for i, part in enumerate(structures):
        at = f"structural_tag.structures[{i}]"
        if not isinstance(part, Mapping) or set(part) != {"begin", "schema", "end"}:
            raise ValueError(f"{at}={shown(part)}: expected an object with 'begin', 'schema' and 'end'")
        if not isinstance(part["begin"], str) or not any(part["begin"].startswith(t) for t in triggers):
            raise ValueError(f"{at}.begin={shown(part['begin'])}: expected a string that begins with a trigger")
        if not isinstance(part["end"], str):
            raise ValueError(f"{at}.end={shown(part['end'])}: expected a string")
