"""The `specdec` command: each command with one line of help; its module is imported when it is called."""

import sys
from importlib import import_module
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from specdec import __version__

COMMANDS = {  # name: module, its function or app of commands, and the first line of its help
    "demo": ("demo:demo", "Compare HF generate, plain decoding and speculation, and show which tokens were drafted."),
    "generate": ("text:generate", "Generate for one prompt and stream the text; statistics go to stderr."),
    "chat": (
        "text:chat",
        "Chat in the terminal. An empty line starts a new chat, Ctrl-C ends an answer, Ctrl-D the chat.",
    ),
    "serve": ("serve:serve", "Serve a target over HTTP: /v1/chat/completions, /v1/completions, /v1/models"),
    "bench": ("bench:app", "Measure speed, acceptance and correctness; show and compare results."),
    "train": ("train:app", "Train drafts on text that the target generates."),
    "convert": ("convert:command", "Convert an EAGLE-3 head between the official and the speculators layout."),
    "doctor": ("doctor:doctor", "Inspect a draft on a target: layout, cost, acceptance, defects."),
    "backends": ("machine:app", "List attention backends, or build their kernels."),
    "cache": ("machine:cache", "Show the cache of compiled layers: its folder, and its size by environment."),
    "env": ("machine:env", "Print versions, devices and usable backends, for bug reports."),
    "eval": (
        "evaluate:command",
        "Evaluate with lm-eval and its options, such as --model_args pretrained=TARGET --tasks gsm8k.",
    ),
}


class LazyGroup(TyperGroup):
    """Commands of COMMANDS; help lists them without importing them."""

    def list_commands(self, ctx: Any) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Return a command that has only its line of help."""
        if cmd_name not in COMMANDS:
            return None
        stub = typer.Typer(add_completion=False)
        stub.command(cmd_name, help=COMMANDS[cmd_name][1])(lambda: None)
        return typer.main.get_command(stub)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Return the called command, imported."""
        name, command, rest = super().resolve_command(ctx, args)
        return name, command if name is None else load(name), rest


def load(name: str) -> Any:
    """Import the command called `name`; return it as a click command."""
    place, _, attribute = COMMANDS[name][0].partition(":")
    module = import_module(f"specdec.tools.commands.{place}")
    import_module("specdec.tools.commands.terminal").quiet_pipes()
    found = getattr(module, attribute)
    if not isinstance(found, typer.Typer):
        app = typer.Typer(add_completion=False)
        app.command(name, context_settings=getattr(module, "CONTEXT", None))(found)
        found = app
    return typer.main.get_command(found)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(__version__)
        raise typer.Exit


app = typer.Typer(cls=LazyGroup, no_args_is_help=True, help="Speculative decoding for Hugging Face models.")


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """Speculative decoding for Hugging Face models."""


def main() -> None:
    """Entry point: a user's mistake is one line on stderr and exit status 2."""
    try:
        app()
    except BrokenPipeError:
        raise
    except (ValueError, FloatingPointError, OSError) as error:
        print(f"specdec: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
