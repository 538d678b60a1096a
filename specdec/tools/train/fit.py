"""Fits a draft to corpora: splits them, makes the student, trains it, and exports it with its card."""

from pathlib import Path
from typing import Any

import torch

from specdec.core.text.prompts import tokenizer_fingerprint
from specdec.reach.checkpoints.replacing import check_free
from specdec.reach.targets.pretrained import BUNDLED
from specdec.reach.targets.shape import vocab_size_of
from specdec.tools.train.card import write_card
from specdec.tools.train.config import HeadShape, TrainConfig
from specdec.tools.train.data import Corpus, split_held_out
from specdec.tools.train.students import StudentSetup, make_student
from specdec.tools.train.target import load
from specdec.tools.train.trainer import Trainer

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
) -> dict[str, Any]:
    """Fit a draft of `algo` to `corpora`, export it with its card to the folder `out`, return facts and held-out rates.

    The checkpoint is `<out>.checkpoint.pt`, beside `out`; resume continues from it and exports again. overwrite:
    replace another draft in `out`, and the checkpoint of a run that was broken off.
    """
    check_free(out, overwrite or resume)  # now, not after hours of training
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
    result = trainer.fit()
    student.export(out)
    facts = {
        "algo": algo,
        "target": target,
        **sizes(fit),
        "held_out_sequences": len(held),
        **student.facts,
        "trained_parameters": student.objective.num_trained,
        "exported_bytes": sum(f.stat().st_size for f in out.iterdir() if f.suffix in (".safetensors", ".gguf")),
        "recipe": config.words,
        "device": torch.cuda.get_device_name() if trainer.device.type == "cuda" else "CPU",
        **result,
    }
    write_card(out, facts)
    return facts


def checkpoint_of(out: Path) -> Path:
    """The checkpoint of a run that exports to `out`."""
    return out.with_name(out.name + ".checkpoint.pt")


def check_checkpoint(path: Path, resume: bool, overwrite: bool) -> None:
    """Raise ValueError where there is none to resume, or one that a new run would replace."""
    if resume and not path.is_file():
        raise ValueError(f"there is no checkpoint {str(path)!r} to resume; start without resume")
    if path.exists() and not (resume or overwrite):
        raise ValueError(
            f"{str(path)!r} is a checkpoint of another run: resume=True (--resume) goes on from it, overwrite=True "
            "(--overwrite) begins anew"
        )


def sizes(corpus: Corpus) -> dict[str, int]:
    """Return the numbers of sequences, tokens and answer tokens, for reports."""
    return {
        "sequences": len(corpus),
        "corpus_tokens": corpus.num_tokens,
        "answer_tokens": corpus.num_answer_tokens,
    }
