"""The model "specdec" of lm-eval. Importing this module registers it, since lm-eval's registry has no plug-ins.

On the command line `specdec eval ...` is `lm_eval ...` with the model registered. In Python, import this module and
call `lm_eval.simple_evaluate(model="specdec", model_args={...})`. For an engine that is attached already, see
`specdec.tools.doors.evaluation`.
"""

import sys
from typing import Any

from lm_eval.api.registry import register_model

from specdec import shipped
from specdec.api import attach
from specdec.reach.targets.pretrained import BUNDLED
from specdec.tools.doors.evaluation import EngineLM
from specdec.tools.train.target import load

HFLM_OPTIONS = frozenset(
    {"add_bos_token", "prefix_token_id", "truncation", "think_end_token", "enable_thinking", "chat_template_args"}
)


@register_model("specdec")
class SpecdecLM(EngineLM):
    """Loads a target, attaches an engine, and answers lm-eval's requests with it.

    pretrained: folder, .gguf file or Hub id of the target; by default the bundled one. draft: what `attach` takes, or
    the name of a shipped draft; None decodes plainly. algo: as for `attach`; "lookup" needs no draft. max_length:
    longest context in tokens, the engine's max_seq_len (at most 2048 unless it is given). max_batch: requests decoded
    together; lm-eval's batch_size if that is above 1, else 8. dtype: "auto", "float32", "bfloat16", ... options:
    settings of `EngineConfig`, and those of HFLM in `HFLM_OPTIONS`; prefix_cache is "auto" unless it is given, since
    items of a task share prefixes.
    """

    def __init__(
        self,
        pretrained: str = BUNDLED,
        draft: str | None = None,
        algo: str | None = "auto",
        *,
        max_length: int | None = None,
        max_batch: int | None = None,
        dtype: str = "auto",
        device: str | None = None,
        batch_size: int | str = 1,
        max_batch_size: int | None = None,
        **options: Any,
    ):
        settings: dict[str, Any] = {"prefix_cache": "auto"}
        settings |= {name: value for name, value in options.items() if name not in HFLM_OPTIONS}
        if max_length is not None:
            if "max_seq_len" in settings:
                raise ValueError(f"max_length={max_length} and max_seq_len: two names of one setting; leave one out")
            settings["max_seq_len"] = max_length
        settings["max_batch"] = max_batch or _batch(batch_size, max_batch_size)
        model, tokenizer = load(str(pretrained), dtype, device or "auto")
        draft = None if draft is None else str(shipped.find(draft))
        engine = attach(model, draft, algo, tokenizer=tokenizer, **settings)
        super().__init__(engine, **{name: options[name] for name in options.keys() & HFLM_OPTIONS})
        self.pretrained = pretrained  # the name that lm-eval writes into results


def _batch(batch_size: int | str, most: int | None) -> int:
    """Return max_batch for lm-eval's batch sizes; it passes 1 or "auto" if the user gave no size."""
    size = str(batch_size)
    if size == "1" or size.startswith("auto"):
        return most or 8
    if not size.isdigit() or size == "0":
        raise ValueError(f"batch_size={batch_size!r}: expected auto or an integer of at least 1")
    return int(size)


def run(arguments: list[str]) -> None:
    """Run lm-eval's own command with `arguments`; the model is "specdec" unless they name another."""
    from lm_eval.__main__ import cli_evaluate

    commands = {"run", "ls", "validate"}
    if not commands & set(arguments[:1]):
        arguments = ["run", *arguments]
    named = any(a in ("--model", "-M", "-h", "--help") or a.startswith("--model=") for a in arguments)
    if arguments[0] == "run" and not named:
        arguments = [*arguments, "--model", "specdec"]
    before, sys.argv = sys.argv, ["specdec eval", *arguments]
    try:
        cli_evaluate()
    finally:
        sys.argv = before
