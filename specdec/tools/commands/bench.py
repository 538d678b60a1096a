"""`specdec bench`: measurements of drafts, engines and machines, result files as a page, and a comparison of two."""

from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import typer

from specdec import shipped
from specdec.core.functional.sampling import SamplingParams
from specdec.core.text.frequent import frequent_ids, texts_of
from specdec.core.text.prompt_sets import Question, read_file, read_set, sets
from specdec.reach.checkpoints.replacing import write_text
from specdec.reach.heads.load import detect_algo
from specdec.tools.commands.bench_checks import Gsm8k, Lossless
from specdec.tools.commands.bench_grammar import BenchGrammar
from specdec.tools.commands.bench_policy import Policy
from specdec.tools.commands.bench_serve import BenchServe
from specdec.tools.commands.bench_speed import Latency, Peers
from specdec.tools.commands.choices import (
    OnTarget,
    Recorded,
    Reported,
    Row,
    by_name,
    draft_of,
    listed,
    name_of_target,
    numbers,
)
from specdec.tools.measure.acceptance import acceptance
from specdec.tools.measure.compare import THRESHOLD, compare, print_comparison
from specdec.tools.measure.conversations import Conversations
from specdec.tools.measure.drafts import DraftShape
from specdec.tools.measure.page.page import render
from specdec.tools.measure.results import ResultFile
from specdec.tools.measure.rows import read_record
from specdec.tools.measure.speed import speeds
from specdec.tools.options import REQUIRED, Options, argument, command_of, flag, option

SHIPPED = "shipped"
NOT_OF_SPEED = ("max_batch", "predicted", "by_category")


class Acceptance(OnTarget, Recorded):
    """Measure acceptance length (tau) and per-position acceptance of every draft, shape, prompt file and temperature.

    One engine is attached for each draft, shape and draft vocabulary.
    """

    prompts: list[str] = option(
        "Prompt sets (see --data) or JSON lines with turns, question or prompt; commas or repeated.", REQUIRED
    )
    data: Path | None = option(
        "Folder of the prompt sets gsm8k, mt_bench, humaneval, spec_bench, speed_bench, sharegpt."
    )
    by_category: bool = flag("Add a row for every category of the prompts.")
    draft: list[str] | None = option(
        "Folders, Hub ids, names of shipped drafts, 'shipped' (all of them), 'lookup' or 'none'."
    )
    shape: list[str] | None = option("Draft shapes S:K:D, such as 3:1:4,5:8:32; default 3:1:4.")
    temperature: list[str] | None = option("Temperatures, such as 0,1; default 0.")
    sample_drafts: bool = option(
        "Draft chains of sampled requests by sampling.", True, "--sample-drafts/--greedy-drafts"
    )
    lookup: bool = flag("Add prompt lookup to draft trees: what followed the last tokens earlier in the text.")
    draft_vocab: list[str] | None = option(
        "Draft from the first N tokens of the vocabulary only, such as 0,8192; 0, the default: all."
    )
    frequent_in: Path | None = option(
        "Draft from the N most frequent tokens of this text or these JSON lines, not the first N."
    )
    predicted: bool = flag("Greedy chains: add the acceptance that the trainer simulates on the same text.")
    limit: int | None = option("Prompts to read from each file.", min=1)
    max_new_tokens: int = option("Maximum number of new tokens.", 256)
    max_batch: int = option("Requests decoded together.", 8)
    speed: list[str] | None = option(
        "Measure tokens/s at these batch sizes instead, such as 1,8: past EOS, layers compiled, with intervals."
    )
    target_name: str | None = option("Name of the target in the result file; default: its own.")

    def run(self) -> None:
        for name in ("prompts", "draft", "shape", "temperature"):
            if (given := getattr(self, name)) is not None and not listed(given):
                raise ValueError(f"--{name} {','.join(given)!r}: expected at least one")
        shapes = [DraftShape.parse(text) for text in listed(self.shape, "3:1:4")]
        for one in shapes:
            if not one.steps or one.vocab is not None:
                raise ValueError(f"--shape '{one}': expected S:K:D; --draft none drafts nothing, --draft-vocab narrows")
        laws = [_temperature(text) for text in listed(self.temperature, "0")]
        batches = numbers("speed", self.speed, 1)
        if batches and (self.predicted or self.by_category):
            raise ValueError("--speed with --predicted or --by-category: those measure acceptance; drop one")
        vocabs = [size or None for size in numbers("draft-vocab", self.draft_vocab) or (0,)]
        if self.frequent_in is not None and not any(vocabs):
            raise ValueError(
                f"--frequent-in {self.frequent_in}: expected --draft-vocab, the number of tokens, such as 8192"
            )
        questions = {name: self._questions(text) for name, text in by_name(listed(self.prompts), "stem").items()}
        drafts = _drafts(listed(self.draft, SHIPPED))
        for folder, algo in drafts.values():
            if algo == "lookup" and (trees := [str(one) for one in shapes if one.topk > 1]):
                raise ValueError(f"--draft lookup with --shape {','.join(trees)}: lookup drafts only chains; drop one")
            if folder is not None:
                detect_algo(folder)  # so that a mistyped path does not wait for the target to load
        model, tokenizer = self.load()
        asked = {name: Conversations.render(own, tokenizer) for name, own in questions.items()}
        chosen: dict[int | None, Any] = {size: size for size in vocabs}
        if self.frequent_in is not None:
            chosen |= {n: frequent_ids(tokenizer, texts_of(self.frequent_in), n) for n in vocabs if n is not None}
        names = ("sample_drafts", "lookup", "max_new_tokens")
        options = {"temperatures": laws, "tokenizer": tokenizer, **{name: getattr(self, name) for name in names}}
        options |= {"batches": batches} if batches else {name: getattr(self, name) for name in NOT_OF_SPEED}

        def measured() -> Iterator[Row]:
            for name, (source, algo) in drafts.items():
                pairs = list(product(shapes, vocabs))
                for one, vocab in pairs if algo is not None else pairs[:1]:
                    own: dict[str, Any] = {"name": name, "algo": algo, "shape": one, "draft_vocab": chosen[vocab]}
                    yield from (speeds if batches else acceptance)(model, source, asked, **own, **options)

        config = {"target": self.target, "drafts": list(drafts), "dtype": str(model.dtype), "max_batch": self.max_batch}
        file = ResultFile(self.out, "acceptance", self.target_name or name_of_target(self.target), config)
        self.finish({"rows": self.record(file, measured(), _line)}, file.name)

    def _questions(self, text: str) -> list[Question]:
        if text not in sets():
            return read_file(text, self.limit)
        if self.data is None:
            raise ValueError(f"--prompts {text}: a prompt set needs --data DIR, its folder")
        return read_set(text, self.data, self.limit)


