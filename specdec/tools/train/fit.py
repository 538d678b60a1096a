"""Trains a draft on corpora: splits them, makes the student (the draft in training), trains it and exports it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from specdec.core.draft.head import BlockDraftHead, DraftHead
from specdec.core.ranges import whole
from specdec.core.text.prompts import tokenizer_fingerprint
from specdec.reach.checkpoints.replacing import check_free, check_place, write_text
from specdec.reach.heads.custom_generate import FILE
from specdec.reach.heads.format import HeadFormat
from specdec.reach.heads.formats import formats
from specdec.reach.heads.fresh import with_vocab
from specdec.reach.heads.load import load_head, save_head
from specdec.reach.targets.pretrained import BUNDLED, load_draft
from specdec.reach.targets.shape import TargetShape, vocab_size_of
from specdec.tools.train.config import HeadShape, TrainConfig, training_of
from specdec.tools.train.data import Corpus, choose_hot_vocab, split_held_out
from specdec.tools.train.objectives import HeadObjective, Objective
from specdec.tools.train.standalone import (
    MLP_WIDTH,
    StandaloneObjective,
    check_blocks,
    check_gguf,
    new_student,
    plain_llama,
    write_gguf,
    write_note,
    write_safetensors,
)
from specdec.tools.train.target import load, special_ids
from specdec.tools.train.trainer import Trainer
from specdec.tools.train.ttt import TTTAttention

ALSO_WRITTEN = ("README.md", str(FILE))  # into the folder of a draft
HELD_OUT_SHARE = 20  # a small corpus holds out one sequence in this many


def train(
    corpora: list[Path],
    out: Path,
    config: TrainConfig,
    *,
    algo: str = "eagle3",
    shape: HeadShape | None = None,
    target: str = BUNDLED,
    dtype: str = "auto",
    device: str = "auto",
    held_out: int = 200,
    resume: bool = False,
    overwrite: bool = False,
    never_worse: bool = False,
) -> dict[str, Any]:
    """Train a draft of `algo` on `corpora` and export it, with its card, to the folder `out`.

    Returns facts and rates on `held_out` sequences, or one in HELD_OUT_SHARE of a small corpus, with the acceptance
    length `tau`. The training checkpoint is `<out>.checkpoint.pt`; resume continues from it and exports again.
    overwrite: replace another draft in `out`, and the checkpoint of an interrupted run. never_worse: also return
    `tau_before`, and export the initial draft if training has not raised tau. ValueError names a wrong argument, before
    any training; FloatingPointError if the loss diverges.
    """
    held_out = whole(0).check("held_out", held_out)
    check_out(out, target, overwrite or resume)  # now, before hours of training
    checkpoint = checkpoint_of(out)
    check_checkpoint(checkpoint, resume, overwrite)
    corpus = Corpus.merge([Corpus.load(path) for path in corpora])
    model, tokenizer = load(target, dtype, device)
    corpus.check_ids(vocab_size_of(model), tokenizer_fingerprint(tokenizer))
    fit, held = split_held_out(corpus, min(held_out, max(1, len(corpus) // HELD_OUT_SHARE)), config.seed)
    student = make_student(algo, StudentSetup(target, model, tokenizer, fit, config, shape or HeadShape()))
    trainer = Trainer(student.objective, fit, held, checkpoint)
    if resume:
        trainer.resume(checkpoint)
    result = _fit_or_keep(trainer) if never_worse else trainer.fit()
    student.export(out)
    facts = {
        "algo": algo,
        "target": target,
        **sizes(fit),
        "held_out_sequences": len(held),
        **student.facts,
        "trained_parameters": student.objective.num_trained,
        "exported_bytes": sum(f.stat().st_size for f in out.iterdir() if f.suffix in (".safetensors", ".gguf")),
        "recipe": student.objective.config.words,
        "device": torch.cuda.get_device_name() if trainer.device.type == "cuda" else "CPU",
        **result,
    }
    write_card(out, facts)
    return facts


def _fit_or_keep(trainer: Trainer) -> dict[str, Any]:
    """Train; if the student is not better on the held-out text, restore its initial weights."""
    module, before = trainer.objective.optimizer.module, trainer.evaluate()
    if not before["tau"]:
        raise ValueError(
            f"no held-out answer has two tokens after the first num_steps={trainer.config.num_steps} of its text and "
            f"before max_len={trainer.config.max_len}, so that no round of a draft can be measured: expected longer "
            "answers, more of them, or shorter prompts"
        )
    weights = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    result = trainer.fit()
    if result["tau"] <= before["tau"]:
        module.load_state_dict(weights)
        trainer.objective.optimizer.refresh()
        result |= before
    return {**result, "tau_before": before["tau"]}


def check_out(out: Path, target: str, overwrite: bool) -> None:
    """Raise ValueError if `out` is the folder of the target, which a draft would replace, or as `check_free` does."""
    if out.resolve() == Path(target).resolve():
        raise ValueError(f"out={str(out)!r} is the folder of the target: expected another one for the draft")
    check_free(out, overwrite, ALSO_WRITTEN)


def checkpoint_of(out: Path) -> Path:
    """Return the path of the training checkpoint of a run that exports to `out`."""
    return beside(out, ".checkpoint.pt")


def beside(out: Path, ending: str) -> Path:
    """Return the path of a file beside the folder `out`: its name plus `ending`."""
    out = out if out.name not in ("", "..") else out.resolve()
    return out.with_name(out.name + ending)


def check_checkpoint(path: Path, resume: bool, overwrite: bool) -> None:
    """Raise ValueError if there is no checkpoint to resume, if a new run would replace one without `overwrite`, or if
    none can be written there."""
    check_place(path)
    if resume and not path.is_file():
        raise ValueError(f"there is no checkpoint {str(path)!r} to resume; start without resume")
    if path.exists() and not (resume or overwrite):
        raise ValueError(
            f"{str(path)!r} is a checkpoint of another run: resume=True (`specdec train fit --resume`, with its "
            "settings) continues it, overwrite=True (--overwrite) starts over"
        )


def sizes(corpus: Corpus) -> dict[str, int]:
    """Return the numbers of sequences, tokens and answer tokens of a corpus, for reports."""
    counts = {"sequences": len(corpus), "corpus_tokens": corpus.num_tokens}
    return {**counts, "answer_tokens": corpus.num_answer_tokens}


@dataclass(frozen=True, eq=False)
class StudentSetup:
    """Inputs for making a student. target: its name. corpus: the training data."""

    target: str
    model: PreTrainedModel
    tokenizer: Any
    corpus: Corpus
    config: TrainConfig
    shape: HeadShape


@dataclass(frozen=True, eq=False)
class Student:
    """A draft to train: its objective, facts for the card, and export, which writes it to a folder."""

    objective: Objective
    facts: dict[str, Any]
    export: Callable[[Path], None]


def make_student(algo: str, setup: StudentSetup) -> Student:
    """Make a student of `algo`, new or from `setup.shape.init`; ValueError for shape fields that it does not take."""
    shape, takes = setup.shape, training_of(algo).takes
    if shape.init:
        takes &= {"file_format", "embed_type", *(["draft_vocab_size"] if algo == "eagle3" else [])}
    changed = (f.name for f in fields(HeadShape) if getattr(shape, f.name) != f.default)
    given = [name for name in changed if name not in {"init", *takes}]
    if given:
        what = f"a draft that goes on from {shape.init!r}" if shape.init else f"algo={algo!r}"
        raise ValueError(f"{', '.join(given)}: {what} takes only {', '.join(sorted(takes)) or 'nothing'}; leave it out")
    return _standalone(setup) if algo == "standalone" else _head(setup, formats()[algo])


def check_student(
    algo: str, config: TrainConfig, shape: HeadShape, target: str, model: PreTrainedModel, tokenizer: Any
) -> None:
    """Raise the errors that making the student in `train` would raise, before hours of generating its corpus."""
    make_student(algo, StudentSetup(target, model, tokenizer, Corpus.of([([0], [0])]), config, shape))


def _head(setup: StudentSetup, row: HeadFormat) -> Student:
    """Make a student of a head, fresh or already trained."""
    model, init, target, config = setup.model, setup.shape.init, TargetShape.of(setup.model), setup.config

    def hot_ids(size: int) -> torch.Tensor:
        return choose_hot_vocab(setup.corpus, size, target.vocab_size, special_ids(model, setup.tokenizer))

    if init:
        head = load_head(init, target, torch.float32, model.get_input_embeddings().weight.device, row.algo)
        if setup.shape.draft_vocab_size is not None:
            head = _with_vocab(head, model, hot_ids(min(setup.shape.draft_vocab_size, target.vocab_size)))
        is_default = config.num_steps == row.training.recipe.get("num_steps")
        if isinstance(head, BlockDraftHead) and is_default and config.num_steps > head.most_steps:
            config = replace(config, num_steps=head.most_steps)
            print(f"num_steps: {head.most_steps}, the most that blocks of {head.block_size} rows draft")
    else:
        head = row.fresh(model, setup.shape, config.seed, hot_ids)
    TTTAttention(head.attention_layers)  # ValueError for sinks
    objective = HeadObjective(model, head, config)
    dtype, facts = objective.draft.weight.dtype, dict[str, Any]()
    is_shared = row.shares_lm_head_rows and not config.train_lm_head and _has_rows_of(head, model)
    if row.shares_lm_head_rows:
        counts, num_hot = setup.corpus.answer_counts(head.vocab_size), head.hot_ids.numel()
        coverage = float(counts[head.hot_ids.cpu()].sum() / counts.sum())
        print(f"hot vocabulary: {num_hot} of {head.vocab_size} tokens cover {coverage:.2%} of the answers")
        facts = {"coverage": coverage, "draft_vocab_size": num_hot, "aux_layers": list(head.aux_layers)}

    def export(folder: Path) -> None:
        # overwrite: `train` checked the folder before it began
        depth = target.num_layers
        save_head(folder, head, dtype=dtype, lm_head_from_target=is_shared, num_layers=depth, overwrite=True)

    return Student(objective, facts, export)


def _with_vocab(head: DraftHead, model: PreTrainedModel, hot_ids: torch.Tensor) -> DraftHead:
    """Return `head` with another draft vocabulary; ValueError where that would lose trained rows."""
    if not _has_rows_of(head, model):
        raise ValueError(
            f"draft_vocab_size={len(hot_ids)}: the output head of the draft has rows of its own, which another "
            "vocabulary would lose; leave draft_vocab_size out"
        )
    return with_vocab(head, hot_ids, model.get_output_embeddings().weight)


def _has_rows_of(head: DraftHead, model: PreTrainedModel) -> bool:
    """Return whether the output head of `head`, if it has one, consists of rows of that of `model`."""
    rows = model.get_output_embeddings().weight
    return head.lm_head is None or torch.equal(head.get_parameter("lm_head.weight"), rows[head.hot_ids].float())


def _standalone(setup: StudentSetup) -> Student:
    """Make a small LM, fresh or already trained."""
    shape, model = setup.shape, setup.model
    if shape.file_format not in ("gguf", "safetensors"):
        raise ValueError(f"file_format={shape.file_format!r}: expected gguf or safetensors")
    is_gguf = shape.file_format == "gguf"
    if not is_gguf and shape.embed_type != HeadShape.embed_type:
        raise ValueError(f"embed_type={shape.embed_type!r}: only file_format 'gguf' has this option; leave it out")
    if is_gguf and not shape.init:
        check_blocks(shape.hidden_size, shape.intermediate_size or MLP_WIDTH, shape.embed_type)
    if shape.init:
        device = model.get_input_embeddings().weight.device
        student = plain_llama(load_draft(shape.init, dtype=torch.float32, device=device)[0])
        if is_gguf:
            check_gguf(student.config, shape.embed_type)
    else:
        counts = setup.corpus.answer_counts(vocab_size_of(model))
        student = new_student(model, shape, counts, setup.config.seed)
    objective = StandaloneObjective(model, student, setup.config, shape.embed_type if is_gguf else None)

    def export(folder: Path) -> None:
        if is_gguf:
            write_gguf(folder, student, shape.embed_type)
        else:
            write_safetensors(folder, student, objective.teacher.weight.dtype)
        write_note(folder, setup.target, student.config.vocab_size, tokenizer_fingerprint(setup.tokenizer))

    c = student.config
    facts = {
        **{"hidden_size": c.hidden_size, "intermediate_size": c.intermediate_size, "layers": c.num_hidden_layers},
        "heads": f"{c.num_attention_heads} of {c.head_dim}, {c.num_key_value_heads} for keys and values",
        "stored_as": f"GGUF, embedding {shape.embed_type}" if is_gguf else "safetensors",
    }
    return Student(objective, facts, export)


def write_card(folder: str | Path, facts: Mapping[str, Any]) -> Path:
    """Write README.md into `folder`: the draft's purpose, its training and its acceptance. facts: what `train` returns,
    by name; "algo" and "target" are required."""
    kind = training_of(facts["algo"])
    if facts.get("tau") == 0:  # no held-out round was simulated, so nothing is known
        facts = {k: v for k, v in facts.items() if k not in ("tau", "tau_of_starts", "acc", "accept_at")}
    named = {k: v for k, v in facts.items() if k not in ("algo", "target", "acc", "accept_at", "loss")}
    if "tau" in named:
        named["simulated tau, held out"] = named.pop("tau")
    lines = [
        f"# {kind.name} for {facts['target']}\n",
        f"{kind.fits} Load it with `specdec.attach(model, DIR)`, where DIR is this folder.\n",
        "| | |\n|---|---|",
        *(f"| {name.replace('_', ' ')} | {_shown(value)} |" for name, value in named.items()),
    ]
    steps = list(enumerate(zip(facts.get("acc", ()), facts.get("accept_at", ()), strict=True), 1))
    if steps:
        lines += [
            "\nHeld out, rounds of greedy decoding played on known text; tau = 1 + Σ a_j:\n",
            "| draft step | right given true tokens | accepted so far (a_j) |\n|---|---|---|",
            *(f"| {step} | {_shown(acc)} | {_shown(accepted)} |" for step, (acc, accepted) in steps),
        ]
    path = Path(folder) / "README.md"
    write_text(path, "\n".join(lines) + "\n")
    return path


def _shown(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}" if abs(value) < 1000 else f"{value:,.0f}"
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    if isinstance(value, list | tuple):
        return ", ".join(map(_shown, value))
    return str(value)
