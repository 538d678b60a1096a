"""The students of `specdec train fit`: makes and exports those of each algorithm."""

from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from specdec.draft.head import DraftHead
from specdec.heads.format import HeadFormat
from specdec.heads.formats import formats
from specdec.heads.load import load_head, save_head
from specdec.targets.pretrained import load_draft
from specdec.targets.shape import TargetShape
from specdec.text.prompts import tokenizer_fingerprint
from specdec.train.config import TrainConfig, training_of
from specdec.train.data import Corpus
from specdec.train.export import write_gguf, write_note, write_safetensors
from specdec.train.hot_vocab import choose_hot_vocab
from specdec.train.objectives import HeadObjective, Objective
from specdec.train.rounding import check_blocks
from specdec.train.standalone import LMShape, StandaloneObjective, lm_facts, new_student, plain_llama
from specdec.train.target import special_ids


@dataclass(frozen=True)
class Shape:
    """Shape of a fresh student; None: the algorithm's default.

    init: a trained draft to continue from, a folder or Hub id; of the rest only file_format and embed_type go with it.
    intermediate_size: of the MLP. eagle3: draft_vocab_size, and three aux_layers. nextn: copy_layer starts its layer as
    the target's last one with full attention. standalone: hidden_size, num_layers, num_heads, num_kv_heads; file_format
    "gguf", with the embedding as embed_type, or "safetensors".
    """

    init: str | None = None
    intermediate_size: int | None = None
    draft_vocab_size: int = 8192
    aux_layers: tuple[int, ...] | None = None
    copy_layer: bool = False
    hidden_size: int = LMShape.hidden_size
    num_layers: int = LMShape.num_layers
    num_heads: int = LMShape.num_heads
    num_kv_heads: int = LMShape.num_kv_heads
    file_format: str = "gguf"
    embed_type: str = "Q4_0"


@dataclass(frozen=True, eq=False)
class Setup:
    """Inputs for making a student. target: its name. corpus: the training data."""

    target: str
    model: PreTrainedModel
    tokenizer: Any
    corpus: Corpus
    config: TrainConfig
    shape: Shape


@dataclass(frozen=True, eq=False)
class Student:
    """A student. objective: to be trained. facts: for the card. export: writes the trained student to a folder."""

    objective: Objective
    facts: dict[str, Any]
    export: Callable[[Path], None]


def make_student(algo: str, setup: Setup) -> Student:
    """Make a student of `algo`, fresh or from `setup.shape.init`; ValueError for shape fields that it does not take."""
    shape = setup.shape
    takes = training_of(algo).takes
    if shape.init:
        takes &= {"file_format", "embed_type"}
    given = [f.name for f in fields(Shape) if getattr(shape, f.name) != f.default and f.name not in {"init", *takes}]
    if given:
        what = f"a draft that goes on from {shape.init!r}" if shape.init else f"algo={algo!r}"
        raise ValueError(f"{', '.join(given)}: {what} takes only {', '.join(sorted(takes)) or 'nothing'}; leave it out")
    return _standalone(setup) if algo == "standalone" else _head(setup, formats()[algo])


def _head(setup: Setup, row: HeadFormat) -> Student:
    """Make a student of a head, fresh or already trained."""

    def hot_ids(size: int) -> torch.Tensor:
        always = special_ids(setup.model, setup.tokenizer)
        return choose_hot_vocab(setup.corpus, size, TargetShape.of(setup.model).vocab_size, always).ids

    fresh = None if setup.shape.init else row.fresh(setup.model, setup.shape, setup.config.seed, hot_ids)
    head = fresh or _loaded(setup, row.algo)
    objective = HeadObjective(setup.model, head, setup.config)
    dtype, depth = objective.draft.weight.dtype, TargetShape.of(setup.model).num_layers
    is_shared = row.shares_lm_head_rows and fresh is not None and not setup.config.train_lm_head

    def export(folder: Path) -> None:
        # overwrite: `train` checked the folder before it began
        save_head(folder, head, dtype=dtype, lm_head_from_target=is_shared, num_layers=depth, overwrite=True)

    return Student(objective, _vocabulary_facts(setup, head) if row.shares_lm_head_rows else {}, export)


def _vocabulary_facts(setup: Setup, head: DraftHead) -> dict[str, Any]:
    """Say how much of the answers the tokens that `head` scores cover."""
    counts = _answer_counts(setup, head.vocab_size)
    coverage = float(counts[head.hot_ids.cpu()].sum() / counts.sum())
    print(f"hot vocabulary: {head.hot_ids.numel()} of {head.vocab_size} tokens cover {coverage:.2%} of the answers")
    return {"coverage": coverage, "draft_vocab_size": head.hot_ids.numel(), "aux_layers": list(head.aux_layers)}


def _standalone(setup: Setup) -> Student:
    shape, model = setup.shape, setup.model
    if shape.file_format not in ("gguf", "safetensors"):
        raise ValueError(f"file_format={shape.file_format!r}: expected gguf or safetensors")
    is_gguf = shape.file_format == "gguf"
    width = shape.intermediate_size or LMShape.intermediate_size
    if is_gguf:
        check_blocks(shape.hidden_size, width, shape.embed_type)
    student = _loaded_lm(setup) or new_student(
        model,
        LMShape(shape.hidden_size, width, shape.num_layers, shape.num_heads, shape.num_kv_heads),
        _answer_counts(setup, TargetShape.of(model).vocab_size),
        setup.config.seed,
    )
    objective = StandaloneObjective(model, student, setup.config, shape.embed_type if is_gguf else None)

    def export(folder: Path) -> None:
        if is_gguf:
            write_gguf(folder, student, shape.embed_type)
        else:
            write_safetensors(folder, student, objective.teacher.weight.dtype)
        write_note(folder, setup.target, student.config.vocab_size, tokenizer_fingerprint(setup.tokenizer))

    facts = {**lm_facts(student), "stored_as": f"GGUF, embedding {shape.embed_type}" if is_gguf else "safetensors"}
    return Student(objective, facts, export)


def _answer_counts(setup: Setup, vocab_size: int) -> torch.Tensor:
    """Return how often the target emits each token, as [vocab_size] int64."""
    return torch.bincount(setup.corpus.tokens[setup.corpus.answer].long(), minlength=vocab_size)


def _loaded_lm(setup: Setup) -> PreTrainedModel | None:
    """Load the LM to continue from in fp32, if one is named."""
    if not setup.shape.init:
        return None
    device = setup.model.get_input_embeddings().weight.device
    return plain_llama(load_draft(setup.shape.init, dtype=torch.float32, device=device)[0])


def _loaded(setup: Setup, algo: str) -> DraftHead:
    """Load the head to continue from, in fp32."""
    assert setup.shape.init
    device = setup.model.get_input_embeddings().weight.device
    return load_head(setup.shape.init, TargetShape.of(setup.model), torch.float32, device, algo)
