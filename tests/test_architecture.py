"""Rules about the source tree, checked with `ast`: nothing here imports specdec.

Imports point down, no module has mutable state, every module has a docstring, `backends/` names no algorithm,
`graphs/` knows no models, an engine's tensors are made with a device, and no file names the machine it was written on.
"""

from __future__ import annotations

import ast
import re
import subprocess
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("specdec", "graphs", "backends")  # the last two are read at their real path, not through their links

# Lowest first. Modules in one set may import each other; sets of one row may not; a row may import all rows above it
# in this listing. "" is specdec/__init__.py.
LAYERS: tuple[tuple[frozenset[str], ...], ...] = (
    (frozenset({"core", "reach", "tools"}),),  # the packages' own __init__ files are empty
    (frozenset({"ranges"}),),
    (frozenset({"options"}),),
    (
        frozenset(
            {"errors", "config", "batch", "cache", "grammar", "interrupts", "metrics", "outputs", "sampling_params"}
        ),
        frozenset({"shipped"}),
        frozenset({"text"}),
    ),
    (frozenset({"backends"}), frozenset({"graphs"}), frozenset({"checkpoints"}), frozenset({"grammars"})),
    (frozenset({"functional"}), frozenset({"target"})),
    (frozenset({"draft"}),),
    (frozenset({"round"}), frozenset({"targets", "parallel"})),
    (frozenset({"prefill"}), frozenset({"heads"})),
    (frozenset({"engine"}),),
    (frozenset({"assembly"}),),
    (frozenset({"doors"}),),
    (frozenset({"api"}),),
    (frozenset({"train"}),),
    (frozenset({"measure"}),),
    (frozenset({"doctor"}),),
    (frozenset({"serve"}),),
    (frozenset({"custom_generate"}), frozenset({"evaluation"}), frozenset({"ray"})),
    (frozenset({"commands"}),),
    (frozenset({"", "__main__"}),),
)

# Folders below specdec/, innermost first: a ring imports none outside it. Core knows live models only through the
# interfaces of `specdec.core.target`.
RINGS = ("core", "reach", "tools")
# The largest number of our modules that an import of each may load.
CLOSURES = {"specdec.core.engine.scheduler": 20, "specdec.core.round.program": 40, "specdec.core.draft.worker": 25}

# Beyond the order: imports that are forbidden although the order would allow them.
STRANGERS = {
    "graphs": ("specdec.reach.targets", "transformers"),  # captures callables
    "draft": ("specdec.graphs",),  # workers run; the engine decides what is captured
}

ALGORITHM_NAMES = ("eagle", "nextn")

# Packages that make an engine's tensors, some on the host on purpose: none may use torch's default device.
PLACED = ("", "backends", "graphs", "cache", "functional", "targets", "draft", "round", "prefill", "engine", "doors")
PLACED += ("batch", "assembly")
MAKERS = frozenset(
    {
        "tensor",
        "as_tensor",
        "empty",
        "empty_strided",
        "zeros",
        "ones",
        "full",
        "arange",
        "linspace",
        "eye",
        "scalar_tensor",
    }
    | {"rand", "randn", "randint", "randperm", "normal", "tril_indices", "triu_indices"}
)

MUTABLE_CALLS = frozenset(
    {"list", "dict", "set", "bytearray", "defaultdict", "deque", "Counter", "OrderedDict", "ChainMap"}
    | {"WeakKeyDictionary", "WeakValueDictionary", "WeakSet"}
)


class Module(NamedTuple):
    """A source file: its path in messages, its dotted name, its syntax tree."""

    path: str
    name: str  # "specdec.graphs.counters"
    is_package: bool
    tree: ast.Module

    @property
    def component(self) -> str:
        """The name in LAYERS: "graphs" for specdec.graphs.counters, "" for specdec itself."""
        return component(self.name)


class Offence(NamedTuple):
    path: str
    line: int
    text: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.text}"


def component(name: str) -> str:
    parts = [*name.split("."), ""]
    return parts[2] if parts[1] in RINGS and parts[2] else parts[1]


