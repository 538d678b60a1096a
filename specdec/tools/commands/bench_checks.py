"""`specdec bench gsm8k` and `specdec bench lossless`: checks that exit with 1 if a text or a likelihood is wrong."""

import sys
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import torch
import typer

from specdec import shipped
from specdec.core.text.prompt_sets import read_set
from specdec.core.text.prompts import chat_ids
from specdec.tools.commands.choices import OnTarget, Recorded, Row, by_name, draft_of, listed, name_of_target, numbers
from specdec.tools.measure import bitwise, gsm8k, lossless
from specdec.tools.measure.drafts import DraftShape
from specdec.tools.measure.results import ResultFile
from specdec.tools.measure.statistics import scipy_stats
from specdec.tools.options import REQUIRED, option
from specdec.tools.train.target import device_of, load

MODES = {"compiled": "piecewise, compiled rounds"}  # names without commas on the command line
ALL_MODES, CPU_MODES = "off,breakable,piecewise,compiled", "off,breakable"  # compiling takes a CPU many minutes
# Few and small prefill graphs: on a CPU, recording and compiling one runs the whole model on as many tokens.
CPU_SETTINGS: dict[str, Any] = {"max_prefill_tokens": 512, "prefill_buckets": (256, 512)}

CHECKS = ("text", "bits")
SHAPES = "3:1:4,4:4:16"  # of the bits check
CUDA_SHAPES = "3:1:4,5:1:6,3:4:8,4:4:16,5:8:32,6:8:64"


class Checking(OnTarget, Recorded):
    """Options of both checks."""

    data: Path = option("Folder with gsm8k/test.jsonl (lossless: and prompts/mt_bench.jsonl).", REQUIRED)
    backend: str = option("Attention backend, such as triton or flashinfer.", "auto")


class Gsm8k(Checking):
    """Compare likelihoods and answers of every prefill mode, drafted or not, to plain decoding without prefill graphs.

    Exits with 1 if a mode differs beyond chance.
    """

    draft: str = option("Draft of the modes that speculate, or 'none': plain decoding only.", "shipped")
    mode: list[str] | None = option(
        "Modes: off, breakable, piecewise, compiled (rounds, too); default: all, on a CPU the first two."
    )
    limit: int = option("Items whose gold solutions to score.", 1319, min=1)
    answers: int = option("Items to answer greedily.", 200, min=1)
    max_new_tokens: int = option("Maximum number of new tokens.", 256)
    dtype: list[str] | None = option("Dtypes; default: float32, then on CUDA bfloat16.")  # type: ignore[assignment]
    seed: int = option("Seed of how many items each prefill packs.", 0)

    def run(self) -> None:
        scipy_stats()  # raises now rather than after the measurement
        where = device_of(self.device)
        is_cuda = where.startswith("cuda")
        modes = [_mode(name) for name in listed(self.mode, ALL_MODES if is_cuda else CPU_MODES)]
        records = [q.record for q in read_set("gsm8k", self.data, max(self.limit, self.answers))]
        settings: dict[str, Any] = {"max_batch": 32, "max_seq_len": 1024, "backend": self.backend, "seed": self.seed}
        settings |= {"max_new_tokens": self.max_new_tokens, **({} if is_cuda else CPU_SETTINGS)}
        drafts = [(None, None)] if self.draft == "none" else [(None, None), draft_of(self.draft)]

        def measured() -> Iterator[Row]:
            for name in listed(self.dtype, "float32,bfloat16" if is_cuda else "float32"):
                model, tokenizer = load(self.target, name, where)
                items = gsm8k.Items.of(records, tokenizer, self.limit, self.answers)
                yield from gsm8k.run(model, tokenizer, items, drafts, modes, **settings)

        file = ResultFile(self.out, "gsm8k", name_of_target(self.target), {"device": where, "backend": self.backend})
        rows = self.record(file, measured(), lambda row: row["says"])
        for row in rows[1:]:
            print(row["says"])
        failed = [problem for row in rows for problem in gsm8k.problems(row)]
        for problem in failed:
            print(f"differs: {problem}", file=sys.stderr)
        self.finish({"failed": failed, "rows": rows}, file.name)
        raise typer.Exit(1 if failed else 0)


