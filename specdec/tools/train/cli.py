"""`specdec train`: regenerate a corpus with the target, fit a draft to it, export draft and card.

`python -m specdec.tools.train.cli data|fit|run --help`. The last line printed is one JSON object with the results.
"""

import json
import math
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any

import typer

from specdec.reach.checkpoints.replacing import check_free
from specdec.reach.targets.pretrained import BUNDLED
from specdec.tools.train.config import HeadShape, TrainConfig, recipe
from specdec.tools.train.fit import check_checkpoint, checkpoint_of, train
from specdec.tools.train.generation import Generation, prepare

app = typer.Typer(help="Train drafts on what the target itself generates.", no_args_is_help=True)

Algo = Annotated[str, typer.Option(help="eagle (EAGLE-1/2), eagle3, nextn (MTP), or standalone (a small LM).")]
Target = Annotated[str, typer.Option(help="Hub id, folder, .gguf file or 'bundled' (SmolLM2-135M-Instruct).")]
Dtype = Annotated[str, typer.Option(help="float32, bfloat16, float16; auto: bfloat16 on CUDA, else float32.")]
Device = Annotated[str, typer.Option(help="cuda, cpu; auto: cuda where there is one.")]
Out = Annotated[Path, typer.Option(help="Folder of the exported draft.")]
Questions = Annotated[Path | None, typer.Option(help="GSM8K train.jsonl.")]
Temperatures = Annotated[str, typer.Option(help="Temperatures of answers, taken in turns.")]
GenMinutes = Annotated[float | None, typer.Option("--minutes", "--gen-minutes", help="Wall clock of generating.")]
MaxBatch = Annotated[int | None, typer.Option(help="Requests decoded together; default 512 on CUDA, else 32.")]
Shard = Annotated[
    str, typer.Option(help="i/n: make part i (from 0) of n of the questions' jobs, and its share of the chats.")
]
Compile = Annotated[bool, typer.Option("--compile", help="Compile the target's layers for generating.")]
Minutes = Annotated[float | None, typer.Option(help="Wall clock of training; the schedule adapts to it.")]
MaxTokens = Annotated[int | None, typer.Option(help="Tokens seen in training, without padding.")]
Corpora = Annotated[list[Path], typer.Option(help="Corpus of `data`; may be given several times.")]
# None in the options below: the value of the algorithm's recipe (`specdec.tools.train.config.training_of`)
NumSteps = Annotated[int | None, typer.Option(help="Draft steps unrolled.")]
Recipe = Annotated[float | None, typer.Option(help="Default: the algorithm's recipe.")]
Layers = Annotated[str | None, typer.Option(help="eagle3: three layers, such as 1,14,26.")]
Vocab = Annotated[int, typer.Option(help="eagle3: tokens that the head scores.")]
Intermediate = Annotated[int | None, typer.Option(help="Width of the draft's MLP.")]
CopyLayer = Annotated[bool, typer.Option(help="nextn: start from a copy of the target's last layer, not at random.")]
Init = Annotated[str | None, typer.Option(help="A trained draft to continue from: a folder or Hub id.")]
Student = Annotated[int, typer.Option(help="standalone: the small Llama's shape.")]
Overwrite = Annotated[bool, typer.Option(help="Replace another draft in the folder; --resume implies it.")]
Format = Annotated[str, typer.Option(help="standalone: gguf, or safetensors.")]
EmbedType = Annotated[str, typer.Option(help="standalone: the embedding in GGUF, Q4_0, Q5_0 or Q8_0.")]
CompileLoss = Annotated[bool | None, typer.Option("--compile/--no-compile", help="Fused losses; default on CUDA.")]


@app.command()
def data(
    out: Annotated[Path, typer.Option(help="The corpus, a .safetensors file.")],
    gsm8k: Questions = None,
    num_questions: int | None = None,
    samples_per_question: int = Generation.samples_per_question,
    chats: int = 0,
    temperatures: Temperatures = Generation.temperatures,
    max_new_tokens: int = Generation.max_new_tokens,
    gen_minutes: GenMinutes = None,
    max_batch: MaxBatch = None,
    shard: Shard = "0/1",
    compile: Compile = False,
    seed: int = 0,
    overwrite: Annotated[bool, typer.Option(help="Replace a corpus that is there.")] = False,
    target: Target = BUNDLED,
    dtype: Dtype = "auto",
    device: Device = "auto",
) -> None:
    """Regenerate a corpus: GSM8K answers, and chats that the target writes by itself."""
    _print_json(prepare(**_picked(Generation, locals()), **_where(locals()), out=out, overwrite=overwrite))


