"""`specdec bench peers`: reads the options, loads what all ways share, prints and writes the rows."""

import warnings
from itertools import cycle, islice
from logging import ERROR, getLogger
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from transformers.utils import logging

from specdec import __version__, shipped
from specdec.core.text.prompts import chat_ids, read_questions
from specdec.reach.heads.load import detect_algo
from specdec.reach.targets.pretrained import BUNDLED, load_draft
from specdec.tools.commands.choices import Json, check_alone, draft_of, finish, named_draft, recorded
from specdec.tools.commands.demo import PROMPTS
from specdec.tools.measure.peers.peer import Task, measure, print_rows
from specdec.tools.measure.peers.ways import ways
from specdec.tools.measure.results import ResultFile
from specdec.tools.measure.shapes import IMPOSED, make_head, make_target
from specdec.tools.train.cli import Device, Dtype
from specdec.tools.train.target import device_of, dtype_of, load


def peers_command(
    target: Annotated[str | None, typer.Option(help="Hub id, folder, .gguf file or 'bundled', the default.")] = None,
    draft: Annotated[
        str | None,
        typer.Option(help="The engine's: folder, Hub id, shipped name, 'lookup', 'none'; default: shipped."),
    ] = None,
    assistant: Annotated[
        str | None, typer.Option(help="A small LM of the vocabulary, for the others; default: shipped-standalone.")
    ] = None,
    shape: Annotated[
        str | None, typer.Option(help="Instead of a target, random weights of a named shape; acceptance is imposed.")
    ] = None,
    prompts: Annotated[Path | None, typer.Option(help="JSON lines, such as GSM8K's; default: the demo's four.")] = None,
    limit: Annotated[int | None, typer.Option(help="Requests at once; default 32 on CUDA, else 4.")] = None,
    few: Annotated[int, typer.Option(help="Requests of the ways that take one at a time.")] = 4,
    tokens: Annotated[int, typer.Option(help="Length of random prompts (--shape).")] = 128,
    new_tokens: Annotated[int | None, typer.Option(help="Tokens to emit at most; default 128, or 32 on CPU.")] = None,
    compile: Annotated[bool, typer.Option("--compile", help="Also engines with compiled layers.")] = False,
    out: Annotated[Path | None, typer.Option(help="Folder for the result file, written after every row.")] = None,
    device: Device = "auto",
    dtype: Dtype = "auto",
    json: Json = False,
) -> None:
    """Time the same greedy requests by transformers' own ways, other libraries and engines, in one process.

    Texts end at EOS or --new-tokens. Ways that take no batch get --few requests, one by one. What fails or is not
    installed is a row that says so.
    """
    where = device_of(device)
    is_large = where.startswith("cuda")
    num, length = limit or (32 if is_large else 4), new_tokens or (128 if is_large else 32)
    for name, value in (("limit", num), ("few", few), ("tokens", tokens), ("new-tokens", length)):
        if value < 1:
            raise ValueError(f"--{name} {value}: expected at least 1")
    logging.set_verbosity_error()
    getLogger("ContinuousBatchingLogger").setLevel(ERROR)  # warns of what is meant here
    warnings.filterwarnings("ignore", message="synthetic_acceptance is on")
    if shape is not None:
        check_alone(shape, target=target, draft=draft, assistant=assistant, prompts=prompts)
        model: Any = make_target(shape, where, dtype_of(dtype, where))
        draws = torch.randint(3, model.config.vocab_size, (num, tokens), generator=torch.Generator().manual_seed(0))
        head = make_head(shape, model)
        task = Task(model, draws.tolist(), length, head, "eagle3", few=few, is_random=True)
    else:
        questions = list(PROMPTS) if prompts is None else read_questions(prompts)
        source, algo = _draft(draft, target)
        model, tokenizer = load(target or BUNDLED, dtype, where)
        small = _assistant(assistant, target, model)
        ids = islice(cycle(chat_ids(questions, tokenizer)), num)
        task = Task(model, list(ids), length, source, algo, small, few)
    name = shape or Path(target or BUNDLED).name.lower()
    config = {"version": __version__, "target": target, "draft": draft, "assistant": assistant}
    config |= {"prompts": None if prompts is None else str(prompts), "dtype": str(task.model.dtype)}
    config |= {"acceptance": IMPOSED} if task.is_random else {}
    with ResultFile(out, "peers", name, config) as file:
        measured = ({"shape": name, **row} for row in measure(task, ways(task, compile=compile)))
        rows = recorded(file, measured, _line)
    print_rows(rows)
    if task.is_random:
        print(IMPOSED)
    finish(json, {"rows": rows}, file.name)


def _line(row: dict[str, Any]) -> str:
    """Say a row in short."""
    return f"{row['what']}: " + (f"{row['tokens_per_s']} tokens/s" if "tokens_per_s" in row else row["error"])


def _draft(draft: str | None, target: str | None) -> tuple[Path | str | None, str | None]:
    """Return the engine's draft and its algorithm, by default the shipped head of the bundled target."""
    source, algo = draft_of(named_draft(draft, target))
    return source, detect_algo(source) if source is not None else algo


def _assistant(assistant: str | None, target: str | None, model: Any) -> Any:
    """Return the small LM that drafts for the others, or None; by default the shipped one of the bundled target."""
    name = assistant or ("shipped-standalone" if target in (None, BUNDLED) else "none")
    if name == "none":
        return None
    return load_draft(shipped.find(name), dtype=model.dtype, device=model.device)[0]
