"""The students of `specdec train fit`: makes and exports those of each algorithm."""

from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from specdec.core.text.prompts import tokenizer_fingerprint
from specdec.reach.heads.format import HeadFormat
from specdec.reach.heads.formats import formats
from specdec.reach.heads.load import load_head, save_head
from specdec.reach.targets.pretrained import load_draft
from specdec.reach.targets.shape import TargetShape
from specdec.tools.train.config import HeadShape, TrainConfig, training_of
from specdec.tools.train.data import Corpus, choose_hot_vocab
from specdec.tools.train.export import check_blocks, write_gguf, write_note, write_safetensors
from specdec.tools.train.objectives import HeadObjective, Objective
from specdec.tools.train.standalone import MLP_WIDTH, StandaloneObjective, lm_facts, new_student, plain_llama
from specdec.tools.train.target import special_ids


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
    """A student. objective: to be trained. facts: for the card. export: writes the trained student to a folder."""

    objective: Objective
    facts: dict[str, Any]
    export: Callable[[Path], None]


def make_student(algo: str, setup: StudentSetup) -> Student:
    """Make a student of `algo`, fresh or from `setup.shape.init`; ValueError for shape fields that it does not take."""
    shape = setup.shape
    takes = training_of(algo).takes
    if shape.init:
        takes &= {"file_format", "embed_type"}
    given = [
        f.name for f in fields(HeadShape) if getattr(shape, f.name) != f.default and f.name not in {"init", *takes}
    ]
    if given:
        what = f"a draft that goes on from {shape.init!r}" if shape.init else f"algo={algo!r}"
        raise ValueError(f"{', '.join(given)}: {what} takes only {', '.join(sorted(takes)) or 'nothing'}; leave it out")
    return _standalone(setup) if algo == "standalone" else _head(setup, formats()[algo])


def _head(setup: StudentSetup, row: HeadFormat) -> Student:
    """Make a student of a head, fresh or already trained."""
    model, init, target = setup.model, setup.shape.init, TargetShape.of(setup.model)

    def hot_ids(size: int) -> torch.Tensor:
        return choose_hot_vocab(setup.corpus, size, target.vocab_size, special_ids(model, setup.tokenizer))

    if init:
        head = load_head(init, target, torch.float32, model.get_input_embeddings().weight.device, row.algo)
    else:
        head = row.fresh(model, setup.shape, setup.config.seed, hot_ids)
    objective = HeadObjective(model, head, setup.config)
    dtype, facts = objective.draft.weight.dtype, dict[str, Any]()
    is_shared = row.shares_lm_head_rows and not init and not setup.config.train_lm_head
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


def _standalone(setup: StudentSetup) -> Student:
    shape, model = setup.shape, setup.model
    if shape.file_format not in ("gguf", "safetensors"):
        raise ValueError(f"file_format={shape.file_format!r}: expected gguf or safetensors")
    is_gguf = shape.file_format == "gguf"
    if is_gguf:
        check_blocks(shape.hidden_size, shape.intermediate_size or MLP_WIDTH, shape.embed_type)
    if shape.init:
        device = model.get_input_embeddings().weight.device
        student = plain_llama(load_draft(shape.init, dtype=torch.float32, device=device)[0])
    else:
        counts = setup.corpus.answer_counts(TargetShape.of(model).vocab_size)
        student = new_student(model, shape, counts, setup.config.seed)
    objective = StandaloneObjective(model, student, setup.config, shape.embed_type if is_gguf else None)

    def export(folder: Path) -> None:
        if is_gguf:
            write_gguf(folder, student, shape.embed_type)
        else:
            write_safetensors(folder, student, objective.teacher.weight.dtype)
        write_note(folder, setup.target, student.config.vocab_size, tokenizer_fingerprint(setup.tokenizer))

    facts = {**lm_facts(student), "stored_as": f"GGUF, embedding {shape.embed_type}" if is_gguf else "safetensors"}
    return Student(objective, facts, export)
