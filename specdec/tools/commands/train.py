"""`specdec train`: regenerate a corpus with the target, fit a draft to it, export draft and card.

The last line printed is one JSON object with the results.
"""

import json
import math
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

import typer

from specdec.tools.commands.choices import OnTarget
from specdec.tools.options import REQUIRED, argument, command_of, option
from specdec.tools.train.adapt import adapt
from specdec.tools.train.config import HeadShape, TrainConfig, recipe
from specdec.tools.train.fit import beside, check_checkpoint, check_out, check_student, checkpoint_of, train
from specdec.tools.train.generation import Generation, prepare

ALGOS = "eagle (EAGLE-1/2), eagle3, nextn (MTP), block (DFlash, DSpark), or standalone (a small LM)."


class Training(OnTarget):
    """Options of all commands."""

    out: Path = option("Folder of the exported draft.", REQUIRED)
    overwrite: bool = option("Replace another draft in the folder.", False)

    def picked(self, kind: type) -> dict[str, Any]:
        """Return the options that are fields of the dataclass `kind`."""
        return {f.name: self.settings[f.name] for f in fields(kind) if f.name in self.settings}

    def where(self) -> dict[str, Any]:
        """Return the target, its device, and whether files may be replaced."""
        return {name: getattr(self, name) for name in ("target", "dtype", "device", "overwrite")}


class Data(Training):
    """Regenerate a corpus: GSM8K answers, and chats that the target writes by itself."""

    out: Path = option("The corpus, a .safetensors file.", REQUIRED)
    gen_minutes: float | None = option("Time limit for generating, in minutes.", None, "--minutes", "--gen-minutes")
    overwrite: bool = option("Replace an existing corpus.", False)
    groups = (Generation,)

    def run(self) -> None:
        generation = Generation(**self.picked(Generation), gen_minutes=self.gen_minutes)
        print_json(prepare(self.out, generation, **self.where()))


class Fit(Training):
    """Fit a draft to corpora and export it."""

    corpus: list[Path] = option("Corpus of `data`; may be given several times.", REQUIRED)
    algo: str = option(ALGOS, "eagle3")
    aux_layers: str | None = option("Target layers to read; eagle3: three, such as 1,14,26; block: any number.")
    held_out: int = option("Minimum of held-out sequences; of a small corpus one in 20.", 200)
    resume: bool = option("Resume from the checkpoint of an interrupted run.", False)
    groups, advised = (TrainConfig, HeadShape), (TrainConfig,)

    def run(self) -> None:
        config = recipe(self.algo, **self.picked(TrainConfig))
        layers = _layers(self.aux_layers) if self.aux_layers else None
        shape = HeadShape(**self.picked(HeadShape), aux_layers=layers)
        options = {"held_out": self.held_out, "resume": self.resume, **self.where()}
        print_json(train(self.corpus, self.out, config, algo=self.algo, shape=shape, **options))


class Run(Training):
    """Run `data`, then `fit`; the corpus is written beside the draft as `<out>.corpus.safetensors`."""

    algo: str = option(ALGOS, "eagle3")
    groups, advised = (TrainConfig, Generation), (TrainConfig,)
    without = frozenset({"compile", "shard"})  # both have the first; a shard is not a corpus to train on

    def run(self) -> None:
        out, config = self.out, recipe(self.algo, **self.picked(TrainConfig))
        check_out(out, self.target, self.overwrite)
        check_checkpoint(checkpoint_of(out), False, self.overwrite)
        corpus = beside(out, ".corpus.safetensors")
        generation = Generation(**{**self.picked(Generation), "seed": config.seed})
        check = partial(check_student, self.algo, config, HeadShape(), self.target)
        made = prepare(corpus, generation, check=check, **self.where())
        print_json({"data": made, **train([corpus], out, config, algo=self.algo, **self.where())})


class Adapt(Training):
    """Continue a trained draft on text that the target writes now; the better of before and after is exported."""

    target: str = argument("The target: a Hub id or a folder, fine-tuned or not.")
    head: str = argument("The draft to continue: a Hub id or a folder.")
    prompts: Path | None = option("File of prompts; the target answers them first.")
    from_log: Path | None = option("File that `specdec serve --log` wrote, instead of prompts.")
    minutes: float = option("Time limit for generating and training, in minutes.", 5.0)
    max_new_tokens: int = option("Maximum tokens per answer.", 256)
    lr: float | None = option("Peak learning rate; default: a quarter of the algorithm's.")

    def run(self) -> None:
        where = self.where()
        options = {name: getattr(self, name) for name in ("prompts", "minutes", "max_new_tokens", "lr")}
        found = adapt(where.pop("target"), self.head, self.out, log=self.from_log, **options, **where)
        change = found["tau"] / found["tau_before"] - 1
        kept = f"{change:+.1%}" if found["is_better"] else "no better: exported as it was"
        print(f"tau on held-out text: {found['tau_before']:.3f} before, {found['tau']:.3f} after ({kept})")
        print_json(found)


app = typer.Typer(help="Train drafts on text that the target generates.", no_args_is_help=True)
for name, kind in (("data", Data), ("fit", Fit), ("run", Run), ("adapt", Adapt)):
    app.command(name)(command_of(kind))


def _layers(text: str) -> tuple[int, ...]:
    parts = text.split(",")
    if not all(part.strip().isdecimal() for part in parts):
        raise ValueError(f"--aux-layers {text!r}: expected layers, such as 1,14,26")
    return tuple(map(int, parts))


def print_json(result: dict[str, Any]) -> None:
    """Print one line of JSON, with null for numbers that JSON does not have."""
    print(json.dumps(_without_nan(result), allow_nan=False))


def _without_nan(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _without_nan(part) for name, part in value.items()}
    if isinstance(value, list):
        return [_without_nan(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