def parse(path: str, source: str) -> Module:
    """Parse a module; `path` is relative to the repository root."""
    parts = list(Path(path).with_suffix("").parts)
    if parts[0] != "specdec":
        parts.insert(0, "specdec")
    is_package = parts[-1] == "__init__"
    if is_package:
        parts.pop()
    return Module(path, ".".join(parts), is_package, ast.parse(source, path))


def is_cargo(file: Path) -> bool:
    """Return whether `file` is in a draft's folder: transformers loads it, nothing imports it."""
    return file.is_relative_to(ROOT / "specdec" / "shipped") and file.parent.name != "shipped"


@cache
def modules() -> tuple[Module, ...]:
    links = [link for name in PACKAGES[1:] if (link := ROOT / "specdec" / name).is_symlink()]
    files = (
        file
        for package in PACKAGES
        for file in sorted((ROOT / package).rglob("*.py"))
        if not any(file.is_relative_to(link) for link in links) and not is_cargo(file)
    )
    return tuple(parse(file.relative_to(ROOT).as_posix(), file.read_text("utf-8")) for file in files)


def is_type_checking(test: ast.expr) -> bool:
    return ast.unparse(test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING")


def walk_runtime(node: ast.AST) -> Iterator[ast.AST]:
    """Yield every node below, except code for type checkers only."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and is_type_checking(child.test):
            for statement in child.orelse:
                yield statement
                yield from walk_runtime(statement)
        else:
            yield child
            yield from walk_runtime(child)


@cache
def imports(module: Module) -> list[tuple[int, str]]:
    """(line, dotted name) of every run-time import, lazy ones too. `from a import b` is "a.b": b may be a module."""
    found = []
    package = module.name.split(".") if module.is_package else module.name.split(".")[:-1]
    for node in walk_runtime(module.tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                found.append((node.lineno, alias.name))
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            origin = ".".join([*base, *([node.module] if node.module else [])])
            for alias in node.names:
                found.append((node.lineno, f"{origin}.{alias.name}"))
    return found


def place(name: str) -> tuple[int, frozenset[str]] | None:
    """Return (height, set) of a component, or None if LAYERS does not have it."""
    for height, row in enumerate(LAYERS):
        for group in row:
            if name in group:
                return height, group
    return None


def direction_offences(module: Module) -> Iterator[Offence]:
    here = place(module.component)
    if here is None:
        yield Offence(module.path, 1, f"{module.name} is in no layer: give {module.component!r} its place in LAYERS")
        return
    for line, name in imports(module):
        if name == "bench" or name.startswith("bench."):
            name = "specdec." + name
        if name.partition(".")[0] != "specdec" or name == "specdec.__version__":
            continue
        # `from specdec import attach` takes a name of the package; `from specdec import config` is a module
        there = place(component(name)) or (
            place(name.split(".")[1] if name.count(".") == 2 else "") if name.count(".") < 3 else None
        )
        if there is None:
            yield Offence(module.path, line, f"{module.name} imports {name}, which is in no layer")
        elif there[0] > here[0]:
            yield Offence(module.path, line, f"{module.name} imports {name}: imports point down")
        elif there[0] == here[0] and there[1] != here[1]:
            yield Offence(module.path, line, f"{module.name} imports {name}, which lies beside it")


def stranger_offences(module: Module) -> Iterator[Offence]:
    for line, name in imports(module):
        for stranger in STRANGERS.get(module.component, ()):
            if name == stranger or name.startswith(stranger + "."):
                yield Offence(module.path, line, f"{name} is imported: {module.component} knows no {stranger}")


def second_name_offences(module: Module) -> Iterator[Offence]:
    for line, name in imports(module):
        top = name.partition(".")[0]
        if top in PACKAGES[1:]:
            yield Offence(module.path, line, f"{module.name} imports {name}: say specdec.{top}")


def module_level(statements: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Statements that run at import, also those in if, try, with and loops; not those in functions and classes."""
    for statement in statements:
        if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            continue
        yield statement
        for field in ("body", "orelse", "finalbody"):
            yield from module_level(getattr(statement, field, []))
        for handler in getattr(statement, "handlers", []):
            yield from module_level(handler.body)


def is_mutable(value: ast.expr) -> bool:
    if isinstance(value, ast.List | ast.Dict | ast.Set | ast.ListComp | ast.DictComp | ast.SetComp):
        return True
    if isinstance(value, ast.Call):
        function = value.func.value if isinstance(value.func, ast.Subscript) else value.func  # dict[str, int]()
        return ast.unparse(function).rpartition(".")[2] in MUTABLE_CALLS
    return False


def is_constant_name(name: str) -> bool:
    return name == "__all__" or re.fullmatch(r"_?[A-Z][A-Z0-9_]*", name) is not None


def state_offences(module: Module) -> Iterator[Offence]:
    for statement in module_level(module.tree.body):
        if isinstance(statement, ast.Assign):
            targets = statement.targets
        elif isinstance(statement, ast.AnnAssign):
            targets = [statement.target]
        else:
            continue
        if statement.value is None or not is_mutable(statement.value):
            continue
        for target in targets:
            if isinstance(target, ast.Name) and not is_constant_name(target.id):
                yield Offence(module.path, statement.lineno, f"{target.id} is mutable and lives in the module")
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Global):
            yield Offence(module.path, node.lineno, f"global {', '.join(node.names)}: state that lives in the module")


