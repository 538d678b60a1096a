"""The public names: `specdec.__all__` is sorted, complete, importable and documented."""

from __future__ import annotations

import inspect
import re
from dataclasses import dataclass
from types import ModuleType

import specdec

# what @dataclass and NamedTuple write when the author wrote nothing: "Name(field: int, ...)"
_GENERATED_DOC = re.compile(r"\A\w+\(.*\)\Z", re.DOTALL)


def test_all_is_sorted_and_without_duplicates() -> None:
    assert list(specdec.__all__) == sorted(set(specdec.__all__))


def test_all_is_complete() -> None:
    public = {
        name
        for name, value in vars(specdec).items()
        if not name.startswith("_") and not isinstance(value, ModuleType) and name != "annotations"
    }
    assert public <= set(specdec.__all__), f"public but not in __all__: {sorted(public - set(specdec.__all__))}"


def has_docstring(value: object) -> bool:
    if inspect.isclass(value):
        doc = value.__dict__.get("__doc__")  # its own, not its base's
    elif inspect.isroutine(value) or inspect.ismodule(value):
        doc = value.__doc__
    else:
        return True  # plain data, such as __version__, carries none
    return bool(doc and doc.strip()) and not _GENERATED_DOC.match(doc.strip())


def test_every_name_is_importable_and_documented() -> None:
    assert [name for name in specdec.__all__ if not has_docstring(getattr(specdec, name))] == []


def test_a_generated_docstring_does_not_count() -> None:
    @dataclass
    class Undocumented:
        x: int

    @dataclass
    class Documented:
        """One x."""

    assert not has_docstring(Undocumented)
    assert has_docstring(Documented)


def test_version_is_a_literal_that_reads_as_one() -> None:
    assert re.fullmatch(r"\d+\.\d+\.\d+((a|b|rc|\.dev)\d+)?", specdec.__version__)
