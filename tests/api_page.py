"""Writes docs/api.md: `python -m tests.api_page`. A test compares the file with the output."""

import inspect
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType

PAGE = Path(__file__).resolve().parents[1] / "docs" / "api.md"
OTHERS = {  # public, but not in any __all__
    "specdec.custom_generate": ("engine_of", "generate_with_draft"),
    "specdec.reach.heads.load": ("load_head", "save_head", "inspect", "detect_algo"),
    "specdec.reach.targets.pretrained": ("load_pretrained",),
    "specdec.shipped": ("available", "path", "for_algo"),
    "specdec.tools.measure.acceptance": ("acceptance",),
    "specdec.tools.commands.convert": ("convert",),
}


def page() -> str:
    """Return the whole page: one section per module, one line per name."""
    lines = ["# Public names", ""]
    lines.append("What is not listed here may change without notice. Written by `python -m tests.api_page`.")
    for name in ("specdec", "specdec.graphs", "specdec.backends"):
        module = import_module(name)
        lines += ["", f"## `{name}`", "", *section(module, sorted(module.__all__))]
    lines += ["", "## Elsewhere", ""]
    for name, names in OTHERS.items():
        lines += section(import_module(name), names, f"{name}.")
    return "\n".join(lines) + "\n"


def section(module: ModuleType, names: list[str] | tuple[str, ...], prefix: str = "") -> Iterator[str]:
    """Yield a line for every name of `module`, and one for every public method of `Engine`."""
    for name in names:
        value = getattr(module, name)
        yield f"- `{prefix}{name}`: {first_sentence(value)}"
        if name == "Engine":
            for method, function in vars(value).items():
                if not method.startswith("_"):
                    yield f"  - `{method}`: {first_sentence(function)}"


def first_sentence(value: object) -> str:
    """Return the first sentence of a docstring, on one line; constants have none."""
    if not callable(value) and not isinstance(value, property):
        return "a constant"
    paragraph = " ".join((inspect.getdoc(value) or "").split("\n\n")[0].split())
    return paragraph.split(". ")[0].rstrip(".")


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
