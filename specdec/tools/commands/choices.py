"""Options that several commands share, and the objects made from them: targets, drafts, lists, result files."""

import json
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from specdec import shipped
from specdec.api import Engine, attach
from specdec.core.config import AUTO
from specdec.reach.assembly.algorithms import algorithms
from specdec.reach.heads.formats import WHOLE
from specdec.reach.heads.load import detect_algo, load_head
from specdec.reach.targets.pretrained import BUNDLED, load_draft
from specdec.reach.targets.shape import TargetShape
from specdec.tools.measure.break_even import cpu_break_even, expected_tau
from specdec.tools.measure.page.kinds import print_rows
from specdec.tools.measure.results import ResultFile
from specdec.tools.options import Options, flag, option
from specdec.tools.train.target import load

TARGET = "Hub id, folder, .gguf file or 'bundled' (SmolLM2-135M-Instruct)."
GREEDY = "Temperature; 0: greedy; default: the model's own."
Row = dict[str, Any]


class OnTarget(Options):
    """Options of commands that load a target."""

    target: str = option(TARGET, BUNDLED)
    device: str = option("cuda, cpu; auto: cuda if available.", "auto")
    dtype: str = option("float32, bfloat16, float16; auto: bfloat16 on CUDA, else float32.", "auto")

    def load(self) -> tuple[Any, Any]:
        return load(self.target, self.dtype, self.device)


class WithDraft(OnTarget):
    """Options of commands that decode with a draft."""

    draft: str | None = option(
        "Folder, .gguf file, Hub id, 'lookup', 'shipped' (EAGLE-3), a shipped name or 'none'; default: shipped for the "
        "bundled target, none for others."
    )
    steps: str | None = option(
        "Draft depth S, or 'auto': chosen every round from measurements. Default: on a CPU the fastest measured, which "
        "may be no draft; else 3, or the draft's own S, K and D if none of them is given."
    )
    topk: int | None = option("Branches per step K; 1, the default, drafts a chain.")
    draft_tokens: int | None = option("Nodes verified per round D, root included.")
    draft_weights: str | None = option("fp8: quantise the draft head's weights to FP8; default: as they are.")

    def drafting(self, model: Any, max_batch: int = 1) -> "Drafting":
        """Return the drafting settings of an engine of `max_batch` requests."""
        name, steps = named_draft(self.draft, self.target), self.steps
        if steps not in (None, AUTO) and not steps.isdecimal():
            raise ValueError(f"--steps {steps!r}: expected a whole number, or {AUTO}")
        given = steps if steps in (None, AUTO) else int(steps)
        drafting = drafting_of(name, model, max_batch, given, self.topk, self.draft_tokens)
        pays = drafting.algo is not None or name == "none"  # else this CPU does not use the named draft
        if self.draft_weights is None or not pays:
            return drafting
        return replace(drafting, settings={**drafting.settings, "draft_weights": self.draft_weights})


class Reported(Options):
    """Option of commands whose results programs read."""

    json: bool = flag("Print the results as one JSON object on the last line.")

    def finish(self, found: dict[str, Any], file: str | None = None) -> None:
        """End the command: print the results as JSON if requested, else the path of the result file."""
        if self.json:
            print(json.dumps({"file": file, **found} if file else found))
        elif file:
            print(f"results: {file}")


class Recorded(Reported):
    """Options of measurements."""

    out: Path | None = option("Folder for the result file, written as rows come in.")

    def record(self, file: ResultFile, measured: Iterable[Row], line: Callable[[Row], str] | None = None) -> list[Row]:
        """Collect rows as they are measured: write each, and print its `line` on stderr; then print them all."""
        rows: list[Row] = []
        for row in measured:
            rows.append(row)
            file.write(rows)
            if line is not None:
                print(line(row), file=sys.stderr, flush=True)
        file.write(rows)  # its config may have grown after the last row
        print_rows(rows)
        return rows


def named_draft(draft: str | None, target: str | None) -> str:
    """Return the draft's name; if none is given, the shipped head for the bundled target, and "none" for others."""
    return draft or ("shipped" if target in (None, BUNDLED) else "none")


