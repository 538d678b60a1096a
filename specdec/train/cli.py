"""`specdec train`: regenerate a corpus with the target, fit a head to it, export head and card.

`python -m specdec.train.cli data|fit|run --help`. The last line printed is one JSON object with the results.
"""

import json
import random
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from transformers import PreTrainedModel

from specdec.api import attach
from specdec.models.loader import save_eagle3
from specdec.models.pretrained import BUNDLED, load_pretrained
from specdec.train.card import write_card
from specdec.train.data import Corpus, split_held_out
from specdec.train.hot_vocab import choose_hot_vocab
from specdec.train.new_head import head_config, new_head
from specdec.train.regenerate import Budget, answer, answer_jobs, gsm8k_prompts, self_chat_prompts
from specdec.train.trainer import TrainConfig, Trainer

app = typer.Typer(help="Train draft heads on what the target itself generates.", no_args_is_help=True)

USER_TURN_SHARE = 0.3  # of the generation budget; answers take the rest
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}

Target = Annotated[str, typer.Option(help="Hub id, folder, .gguf file or 'bundled' (SmolLM2-135M-Instruct).")]
Dtype = Annotated[str, typer.Option(help="bfloat16, float16, float32; auto: bfloat16 on CUDA, else float32.")]
Device = Annotated[str, typer.Option(help="cuda, cpu; auto: cuda where there is one.")]


def prepare(
    out: Path,
    *,
    target: str = BUNDLED,
    dtype: str = "auto",
    device: str = "auto",
    gsm8k: Path | None = None,
    num_questions: int | None = None,
    samples_per_question: int = 3,
    chats: int = 0,
    temperatures: str = "0,0.7,1.0",
    max_new_tokens: int = 256,
    gen_minutes: float | None = None,
    max_batch: int = 256,
    seed: int = 0,
) -> dict[str, Any]:
    """Regenerate a corpus with the target, write it to `out`, and return what it holds and what it took."""
    if gsm8k is None and not chats:
        raise ValueError("nothing to generate: pass gsm8k=PATH of train.jsonl, or chats=N, or both")
    model, tokenizer = load(target, dtype, device)
    questions = gsm8k_prompts(gsm8k, tokenizer)[:num_questions] if gsm8k else []
    turn_tokens = min(max_new_tokens, 128) if chats else 0
    max_seq_len = max(map(len, questions), default=0) + turn_tokens + max_new_tokens + 256
    engine = attach(model, None, algo=None, max_batch=max_batch, max_seq_len=max_seq_len)
    laws, chunk = [float(t) for t in temperatures.split(",")], 4 * max_batch
    turns = Budget(gen_minutes * USER_TURN_SHARE if gen_minutes else None)
    chat_prompts = self_chat_prompts(engine, tokenizer, chats, seed, turn_tokens, chunk=chunk, budget=turns)
    turns_report = turns.report()
    jobs = answer_jobs(questions, laws, samples_per_question, seed) + answer_jobs(chat_prompts, laws, 1, seed + 1)
    random.Random(seed).shuffle(jobs)  # so that a run cut short has the same mix
    rest = Budget(gen_minutes - turns.seconds / 60 if gen_minutes else None)
    corpus = answer(engine, jobs, max_new_tokens, chunk=chunk, budget=rest, keep=lambda c: c.save(out))
    engine.detach()
    corpus.save(out)
    if len(corpus):
        print(corpus.show(tokenizer, 0))
    return {
        "corpus": str(out),
        "target": target,
        "questions": len(questions),
        "chats": len(chat_prompts),
        "user_turns": turns_report,
        "answers": rest.report(),
        **_sizes(corpus),
    }


