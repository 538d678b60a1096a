"""`specdec bench`: measurements of drafts, engines and machines."""

from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Annotated, Any

import typer

from specdec import shipped
from specdec.core.functional.sampling import SamplingParams
from specdec.core.text.frequent import frequent_ids, texts_of
from specdec.core.text.prompt_sets import Question, read_file, read_set, sets
from specdec.reach.heads.load import detect_algo
from specdec.reach.targets.pretrained import BUNDLED
from specdec.tools.commands.bench_checks import app as checks_app
from specdec.tools.commands.bench_latency import latency_command
from specdec.tools.commands.bench_pages import compare_command, page_command
from specdec.tools.commands.bench_peers import peers_command
from specdec.tools.commands.choices import Json, draft_of, finish, listed, name_of_target, numbers, recorded
from specdec.tools.measure.acceptance import DraftShape, acceptance, case_of, print_rows
from specdec.tools.measure.conversations import Conversations
from specdec.tools.measure.results import ResultFile
from specdec.tools.train.cli import Device, Dtype, Target
from specdec.tools.train.target import load

app = typer.Typer(help="Measurements.", no_args_is_help=True)
app.command("latency")(latency_command)
app.command("peers")(peers_command)
app.add_typer(checks_app)
app.command("page")(page_command)
app.command("compare")(compare_command)

SHIPPED = "shipped"


@app.command("acceptance")
def bench_acceptance(
    prompts: Annotated[
        list[str],
        typer.Option(
            help="Names of sets (see --data) or JSON lines with turns, question or prompt; repeat, or commas."
        ),
    ],
    data: Annotated[
        Path | None,
        typer.Option(help="Folder of the sets gsm8k, mt_bench, humaneval, spec_bench, speed_bench, sharegpt."),
    ] = None,
    by_category: Annotated[
        bool, typer.Option("--by-category", help="Also a row for every category of the prompts.")
    ] = False,
    draft: Annotated[
        list[str] | None,
        typer.Option(help="Folders, Hub ids, names of shipped drafts, 'shipped' (all of them), 'lookup' or 'none'."),
    ] = None,
    shape: Annotated[list[str] | None, typer.Option(help="S:K:D, such as 3:1:4,5:8:32; default 3:1:4.")] = None,
    temperature: Annotated[list[str] | None, typer.Option(help="Such as 0,1; default 0.")] = None,
    sample_drafts: Annotated[
        bool, typer.Option("--sample-drafts/--greedy-drafts", help="How chains of sampled requests are drafted.")
    ] = True,
    draft_vocab: Annotated[
        list[str] | None,
        typer.Option(help="Drafts may propose so many tokens only, the first, such as 0,8192; 0, the default: all."),
    ] = None,
    frequent_in: Annotated[
        Path | None,
        typer.Option(help="The most frequent of this text, or of the strings in these JSON lines, not the first."),
    ] = None,
    predicted: Annotated[
        bool, typer.Option("--predicted", help="Greedy chains: also show what the trainer simulates on the same text.")
    ] = False,
    target: Target = BUNDLED,
    limit: Annotated[int | None, typer.Option(help="Prompts of each file.")] = None,
    max_new_tokens: Annotated[int, typer.Option(help="Tokens to emit at most.")] = 256,
    max_batch: int = 8,
    device: Device = "auto",
    dtype: Dtype = "auto",
    out: Annotated[Path | None, typer.Option(help="Folder for the result file, written after every row.")] = None,
    target_name: Annotated[
        str | None, typer.Option(help="Name of the target in the result file; else its own.")
    ] = None,
    json: Json = False,
) -> None:
    """Measure acceptance length (tau) and per-position acceptance of every draft, shape, prompt file and temperature.

    One engine is attached for each draft, shape and draft vocabulary.
    """
    shapes = [DraftShape.parse(text) for text in listed(shape, "3:1:4")]
    laws = [_temperature(text) for text in listed(temperature, "0")]
    vocabs = [size or None for size in numbers("draft-vocab", draft_vocab) or (0,)]
    if frequent_in is not None and not any(vocabs):
        raise ValueError(f"--frequent-in {frequent_in}: how many of its tokens? Give --draft-vocab, such as 8192")
    questions = {name: _questions(text, data, limit) for name, text in _by_name(listed(prompts), "stem").items()}
    drafts = _drafts(listed(draft, SHIPPED))
    for folder, _algo in drafts.values():
        if folder is not None:
            detect_algo(folder)  # so that a mistyped path does not wait for the target to load
    model, tokenizer = load(target, dtype, device)
    asked = {name: Conversations.render(own, tokenizer) for name, own in questions.items()}

    chosen = {size: _chosen(size, frequent_in, tokenizer) for size in vocabs}
    options: dict[str, Any] = {"temperatures": laws, "tokenizer": tokenizer, "sample_drafts": sample_drafts}
    options |= {"max_new_tokens": max_new_tokens, "max_batch": max_batch}
    options |= {"predicted": predicted, "by_category": by_category}

    def measured() -> Iterator[dict[str, Any]]:
        for name, (source, algo) in drafts.items():
            pairs = list(product(shapes, vocabs))
            for one, vocab in pairs if algo is not None else pairs[:1]:
                own: dict[str, Any] = {"name": name, "algo": algo, "shape": one, "draft_vocab": chosen[vocab]}
                yield from acceptance(model, source, asked, **own, **options)

    config = {"target": target, "drafts": list(drafts), "dtype": str(model.dtype), "max_batch": max_batch}
    with ResultFile(out, "acceptance", target_name or name_of_target(target), config) as file:
        rows = recorded(file, measured(), _line)
    print_rows(rows)
    finish(json, {"rows": rows}, file.name)


def _chosen(size: int | None, frequent_in: Path | None, tokenizer: Any) -> int | list[int] | None:
    """Return what `attach` takes as draft_vocab for so many tokens."""
    if size is None or frequent_in is None:
        return size
    return frequent_ids(tokenizer, texts_of(frequent_in), size)


def _line(row: dict[str, Any]) -> str:
    """Say a row in short."""
    of = f" of {row['draft_vocab']} tokens" if "draft_vocab" in row else ""
    shape = DraftShape(row["steps"], row["topk"], row["draft_tokens"])
    return f"{row['draft']}{of} {shape} {case_of(row)} T={row['temperature']:g}: tau {row['tau']:.3f}"


def _drafts(values: list[str]) -> dict[str, tuple[Path | str | None, str | None]]:
    """Return draft and algo of each of `values`, by its name in the results."""
    each = [name for v in values for name in (shipped.available() if v == SHIPPED else [v])]
    return {name: draft_of(value) for name, value in _by_name(each, "name").items()}


def _questions(text: str, data: Path | None, limit: int | None) -> list[Question]:
    """Return the questions of a set or of a file."""
    if text not in sets():
        return read_file(text, limit)
    if data is None:
        raise ValueError(f"--prompts {text}: its file is looked for in --data DIR, which was not given")
    return read_set(text, data, limit).questions


def _by_name(values: list[str], part: str) -> dict[str, str]:
    """Return paths by their `part`, "name" or "stem", or by the whole path if that is taken."""
    found: dict[str, str] = {}
    for value in values:
        short = getattr(Path(value), part)
        found[value if short in found else short] = value
    return found


def _temperature(text: str) -> float:
    try:
        return SamplingParams(temperature=float(text)).temperature
    except ValueError as error:
        raise ValueError(f"--temperature {text!r}: expected 0 or a positive number ({error})") from error