@dataclass(frozen=True)
class Drafting:
    """Drafting of an engine. source, algo, settings: as `attach` takes them; note: a CPU's reason for its choice, or
    ""."""

    source: Any
    algo: str | None
    settings: dict[str, Any]
    note: str = ""

    def attach(self, model: Any, tokenizer: Any, **settings: Any) -> Engine:
        return attach(model, self.source, self.algo, tokenizer=tokenizer, **{**settings, **self.settings})


def drafting_of(
    draft: str,
    model: Any,
    max_batch: int,
    steps: int | str | None = None,
    topk: int | None = None,
    draft_tokens: int | None = None,
) -> Drafting:
    """Return the drafting settings of an engine of `max_batch` requests with the draft of that name.

    Given options are honoured; with the draft "none", `attach` refuses them. Without any, a CPU uses the fastest S that
    it measures, and no draft if none pays off; on other devices `attach` follows the draft's advice.
    """
    drafting = {"num_steps": steps, "topk": topk, "num_draft_tokens": draft_tokens}
    given = {name: value for name, value in drafting.items() if value is not None}
    source, algo = draft_of(draft)
    if algo is None or model.device.type != "cpu" or steps is not None:
        return Drafting(source, algo, given)
    if given:
        return Drafting(source, algo, {"num_steps": 2, **given})
    found = cpu_break_even(model, draft_module(source, model))
    best = found.best_steps(max_batch)
    cost = (
        f"on this CPU a round of S={best or 1} at {max_batch} request{'s' * (max_batch > 1)} costs "
        f"{found.cost(best or 1, max_batch):.2f} plain steps (drafting pays below {expected_tau(best or 1):.2f})"
    )
    if best:
        return Drafting(source, algo, {"num_steps": best}, f"{cost}: S={best}")
    most = found.most_requests
    remedy = f"drafts pay up to --max-batch {most}; " if 0 < most < max_batch else ""
    return Drafting(None, None, {}, f"{cost}: no draft; {remedy}--steps 1 drafts anyway")


def draft_module(source: Path | str | None, model: Any) -> Any:
    """Load a draft of `draft_of` for its target; None for one without weights."""
    if source is None:
        return None
    kind = detect_algo(source)
    if kind in WHOLE:
        return load_draft(source, dtype=model.dtype, device=model.device)[0]
    return load_head(source, TargetShape.of(model), model.dtype, model.device, kind)


def engine_line(engine: Engine) -> str:
    """Describe an engine on one line: model, draft, capacity, memory of its KV pool."""
    config, report = engine.config, engine.report()
    steps = f"{AUTO} up to {config.num_steps}" if config.auto_steps else str(config.num_steps)
    draft = f"{report.draft['algo']}, S={steps}" if config.num_steps else "no draft"
    requests = f"{config.max_batch} request{'s' * (config.max_batch > 1)}"
    return (
        f"{report.model} on {engine.target_module.device}, {draft}, up to {requests} of {config.max_seq_len:,} tokens, "
        f"KV pool {report.kv_bytes / 2**20:,.0f} MiB"
    )


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


def by_name(values: list[str], part: str) -> dict[str, str]:
    """Return paths by their `part`, "name" or "stem", or by the whole path if that is taken."""
    found: dict[str, str] = {}
    for value in values:
        short = getattr(Path(value), part)
        found[value if short in found else short] = value
    return found


def numbers(option: str, values: list[str] | None, least: int = 0) -> tuple[int, ...] | None:
    """Return the whole numbers of an option that may be repeated, or separated by commas; None if it is not given."""
    if values is None:
        return None
    parts = listed(values)
    if not all(part.isdecimal() for part in parts):
        raise ValueError(f"--{option} {','.join(values)!r}: expected whole numbers separated by commas, such as 1,8,32")
    return tuple(at_least(option, int(part), least) for part in parts)


def at_least(option: str, value: int, least: int = 1) -> int:
    """Return the value of an option; ValueError if it is below `least`."""
    if value < least:
        raise ValueError(f"--{option} {value}: expected at least {least}")
    return value


def check_alone(shape: str, **others: object) -> None:
    """Raise ValueError for an option of real targets that was given with --shape."""
    for name, value in others.items():
        if value is not None:
            raise ValueError(f"--{name} {str(value)!r} with --shape {shape}: its weights are random; drop one")


def name_of_target(target: str) -> str:
    """Return the target's name for a file name: "135m" for the bundled one."""
    return "135m" if target == BUNDLED else Path(target).name.lower().removesuffix(".gguf")
