"""`specdec eval`: the command of lm-eval, with the model "specdec" in it."""

import typer

AS_THEY_ARE = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}


def evaluate_command(ctx: typer.Context) -> None:
    """Evaluate with lm-eval; its options, for example --model_args pretrained=TARGET,draft=HEAD --tasks gsm8k."""
    try:
        from specdec.evaluation import run
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] == "specdec":
            raise
        raise ValueError(f"specdec eval needs {error.name}: pip install 'specdec-toolkit[eval]'") from error
    run(ctx.args)