def train(
    corpora: list[Path],
    out: Path,
    config: TrainConfig,
    *,
    target: str = BUNDLED,
    dtype: str = "auto",
    device: str = "auto",
    draft_vocab_size: int = 8192,
    intermediate_size: int | None = None,
    aux_layers: str | None = None,
    held_out: int = 200,
    resume: bool = False,
) -> dict[str, Any]:
    """Fit a head to `corpora`, export it to the folder `out` with its card, and return the held-out rates.

    The checkpoint lies beside `out`, as `<out>.checkpoint.pt`; resume continues from it.
    """
    model, tokenizer = load(target, dtype, device)
    corpus = Corpus.merge([Corpus.load(path) for path in corpora])
    fit, held = split_held_out(corpus, min(held_out, max(1, len(corpus) // 20)), config.seed)
    layers = [int(i) for i in aux_layers.split(",")] if aux_layers else None
    shape = head_config(model, draft_vocab_size, layers, intermediate_size)
    hot = choose_hot_vocab(fit, shape.draft_vocab_size, shape.vocab_size, special_ids(model, tokenizer))
    print(f"hot vocabulary: {hot.ids.numel()} of {shape.vocab_size} tokens cover {hot.coverage:.2%} of the answers")
    head = new_head(model, shape, hot.ids, config.seed)
    checkpoint = out.with_name(out.name + ".checkpoint.pt")
    trainer = Trainer(model, head, fit, held, config, checkpoint)
    if resume:
        trainer.resume(checkpoint)
    result = trainer.fit()
    stored = torch.bfloat16 if trainer.draft is not head else torch.float32
    save_eagle3(out, head, lm_head_from_target=not config.train_lm_head, dtype=stored)
    facts = {
        "target": target,
        **_sizes(fit),
        "held_out_sequences": len(held),
        "coverage": hot.coverage,
        "draft_vocab_size": shape.draft_vocab_size,
        "aux_layers": list(shape.aux_layers),
        "recipe": recipe(config),
        "device": torch.cuda.get_device_name() if trainer.device.type == "cuda" else "CPU",
        **result,
    }
    write_card(out, facts)
    return facts


def load(target: str, dtype: str, device: str) -> tuple[PreTrainedModel, Any]:
    """Target and tokenizer; "auto" is CUDA in bfloat16 where there is a CUDA device."""
    where = ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device
    name = ("bfloat16" if where.startswith("cuda") else "float32") if dtype == "auto" else dtype
    if name not in DTYPES:
        raise ValueError(f"dtype={dtype!r}: expected auto or one of {sorted(DTYPES)}")
    return load_pretrained(target, dtype=DTYPES[name], device=where)


def special_ids(model: PreTrainedModel, tokenizer: Any) -> set[int]:
    """What the hot vocabulary must have: the tokenizer's special tokens and whatever ends a generation."""
    ends = model.generation_config.eos_token_id
    listed = ends if isinstance(ends, list) else [ends]
    vocab_size = model.get_output_embeddings().weight.shape[0]
    return {i for i in (*tokenizer.all_special_ids, *listed) if i is not None and i < vocab_size}


def recipe(c: TrainConfig) -> str:
    """The recipe in a line, for the card."""
    return (
        f"TTT {c.num_steps} steps, soft cross-entropy weighted {c.step_decay}^j"
        + (f" + {c.lk_weight} LK" if c.lk_weight else "")
        + f", AdamW lr {c.lr:g} cosine, warm-up {c.warmup:.1%}, clip {c.clip}, {c.tokens_per_batch} tokens a batch"
    )


def _sizes(corpus: Corpus) -> dict[str, int]:
    return {
        "sequences": len(corpus),
        "corpus_tokens": corpus.num_tokens,
        "answer_tokens": corpus.num_answer_tokens,
    }


def _print_json(result: dict[str, Any]) -> None:
    print(json.dumps(result))


def _config(values: dict[str, Any]) -> TrainConfig:
    return TrainConfig(**{f.name: values[f.name] for f in fields(TrainConfig) if f.name in values})


Out = Annotated[Path, typer.Option(help="Folder of the exported head.")]
Minutes = Annotated[float | None, typer.Option(help="Wall clock of training; the schedule fits itself to it.")]
GenMinutes = Annotated[float | None, typer.Option("--minutes", "--gen-minutes", help="Wall clock of generating.")]
Questions = Annotated[Path | None, typer.Option(help="GSM8K train.jsonl.")]


@app.command()
def data(
    out: Annotated[Path, typer.Option(help="The corpus, a .safetensors file.")],
    gsm8k: Questions = None,
    num_questions: int | None = None,
    samples_per_question: int = 3,
    chats: int = 0,
    temperatures: str = "0,0.7,1.0",
    max_new_tokens: int = 256,
    gen_minutes: GenMinutes = None,
    max_batch: int = 256,
    seed: int = 0,
    target: Target = BUNDLED,
    dtype: Dtype = "auto",
    device: Device = "auto",
) -> None:
    """Regenerate a corpus: GSM8K answers, and chats that the target writes by itself."""
    _print_json(prepare(**locals()))


@app.command()
def fit(
    corpus: Annotated[list[Path], typer.Option(help="Corpus of `data`; may be given several times.")],
    out: Out,
    minutes: Minutes = None,
    epochs: int | None = None,
    max_steps: int | None = None,
    num_steps: int = 5,
    lr: float = TrainConfig.lr,
    lk_weight: float = 0.0,
    tokens_per_batch: int = TrainConfig.tokens_per_batch,
    max_len: int = TrainConfig.max_len,
    chunk_rows: int = TrainConfig.chunk_rows,
    log_every: int = TrainConfig.log_every,
    eval_every: int = TrainConfig.eval_every,
    save_every: int = TrainConfig.save_every,
    train_lm_head: bool = False,
    seed: int = 0,
    draft_vocab_size: int = 8192,
    intermediate_size: int | None = None,
    aux_layers: Annotated[str | None, typer.Option(help="Three layers, such as 1,14,26.")] = None,
    held_out: int = 200,
    resume: bool = False,
    target: Target = BUNDLED,
    dtype: Dtype = "auto",
    device: Device = "auto",
) -> None:
    """Fit an EAGLE-3 head to a corpus and export it."""
    values = dict(locals())
    names = ("target", "dtype", "device", "draft_vocab_size", "intermediate_size", "aux_layers", "held_out", "resume")
    _print_json(train(corpus, out, _config(values), **{name: values[name] for name in names}))


@app.command()
def run(
    out: Out,
    gsm8k: Questions = None,
    samples_per_question: int = 3,
    chats: int = 0,
    max_new_tokens: int = 256,
    gen_minutes: Annotated[float | None, typer.Option(help="Wall clock of generating.")] = None,
    minutes: Minutes = None,
    epochs: int | None = None,
    seed: int = 0,
    target: Target = BUNDLED,
    dtype: Dtype = "auto",
    device: Device = "auto",
) -> None:
    """`data`, then `fit`; the corpus lies beside the head as `<out>.corpus.safetensors`."""
    corpus = out.with_name(out.name + ".corpus.safetensors")
    made = prepare(
        corpus,
        gsm8k=gsm8k,
        samples_per_question=samples_per_question,
        chats=chats,
        max_new_tokens=max_new_tokens,
        gen_minutes=gen_minutes,
        seed=seed,
        target=target,
        dtype=dtype,
        device=device,
    )
    config = TrainConfig(minutes=minutes, epochs=epochs, seed=seed)
    _print_json({"data": made, **train([corpus], out, config, target=target, dtype=dtype, device=device)})


if __name__ == "__main__":
    app()
