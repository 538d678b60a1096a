"""Makes grammar compilers: picks the library and caches compiled grammars by their text."""

import importlib.metadata
import importlib.util
import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, Protocol

from packaging.version import Version

from specdec.core.grammar.grammar import Grammar
from specdec.core.grammar.matcher import CompiledGrammar
from specdec.reach.grammars.trial import Trials
from specdec.reach.grammars.vocabulary import Vocabulary

# In order of preference (see docs/generation-settings.md), with the oldest versions that pyproject.toml allows.
LIBRARIES = {"llguidance": Version("1.9"), "xgrammar": Version("0.2.8")}
MOST_KEPT = 512  # compiled grammars


def installed_library(name: str) -> str | None:
    """Return the library that `name` selects, if it and jsonschema, which first checks schemas, are installed."""
    fitting = (n for n in LIBRARIES if name in (n, "auto") and _is_installed(n))
    return next(fitting, None)


def _is_installed(library: str) -> bool:
    if any(importlib.util.find_spec(name) is None for name in (library, "jsonschema")):
        return False
    return Version(importlib.metadata.version(library)) >= LIBRARIES[library]


def make_compiler(name: str, tokenizer: Any, vocab_size: int, eos_ids: frozenset[int]) -> "CachedCompiler":
    """Return the compiler `name` ("auto": the first installed library) for a tokenizer and a model's vocabulary size V.

    ValueError without the library, a tokenizer, or EOS ids. The first grammar imports the library and gives it the
    vocabulary.
    """
    library = installed_library(name)
    if library is None:
        extra = "xgrammar" if name == "xgrammar" else "grammar"
        raise ValueError(
            f"grammar={name!r}: its library, or jsonschema, is not installed, or too old: "
            f"pip install 'specdec-toolkit[{extra}]'"
        )
    if tokenizer is None:
        raise ValueError(f"grammar={name!r} needs a tokenizer; attach(..., tokenizer=...)")
    if not eos_ids:
        raise ValueError(
            f"grammar={name!r}: the model has no eos_token_id, which ends a complete text; leave grammar out"
        )
    return CachedCompiler(library, lambda: Vocabulary.of(tokenizer, vocab_size, eos_ids), eos_ids)


class Library(Protocol):
    """A library with its vocabulary."""

    def compile(self, grammar: Grammar) -> CompiledGrammar:
        """Compile `grammar`; ValueError names what is wrong."""


class CachedCompiler:
    """A `specdec.core.grammar.matcher.Compiler` over one library; it caches the grammars used last."""

    def __init__(self, name: str, vocabulary: Callable[[], Vocabulary], eos_ids: frozenset[int]):
        self.name = name
        self.eos_ids = eos_ids
        self._vocabulary = vocabulary
        self._opened: tuple[Library, Trials] | None = None
        self._lock = threading.Lock()
        self._kept: OrderedDict[str, CompiledGrammar] = OrderedDict()

    def compile(self, grammar: Grammar) -> CompiledGrammar:
        """See `Compiler.compile`. Other threads may compile at the same time."""
        with self._lock:
            if (kept := self._kept.get(grammar.text)) is not None:
                self._kept.move_to_end(grammar.text)
                return kept
            if self._opened is None:
                vocabulary = self._vocabulary()
                self._opened = open_library(self.name, vocabulary), Trials(self.name, vocabulary)
            library, trials = self._opened
        trials.check(grammar)
        compiled = library.compile(grammar)
        with self._lock:
            self._kept[grammar.text] = compiled
            while len(self._kept) > MOST_KEPT:
                self._kept.popitem(last=False)
        return compiled


def open_library(name: str, vocabulary: Vocabulary) -> Library:
    """Import the library `name` and give it the vocabulary."""
    if name == "llguidance":
        from specdec.reach.grammars.llguidance import LLGuidance

        return LLGuidance(vocabulary)
    from specdec.reach.grammars.xgrammar import XGrammar

    return XGrammar(vocabulary)


def check_schemas(grammar: Grammar) -> None:
    """Raise ValueError that names the place at which a JSON schema is invalid."""
    if grammar.kind not in ("json", "structural_tag"):
        return
    from jsonschema.exceptions import SchemaError
    from jsonschema.validators import validator_for

    if grammar.kind == "json":
        schemas = {"json": grammar.value}
    else:
        parts = enumerate(grammar.value["structures"])
        schemas = {f"structural_tag.structures[{i}].schema": part["schema"] for i, part in parts}
    for at, schema in schemas.items():
        has_draft = isinstance(schema, dict) and isinstance(schema.get("$schema"), str)
        try:
            validator_for(schema if has_draft else {}).check_schema(schema)
        except SchemaError as error:
            raise ValueError(f"{at}{error.json_path[1:]}: {error.message[:300]}") from None
        except RecursionError:
            raise ValueError(f"{at}: nested too deeply") from None