@app.command()
def fit(
    corpus: Corpora,
    out: Out,
    algo: Algo = "eagle3",
    minutes: Minutes = None,
    epochs: int | None = None,
    max_steps: int | None = None,
    max_tokens: MaxTokens = None,
    num_steps: NumSteps = None,
    step_decay: Recipe = None,
    soft_weight: Recipe = None,
    feature_weight: Recipe = None,
    lk_weight: Recipe = None,
    feature_noise: Recipe = None,
    prompt_weight: Recipe = None,
    lr: Recipe = None,
    warmup: Recipe = None,
    clip: Recipe = None,
    tokens_per_batch: int = TrainConfig.tokens_per_batch,
    max_len: int = TrainConfig.max_len,
    chunk_rows: int = TrainConfig.chunk_rows,
    log_every: int = TrainConfig.log_every,
    eval_every: int = TrainConfig.eval_every,
    save_every: int = TrainConfig.save_every,
    compile: CompileLoss = None,
    train_lm_head: bool = False,
    seed: int = 0,
    init: Init = None,
    intermediate_size: Intermediate = None,
    draft_vocab_size: Vocab = HeadShape.draft_vocab_size,
    aux_layers: Layers = None,
    copy_layer: CopyLayer = HeadShape.copy_layer,
    hidden_size: Student = HeadShape.hidden_size,
    num_layers: Student = HeadShape.num_layers,
    num_heads: Student = HeadShape.num_heads,
    num_kv_heads: Student = HeadShape.num_kv_heads,
    file_format: Format = HeadShape.file_format,
    embed_type: EmbedType = HeadShape.embed_type,
    held_out: int = 200,
    resume: bool = False,
    overwrite: Overwrite = False,
    target: Target = BUNDLED,
    dtype: Dtype = "auto",
    device: Device = "auto",
) -> None:
    """Fit a draft to corpora and export it."""
    values = dict(locals())
    values["aux_layers"] = _layers(aux_layers) if aux_layers else None
    config = recipe(algo, **_picked(TrainConfig, values))
    shape = HeadShape(**_picked(HeadShape, values))
    where = {**_where(values), "resume": resume, "overwrite": overwrite}
    result = train(corpus, out, config, algo=algo, shape=shape, held_out=held_out, **where)
    _print_json(result)


@app.command()
def run(
    out: Out,
    algo: Algo = "eagle3",
    gsm8k: Questions = None,
    samples_per_question: int = Generation.samples_per_question,
    chats: int = 0,
    max_new_tokens: int = Generation.max_new_tokens,
    gen_minutes: Annotated[float | None, typer.Option(help="Wall clock of generating.")] = None,
    minutes: Minutes = None,
    epochs: int | None = None,
    max_steps: int | None = None,
    max_tokens: MaxTokens = None,
    max_batch: MaxBatch = None,
    seed: int = 0,
    overwrite: Overwrite = False,
    target: Target = BUNDLED,
    dtype: Dtype = "auto",
    device: Device = "auto",
) -> None:
    """Run `data`, then `fit`; the corpus is written beside the draft as `<out>.corpus.safetensors`."""
    values = dict(locals())
    config = recipe(algo, **_picked(TrainConfig, values))
    check_free(out, overwrite)
    check_checkpoint(checkpoint_of(out), False, overwrite)
    corpus = out.with_name(out.name + ".corpus.safetensors")
    made = prepare(**_picked(Generation, values), **_where(values), out=corpus, overwrite=overwrite)
    _print_json({"data": made, **train([corpus], out, config, algo=algo, overwrite=overwrite, **_where(values))})


def _layers(text: str) -> tuple[int, ...]:
    parts = text.split(",")
    if not all(part.strip().isdecimal() for part in parts):
        raise ValueError(f"--aux-layers {text!r}: expected layers, such as 1,14,26")
    return tuple(map(int, parts))


def _picked(kind: type, values: dict[str, Any]) -> dict[str, Any]:
    """Return the entries of `values` that are fields of the dataclass `kind`."""
    return {f.name: values[f.name] for f in fields(kind) if f.name in values}


def _where(values: dict[str, Any]) -> dict[str, Any]:
    return {name: values[name] for name in ("target", "dtype", "device")}


def _print_json(result: dict[str, Any]) -> None:
    print(json.dumps(_without_nan(result), allow_nan=False))


def _without_nan(value: Any) -> Any:
    """Return `value` with None for numbers that JSON does not have."""
    if isinstance(value, dict):
        return {name: _without_nan(part) for name, part in value.items()}
    if isinstance(value, list):
        return [_without_nan(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


if __name__ == "__main__":
    app()
