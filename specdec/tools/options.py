"""Options of commands, declared as fields of classes: name, type, default, help and range in one line.

Commands that share options inherit them, or list dataclasses of settings, whose fields are options too.
"""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import MISSING, Field, dataclass, field, fields
from typing import Annotated, Any, get_type_hints

from specdec.core.ranges import Range

REQUIRED: Any = MISSING


def option(help: str = "", default: Any = None, *names: str, allowed: Range | None = None, **more: Any) -> Any:
    """Declare a field that is an option. default: REQUIRED for none; names: other than the field's; allowed: checked by
    `ranges_of`; more: arguments of `typer.Option`."""
    return field(default=default, metadata={"help": help, "names": names, "allowed": allowed, **more})


def flag(help: str) -> Any:
    """Declare an option without a value, off by default."""
    return field(default=False, metadata={"help": help, "is_flag": True})


def argument(help: str) -> Any:
    """Declare a positional argument."""
    return field(metadata={"help": help, "is_argument": True})


def ranges_of(kind: type) -> dict[str, Range]:
    """Return the ranges that a dataclass declares, for `check_fields`."""
    return {f.name: f.metadata["allowed"] for f in fields(kind) if f.metadata.get("allowed")}


class Options:
    """Base of commands, and of groups of options that several commands share; every subclass becomes a dataclass.

    groups: dataclasses of settings. A field of the command hides one of theirs with its name, and `without` leaves out
    others. advised: fields whose defaults depend on other options: None unless given. settings: the values of the
    groups' fields, by name.
    """

    groups: tuple[type, ...] = ()
    advised: tuple[type, ...] = ()
    without: frozenset[str] = frozenset()
    settings: dict[str, Any]

    def __init_subclass__(cls) -> None:
        dataclass(kw_only=True)(cls)

    def run(self) -> None:
        """Run the command."""
        raise NotImplementedError


def command_of(kind: type[Options]) -> Callable[..., None]:
    """Return the function from which typer makes a command: its parameters are the options of `kind`."""
    found: dict[str, inspect.Parameter] = {}
    for group in (kind, *kind.groups):
        hints, declared = get_type_hints(group), {one.name: one for one in fields(group)}
        for name in (name for base in group.__mro__ for name in inspect.get_annotations(base)):  # its own come first
            if name in declared and name not in (*found, *kind.without):
                found[name] = _parameter(declared[name], hints[name], group in kind.advised)
    own = {one.name for one in fields(kind)}  # type: ignore[arg-type]

    def call(**given: Any) -> None:
        command = kind(**{name: value for name, value in given.items() if name in own})
        command.settings = {name: value for name, value in given.items() if name not in own}
        command.run()

    call.__doc__ = kind.__doc__
    call.__signature__ = inspect.Signature(list(found.values()))  # type: ignore[attr-defined]
    call.__annotations__ = {name: one.annotation for name, one in found.items()}
    return call


def _parameter(one: Field[Any], kind: Any, is_advised: bool) -> inspect.Parameter:
    import typer

    given: Mapping[str, Any] = one.metadata
    dashed = "--" + one.name.replace("_", "-")
    names = given.get("names") or ((dashed,) if given.get("is_flag") else ())
    more = {name: value for name, value in given.items() if name not in ("names", "allowed", "is_flag", "is_argument")}
    default = inspect.Parameter.empty if one.default is MISSING else one.default
    if is_advised:
        more["help"] += "" if default is None else f" Default: {default}, or the algorithm's own."
        kind, default = kind | None, None
    made = typer.Argument(**more) if given.get("is_argument") else typer.Option(*names, **more)
    place = inspect.Parameter.KEYWORD_ONLY
    return inspect.Parameter(one.name, place, default=default, annotation=Annotated[kind, made])