def docstring_offences(module: Module) -> Iterator[Offence]:
    if not (ast.get_docstring(module.tree) or "").strip():
        yield Offence(module.path, 1, f"{module.name} has no docstring")


def algorithm_offences(module: Module) -> Iterator[Offence]:
    """Algorithm names in identifiers and strings of `backends/`; comments and docstrings may have them."""
    if module.component != "backends":
        return
    prose = {id(node.value) for node in ast.walk(module.tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(module.tree):
        if id(node) in prose and isinstance(node, ast.Constant):
            continue
        words = [value for _, value in ast.iter_fields(node) if isinstance(value, str)]
        for word in words:
            for name in ALGORITHM_NAMES:
                if name in word.lower():
                    line = getattr(node, "lineno", 1)
                    yield Offence(module.path, line, f"{word!r} names an algorithm: backends know none")


def device_offences(module: Module) -> Iterator[Offence]:
    """Tensors that an engine makes without naming a device."""
    for node in ast.walk(module.tree) if module.component in PLACED else ():
        if not isinstance(node, ast.Call) or any(k.arg in ("device", None) for k in node.keywords):
            continue
        module_name, _, name = ast.unparse(node.func).rpartition(".")
        if module_name == "torch" and name in MAKERS:
            yield Offence(module.path, node.lineno, f"torch.{name} without a device: torch's default is the user's")


CHECKS: tuple[Callable[[Module], Iterator[Offence]], ...] = (
    direction_offences,
    stranger_offences,
    second_name_offences,
    state_offences,
    docstring_offences,
    algorithm_offences,
    device_offences,
)


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__.removesuffix("_offences"))
def test_tree(check: Callable[[Module], Iterator[Offence]]) -> None:
    offences = [str(offence) for module in modules() for offence in check(module)]
    assert not offences, "\n" + "\n".join(offences)


@cache
def top_level_imports(module: Module) -> tuple[str, ...]:
    """Return what an import of `module` imports at module level, without imports for type checkers only."""
    lazy = {
        id(node)
        for function in ast.walk(module.tree)
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef)
        for node in ast.walk(function)
    }
    found = [n for n in walk_runtime(module.tree) if isinstance(n, ast.Import | ast.ImportFrom) and id(n) not in lazy]
    return tuple(origin for _, origin in imports(module._replace(tree=ast.Module(list(found), []))))


@cache
def top_level_closure(name: str) -> set[str]:
    """Return our modules that an import of `name` loads, their packages included."""
    known = {module.name: module for module in modules()}
    found, rest = set(), [name]
    while rest:
        name = rest.pop()
        rest += [name.rpartition(".")[0]] * ("." in name)
        if name in known and name not in found:
            found.add(name)
            rest += top_level_imports(known[name])
    return found


@pytest.mark.parametrize("name", CLOSURES)
def test_closures_of_core_are_small(name: str) -> None:
    found = top_level_closure(name)
    assert {name, "specdec", "specdec.core.config" if "worker" in name else "specdec.core.errors"} <= found
    assert len(found) <= CLOSURES[name], f"{len(found)} modules: {', '.join(sorted(found))}"


