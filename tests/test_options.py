"""Options as fields of classes: what a command gets from its groups, and what users see."""

from dataclasses import dataclass

import typer
from typer.testing import CliRunner

from specdec.tools.options import REQUIRED, Options, argument, command_of, flag, option


@dataclass(frozen=True)
class Recipe:
    steps: int = option("Steps.", 5)
    seed: int = option("Seed.", 0)
    hidden: str = option("Of no use here.", "x")
    layers: tuple[int, ...] = (1, 2)


class Shared(Options):
    target: str = option("A target.", "bundled")
    json: bool = flag("As JSON.")


class Fit(Shared):
    """Fit a draft."""

    name: str = argument("Its name.")
    corpus: list[str] = option("Corpora.", REQUIRED)
    layers: str | None = option("Layers, such as 1,2.")
    groups, advised, without = (Recipe,), (Recipe,), frozenset({"hidden"})

    def run(self) -> None:
        print([self.name, self.corpus, self.layers, self.target, self.json, self.settings])


def test_a_command_has_its_own_options_and_those_of_its_groups():
    app = typer.Typer()
    app.command()(command_of(Fit))
    said = CliRunner().invoke(app, ["head", "--corpus", "a", "--corpus", "b", "--json", "--seed", "0"]).stdout
    assert said.strip() == str(["head", ["a", "b"], None, "bundled", True, {"steps": None, "seed": 0}])
    shown = CliRunner().invoke(app, ["--help"], env={"COLUMNS": "150", "TERM": "dumb"}).stdout
    assert (
        "Fit a draft." in shown
        and "Steps. Default: 5" in shown
        and "--hidden" not in shown
        and "--no-json" not in shown
    )
    assert CliRunner().invoke(app, ["head"]).exit_code == 2, "no corpus"
