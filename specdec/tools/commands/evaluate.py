"""`specdec eval`: the command of lm-eval, with the model "specdec" in it."""

import typer

CONTEXT = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}


def command(ctx: typer.Context) -> None:
    """Evaluate with lm-eval and its options, such as --model_args pretrained=TARGET --tasks gsm8k.

    Add a draft with pretrained=TARGET,draft=HEAD.
    """
    try:
        from specdec.evaluation import run
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] == "specdec":
            raise
        raise ValueError(f"specdec eval needs {error.name}: pip install 'specdec-toolkit[eval]'") from error
    run(ctx.args)
