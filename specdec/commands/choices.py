"""What options of several commands stand for: drafting, drafts, lists, names of targets."""

from pathlib import Path
from typing import Annotated, Any

import typer

from specdec import shipped
from specdec.draft.algorithms import algorithms
from specdec.targets.pretrained import BUNDLED

Steps = Annotated[
    int | None,
    typer.Option(help="Draft depth S; default 2 on CPU, else 3, or S, K and D as the draft advises if none is given."),
]
TopK = Annotated[int | None, typer.Option(help="Branches per step K; 1, the default, drafts a chain.")]
DraftTokens = Annotated[int | None, typer.Option(help="Nodes verified per round D, root included.")]


def named_draft(draft: str | None, target: str | None) -> str:
    """Return the draft's name; if none is given, the shipped head for the bundled target, and "none" for others."""
    return draft or ("shipped" if target in (None, BUNDLED) else "none")


def drafting_of(
    draft: str, device: str, steps: int | None, topk: int | None = None, draft_tokens: int | None = None
) -> dict[str, Any]:
    """Return the settings of `attach` for the options of drafting that were given, None for those that were not;
    beside the draft "none", `attach` refuses them.

    On a CPU the depth is 2 by default: a product of up to three rows costs what one row costs. Elsewhere nothing is
    added, so that `attach` follows what the draft advises on CUDA.
    """
    if draft != "none" and steps is None and device == "cpu":
        steps = 2
    drafting = {"num_steps": steps, "topk": topk, "num_draft_tokens": draft_tokens}
    return {name: value for name, value in drafting.items() if value is not None}


def draft_of(draft: str) -> tuple[Path | str | None, str | None]:
    """Return draft and algo as `attach` takes them, for a draft named on the command line."""
    if draft == "none":
        return None, None
    if draft in algorithms() and not algorithms()[draft].has_model:
        return None, draft
    return shipped.find(draft), "auto"


def listed(values: list[str] | None, default: str = "") -> list[str]:
    """Split the values of an option that may be repeated, or separated by commas."""
    return [part.strip() for value in values or [default] for part in value.split(",") if part.strip()]


def numbers(option: str, values: list[str] | None) -> tuple[int, ...] | None:
    """Return the whole numbers of an option that may be repeated, or separated by commas; None if it is not given."""
    if values is None:
        return None
    parts = listed(values)
    if not all(part.isdecimal() for part in parts):
        raise ValueError(f"--{option} {','.join(values)!r}: expected whole numbers separated by commas, such as 1,8,32")
    return tuple(map(int, parts))


def check_alone(shape: str, **others: object) -> None:
    """Raise ValueError for an option of real targets that was given beside --shape."""
    for name, value in others.items():
        if value is not None:
            raise ValueError(f"--{name} {str(value)!r} with --shape {shape}: its weights are random; drop one")


def name_of_target(target: str) -> str:
    """Return the target's name for a file name: "135m" for the bundled one."""
    return "135m" if target == BUNDLED else Path(target).name.lower().removesuffix(".gguf")
