"""`specdec bench gsm8k` and `specdec bench lossless`: checks that exit with 1 where a text or a likelihood is off."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer

from specdec import shipped
from specdec.core.text.prompt_sets import read_set
from specdec.core.text.prompts import chat_ids
from specdec.tools.commands.choices import OnTarget, Recorded, Row, draft_of, listed, name_of_target, numbers
from specdec.tools.measure import gsm8k, lossless
from specdec.tools.measure.results import ResultFile
from specdec.tools.measure.statistics import scipy_stats
from specdec.tools.options import REQUIRED, option
from specdec.tools.train.target import device_of, load

MODES = {"compiled": "piecewise, compiled rounds"}  # names without commas on the command line
ALL_MODES, CPU_MODES = "off,breakable,piecewise,compiled", "off,breakable"  # compiling takes a CPU many minutes
# Few and small prefill graphs: on a CPU, recording and compiling one runs the whole model on as many tokens.
CPU_SETTINGS: dict[str, Any] = {"max_prefill_tokens": 512, "prefill_buckets": (256, 512)}


class Checking(OnTarget, Recorded):
    """Options of both checks."""

    data: Path = option("Folder with gsm8k/test.jsonl (lossless: and prompts/mt_bench.jsonl).", REQUIRED)
    backend: str = option("Attention backend, such as triton or flashinfer.", "auto")


class Gsm8k(Checking):
    """Compare likelihoods and answers of every prefill mode, with and without a draft, with plain decoding without
    prefill graphs.

    Exits with 1 where a mode differs beyond chance.
    """

    draft: str = option("Draft of the modes that speculate, or 'none': plain decoding only.", "shipped")
    mode: list[str] | None = option(
        "Of off, breakable, piecewise, compiled (rounds, too); default: all, on a CPU the first two."
    )
    limit: int = option("Items whose gold solutions are scored.", 1319, min=1)
    answers: int = option("Items that are answered greedily.", 200, min=1)
    max_new_tokens: int = option("Tokens to emit at most.", 256)
    dtype: list[str] | None = option("Default: float32 and, on CUDA, bfloat16 after it.")  # type: ignore[assignment]
    seed: int = option("Decides how many items a prefill packs.", 0)

    def run(self) -> None:
        scipy_stats()  # so that it is not missed after the measurement
        where = device_of(self.device)
        is_cuda = where.startswith("cuda")
        modes = [_mode(name) for name in listed(self.mode, ALL_MODES if is_cuda else CPU_MODES)]
        records = [q.record for q in read_set("gsm8k", self.data, max(self.limit, self.answers)).questions]
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
    """Compare greedy text with `model.generate`, and sampled text with other ways of running the same round, for every
    draft, chains and trees.

    Exits with 1 where a difference is not explained by rounding.
    """

    draft: list[str] | None = option("Folders, Hub ids, shipped names; default: all.")
    limit: int = option("Questions of each of GSM8K and MT-bench (first turns).", 30, min=1)
    batch: list[str] | None = option("Batch sizes of the greedy check; default 1,4.")
    temperature: float = option("Of the sampled check; 0 leaves it out.", 1.0)
    sampled_batch: int = option("Batch size of the sampled check.", 4, min=1)
    max_new_tokens: int = option("Tokens to emit at most.", 128)
    dtype: str = option("float32, bfloat16, float16; auto: bfloat16 on CUDA, else float32.", "float32")

    def run(self) -> None:
        scipy_stats()
        drafts = {Path(name).name: draft_of(name) for name in listed(self.draft, ",".join(shipped.available()))}
        batches = numbers("batch", self.batch, 1) or (1, 4)
        sets = [read_set(name, self.data, self.limit) for name in ("gsm8k", "mt_bench")]
        model, tokenizer = self.load()
        prompts = chat_ids([q.turns[0] for one in sets for q in one.questions], tokenizer)
        names = ("temperature", "sampled_batch", "backend")
        options = {"batches": batches, "tokenizer": tokenizer, **{name: getattr(self, name) for name in names}}
        what = f"lossless-{self.backend}-{str(model.dtype).removeprefix('torch.')}"
        file = ResultFile(self.out, what, name_of_target(self.target), {"device": str(model.device)})
        check = lossless.Check(model, prompts, self.max_new_tokens)
        rows = self.record(file, lossless.run(check, drafts, **options))
        result = {key: sum(r[key] for r in rows) for key in ("compared", "equal", "unexplained")}
        self.finish({**result, "configs": rows}, file.name)
        raise typer.Exit(1 if result["unexplained"] else 0)


def _mode(name: str) -> str:
    """Return a mode's name in rows; ValueError lists those of the command line."""
    found = MODES.get(name, name)
    if found not in gsm8k.MODES:
        raise ValueError(f"--mode {name!r}: expected off, breakable, piecewise or compiled")
    return found