class Lossless(Checking):
    """Compare greedy text with `model.generate`, sampled text with other ways of running the same round, and tokens and
    logits by bits with plain decoding of the same engine, for every draft, chains and trees.

    Exits with 1 if a text differs and rounding does not explain it, or if bits differ although the engine had compared
    its own as equal (`Engine.report().bits`).
    """

    check: list[str] | None = option("Checks: text, bits; default: text, and bits for 16-bit dtypes.")
    draft: list[str] | None = option(
        "Drafts: folders, Hub ids, shipped names, lookup; default: all shipped, for bits lookup."
    )
    limit: int = option("Questions from each of GSM8K and MT-bench (first turns).", 30, min=1)
    batch: list[str] | None = option("Batch sizes; default for greedy text 1,4, for bits 4,1, on CUDA 32,1,8.")
    temperature: float = option("Temperature of sampled text; 0 skips it.", 1.0)
    shape: list[str] | None = option(f"Draft shapes S:K:D of bits; default {SHAPES}, on CUDA {CUDA_SHAPES}.")
    way: list[str] | None = option(
        f"Ways to serve prompts, of bits: {', '.join(bitwise.WAYS)}; default: all, on a CPU the first four."
    )
    max_new_tokens: int = option("Maximum number of new tokens.", 128)
    dtype: str = option("float32, bfloat16, float16; auto: bfloat16 on CUDA, else float32.", "float32")

    def run(self) -> None:
        is_cuda = device_of(self.device).startswith("cuda")
        checks = _known("check", self.check, CHECKS, CHECKS)
        ways = _known("way", self.way, bitwise.WAYS, bitwise.WAYS if is_cuda else bitwise.ON_CPU)
        shapes = [DraftShape.parse(text) for text in listed(self.shape, CUDA_SHAPES if is_cuda else SHAPES)]
        batches = numbers("batch", self.batch, 1)
        if "text" in checks:
            scipy_stats()
        sets = [read_set(name, self.data, self.limit) for name in ("gsm8k", "mt_bench")]
        model, tokenizer = self.load()
        if self.check is None and model.dtype == torch.float32:
            checks = ["text"]
        prompts = chat_ids([q.turns[0] for questions in sets for q in questions], tokenizer)

        def measured() -> Iterator[Row]:
            if "text" in checks:
                check = lossless.Check(model, prompts, self.max_new_tokens)
                options: dict[str, Any] = {name: getattr(self, name) for name in ("temperature", "backend")}
                options |= {"tokenizer": tokenizer, "batches": batches or (1, 4)}
                yield from lossless.run(check, self._drafts(), **options)
            if "bits" in checks:
                sizes = batches or ((32, 1, 8) if is_cuda else (4, 1))
                plan = bitwise.Plan(shapes, sizes, ways, self.max_new_tokens)
                yield from bitwise.run(model, prompts, self._drafts("lookup"), plan, backend=self.backend)

        what = f"lossless-{self.backend}-{str(model.dtype).removeprefix('torch.')}"
        file = ResultFile(self.out, what, name_of_target(self.target), {"device": str(model.device)})
        rows = self.record(file, measured(), _line)
        for said in bitwise.in_words(rows):
            print(said)
        keys = ("compared", "equal", "unexplained", "emitted", "logits_differ")
        result = {key: sum(r[key] for r in rows if key in r) for key in keys}
        self.finish({**result, "configs": rows}, file.name)
        raise typer.Exit(1 if result["unexplained"] else 0)

    def _drafts(self, *others: str) -> dict[str, tuple[Any, str | None]]:
        """Return draft and algo by name; without --draft, of all shipped drafts and of `others`."""
        named = by_name(listed(self.draft, ",".join([*shipped.available(), *others])), "name")
        return {name: draft_of(value) for name, value in named.items()}


def _line(row: Row) -> str:
    what = [str(row[key]) for key in ("check", "draft", "num_steps", "topk", "way", "batch") if key in row]
    differ = f", {row['logits_differ']:,} rows of logits differ" if "logits_differ" in row else ""
    return f"{' '.join(what)}: {row['equal']} of {row['compared']} texts equal{differ}, {row['seconds']} s"


def _known(option: str, values: list[str] | None, known: Collection[str], default: Collection[str]) -> list[str]:
    """Return the values of an option, each of `known`."""
    found = listed(values, ",".join(default))
    for value in found:
        if value not in known:
            raise ValueError(f"--{option} {value!r}: expected any of {', '.join(known)}")
    return found


def _mode(name: str) -> str:
    """Return a mode's name in rows; ValueError lists those of the command line."""
    found = MODES.get(name, name)
    if found not in gsm8k.MODES:
        raise ValueError(f"--mode {name!r}: expected off, breakable, piecewise or compiled")
    return found