def ring_of(name: str) -> int:
    """Return the index of a module's ring, 0 for the core and what is beside it, such as graphs."""
    part = name.partition(".")[2].partition(".")[0]
    return RINGS.index(part) if part in RINGS else 0


@pytest.mark.parametrize("ring", RINGS)
def test_rings_import_none_outside_them(ring: str) -> None:
    members = [module for module in modules() if module.name.startswith(f"specdec.{ring}.")]
    assert len(members) > 40
    for module in members:
        outside = [name for _, name in imports(module) if ring_of(name) > RINGS.index(ring)]
        assert not outside, f"{module.name} imports {outside}"


def test_core_imports_no_transformers() -> None:
    known = {module.name: module for module in modules()}
    for name in known:
        for part in top_level_closure(name) if name.startswith("specdec.core.") else ():
            strangers = [i for i in top_level_imports(known[part]) if i.partition(".")[0] == "transformers"]
            assert not strangers and not ring_of(part), f"{name} imports {part}, which imports {strangers}"


def test_attaching_uncompiled_needs_no_private_parts_of_the_compiler() -> None:
    found = top_level_closure("specdec.api")
    assert "specdec.reach.targets.compiling.target" in found and len(found) > 100, "the closure was followed"
    assert not found & {f"specdec.graphs.compile.{name}" for name in ("pieces", "trace", "walk", "layers")}


def test_the_packages_are_found_once_each() -> None:
    names = [module.name for module in modules()]
    assert len(names) == len(set(names))
    assert {"specdec.graphs", "specdec.backends"} <= set(names)


@pytest.mark.parametrize("name", PACKAGES[1:])
def test_link_is_relative(name: str) -> None:
    link = ROOT / "specdec" / name
    if not link.is_symlink():
        pytest.skip("not a checkout: sdists carry real files")
    assert link.readlink() == Path("..", name)


# Absolute paths of the machines that this was written on, and hosts of package registries: neither is of use to a
# reader. A link to a model's or a paper's page is fine.
MACHINE_TEXT = re.compile(
    r"(?<![\w.~-])/(?:work|root|home/\w+|tmp/w|tmp/bash_jobs[\w.]*|opt/wheels|opt/pypi[\w-]*)(?:/|(?![\w.-]))"
    r"|\b(?:pypi\.org|pythonhosted\.org|deb\.debian\.org|security\.debian\.org|registry\.npmjs\.org|npmjs\.com)\b"
)


def text_files() -> Iterator[Path]:
    """Yield what git tracks or would add; in an unpacked sdist, every file."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listing = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if listing.returncode == 0:
        files = [ROOT / name for name in listing.stdout.split("\0") if name]
    else:
        files = [file for file in ROOT.rglob("*") if not any(p.startswith(".") for p in file.relative_to(ROOT).parts)]
    for file in files:
        if file.is_file() and not file.is_symlink() and file != Path(__file__).resolve():
            yield file


def machine_offences(path: str, text: str) -> Iterator[Offence]:
    for line, content in enumerate(text.splitlines(), start=1):
        for match in MACHINE_TEXT.finditer(content):
            yield Offence(path, line, f"{match[0]!r} names a machine or a registry")


def test_no_file_names_a_machine_or_a_registry() -> None:
    offences = []
    for file in text_files():
        data = file.read_bytes()
        if b"\0" not in data[:8192]:
            offences += machine_offences(file.relative_to(ROOT).as_posix(), data.decode("utf-8", "replace"))
    assert not offences, "\n" + "\n".join(map(str, offences))


@pytest.mark.parametrize(
    "text", ["cd /work/main", "'/tmp/w/venv/bin'", "https://pypi.org/x", "/root/.cache", "--find-links=/opt/wheels"]
)
def test_machine_text_is_found(text: str) -> None:
    (offence,) = machine_offences("a.md", "fine\n" + text)
    assert str(offence).startswith("a.md:2: ")


@pytest.mark.parametrize("text", ["framework/x", "docs/work/plan.md", "/tmp/wheel", "/tmp/specdec", "/workers"])
def test_other_text_is_not(text: str) -> None:
    assert not list(machine_offences("a.md", text))
