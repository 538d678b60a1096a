"""`specdec bench gsm8k` and `specdec bench lossless`: checks that exit with 1 where a text or a likelihood is off."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from specdec import shipped
from specdec.core.text.prompt_sets import read_set
from specdec.core.text.prompts import chat_ids
from specdec.reach.targets.pretrained import BUNDLED
from specdec.tools.commands.choices import Json, draft_of, finish, listed, name_of_target, numbers, recorded
from specdec.tools.measure import gsm8k, lossless
from specdec.tools.measure.results import ResultFile
from specdec.tools.measure.statistics import scipy_stats
from specdec.tools.train.cli import Device, Dtype, Target
from specdec.tools.train.target import device_of, load

app = typer.Typer()

MODES = {"compiled": "piecewise, compiled rounds"}  # names without commas on the command line
ALL_MODES, CPU_MODES = "off,breakable,piecewise,compiled", "off,breakable"  # compiling takes a CPU many minutes
# Few and small prefill graphs: on a CPU, recording and compiling one runs the whole model on as many tokens.
CPU_SETTINGS: dict[str, Any] = {"max_prefill_tokens": 512, "prefill_buckets": (256, 512)}

Data = Annotated[Path, typer.Option(help="Folder with gsm8k/test.jsonl (lossless: and prompts/mt_bench.jsonl).")]
Out = Annotated[Path | None, typer.Option(help="Folder for the result file.")]
Backend = Annotated[str, typer.Option(help="Attention backend, such as triton or flashinfer.")]


@app.command("gsm8k")
def bench_gsm8k(
    data: Data,
    target: Target = BUNDLED,
    draft: Annotated[str, typer.Option(help="Draft of the modes that speculate, or 'none': plain decoding only.")] = (
        "shipped"
    ),
    mode: Annotated[
        list[str] | None,
        typer.Option(
            help="Of off, breakable, piecewise, compiled (rounds, too); default: all, on a CPU the first two."
        ),
    ] = None,
    limit: Annotated[int, typer.Option(min=1, help="Items whose gold solutions are scored.")] = 1319,
    answers: Annotated[int, typer.Option(min=1, help="Items that are answered greedily.")] = 200,
    max_new_tokens: int = 256,
    dtype: Annotated[list[str] | None, typer.Option(help="Default: float32 and, on CUDA, bfloat16 after it.")] = None,
    backend: Backend = "auto",
    device: Device = "auto",
    seed: Annotated[int, typer.Option(help="Decides how many items a prefill packs.")] = 0,
    out: Out = None,
    json: Json = False,
) -> None:
    """Compare likelihoods and answers of every prefill mode, with and without a draft, with plain decoding without
    prefill graphs.

    Exits with 1 where a mode differs beyond chance.
    """
    scipy_stats()  # so that it is not missed after the measurement
    where = device_of(device)
    modes = [_mode(name) for name in listed(mode, ALL_MODES if where.startswith("cuda") else CPU_MODES)]
    records = [q.record for q in read_set("gsm8k", data, max(limit, answers)).questions]
    settings: dict[str, Any] = {"max_batch": 32, "max_seq_len": 1024, "backend": backend, "seed": seed}
    settings |= {} if where.startswith("cuda") else CPU_SETTINGS
    dtypes = listed(dtype, "float32,bfloat16" if where.startswith("cuda") else "float32")
    drafts = [(None, None)] if draft == "none" else [(None, None), draft_of(draft)]

    def measured() -> Iterator[dict[str, Any]]:
        for name in dtypes:
            model, tokenizer = load(target, name, where)
            items = gsm8k.Items.of(records, tokenizer, limit, answers)
            yield from gsm8k.run(model, tokenizer, items, drafts, modes, max_new_tokens=max_new_tokens, **settings)

    with ResultFile(out, "gsm8k", name_of_target(target), {"device": where, "backend": backend}) as file:
        rows = recorded(file, measured(), lambda row: row["says"])
    gsm8k.print_table(rows)
    failed = [problem for row in rows for problem in gsm8k.problems(row)]
    for problem in failed:
        print(f"differs: {problem}", file=sys.stderr)
    finish(json, {"failed": failed, "rows": rows}, file.name)
    raise typer.Exit(1 if failed else 0)


@app.command("lossless")
def bench_lossless(
    data: Data,
    target: Target = BUNDLED,
    draft: Annotated[list[str] | None, typer.Option(help="Folders, Hub ids, shipped names; default: all.")] = None,
    limit: Annotated[int, typer.Option(min=1, help="Questions of each of GSM8K and MT-bench (first turns).")] = 30,
    batch: Annotated[list[str] | None, typer.Option(help="Batch sizes of the greedy check; default 1,4.")] = None,
    temperature: Annotated[float, typer.Option(help="Of the sampled check; 0 leaves it out.")] = 1.0,
    sampled_batch: Annotated[int, typer.Option(min=1, help="Batch size of the sampled check.")] = 4,
    max_new_tokens: int = 128,
    dtype: Dtype = "float32",
    backend: Backend = "auto",
    device: Device = "auto",
    out: Out = None,
    json: Json = False,
) -> None:
    """Compare greedy text with `model.generate`, and sampled text with other ways of running the same round, for every
    draft, chains and trees.

    Exits with 1 where a difference is not explained by rounding.
    """
    scipy_stats()
    drafts = {Path(name).name: draft_of(name) for name in listed(draft, ",".join(shipped.available()))}
    batches = numbers("batch", batch) or (1, 4)
    if min(batches) < 1:
        raise ValueError(f"--batch {batches}: expected at least 1")
    sets = [read_set(name, data, limit) for name in ("gsm8k", "mt_bench")]
    model, tokenizer = load(target, dtype, device)
    prompts = chat_ids([q.turns[0] for one in sets for q in one.questions], tokenizer)
    measured = lossless.run(
        model,
        prompts,
        drafts,
        batches=batches,
        temperature=temperature,
        sampled_batch=sampled_batch,
        max_new_tokens=max_new_tokens,
        backend=backend,
        tokenizer=tokenizer,
    )
    what = f"lossless-{backend}-{str(model.dtype).removeprefix('torch.')}"
    with ResultFile(out, what, name_of_target(target), {"device": str(model.device)}) as file:
        rows = recorded(file, measured)
    lossless.print_table(rows)
    result = {key: sum(r[key] for r in rows) for key in ("compared", "equal", "unexplained")}
    finish(json, {**result, "configs": rows}, file.name)
    raise typer.Exit(1 if result["unexplained"] else 0)


def _mode(name: str) -> str:
    """Return a mode's name in rows; ValueError lists those of the command line."""
    found = MODES.get(name, name)
    if found not in gsm8k.MODES:
        raise ValueError(f"--mode {name!r}: expected off, breakable, piecewise or compiled")
    return found