class Page(Options):
    """Render result files as one HTML page that opens offline. The last line is the page's path."""

    files: list[Path] = argument("Result files (JSON) of any version.")
    out: Path | None = option("File to write; default: the first file's name with .html.")

    def run(self) -> None:
        path = self.out or self.files[0].with_suffix(".html")
        records = [read_record(file) for file in self.files]
        write_text(path, render(records))
        print(path)


class Compare(Reported):
    """Report what got slower, faster or less accepted beyond noise; exit status 1 if anything got worse."""

    before: Path = argument("Result file (JSON) to compare with.")
    after: Path = argument("Result file (JSON) of the same command, run later.")
    threshold: float = option("Relative change that counts as noise in rows without intervals and repeats.", THRESHOLD)

    def run(self) -> None:
        old, new = read_record(self.before), read_record(self.after)
        found = compare(old, new, self.threshold)
        print_comparison(found, old, new)
        changed = [
            {**c.case, "key": c.key, "before": c.before, "after": c.after, "verdict": c.verdict}
            for c in found.changes
            if c.verdict != "noise"
        ]
        alone = {"only_before": found.only_before, "only_after": found.only_after}
        self.finish({"judged": len(found.changes), "changed": changed, **alone})
        raise typer.Exit(1 if found.of("worse") else 0)


app = typer.Typer(help="Measure speed, acceptance and correctness; show and compare results.", no_args_is_help=True)
for name, kind in (
    *(("acceptance", Acceptance), ("latency", Latency), ("peers", Peers), ("gsm8k", Gsm8k), ("lossless", Lossless)),
    *(("policy", Policy), ("grammar", BenchGrammar), ("serve", BenchServe), ("page", Page), ("compare", Compare)),
):
    app.command(name)(command_of(kind))


def _line(row: Row) -> str:
    if row.get("what") == "speed":
        speed = f"batch {row['batch']}: {row['tok_s']} ± {row['tok_s_ci95']} tokens/s, tau {row['tau']:.3f}"
        return f"{row['draft']} {DraftShape.of(row)} {row['prompts']} T={row['temperature']:g} {speed}"
    prompts = row["prompts"] if row["category"] is None else f"{row['prompts']}: {row['category']}"
    return f"{row['draft']} {DraftShape.of(row)} {prompts} T={row['temperature']:g}: tau {row['tau']:.3f}"


def _drafts(values: list[str]) -> dict[str, tuple[Path | str | None, str | None]]:
    """Return draft and algo of each of `values`, by its name in the results."""
    each = [name for v in values for name in (shipped.available() if v == SHIPPED else [v])]
    return {name: draft_of(value) for name, value in by_name(each, "name").items()}


def _temperature(text: str) -> float:
    try:
        return SamplingParams(temperature=float(text)).temperature
    except ValueError as error:
        raise ValueError(f"--temperature {text!r}: expected 0 or a positive number ({error})") from error
