"""Adapts a trained draft to text that its target writes now: after fine-tuning, or on your own users' prompts."""

from functools import partial
from pathlib import Path
from typing import Any

from specdec.core.ranges import list_of, shown, whole
from specdec.core.text.prompt_sets import records
from specdec.reach.heads.formats import STANDALONE
from specdec.reach.heads.load import detect_algo
from specdec.reach.targets.pretrained import gguf_of
from specdec.tools.train.config import HeadShape, recipe
from specdec.tools.train.data import Corpus
from specdec.tools.train.fit import beside, check_checkpoint, check_out, check_student, checkpoint_of, train
from specdec.tools.train.generation import Generation, check_corpus, prepare

GENERATING = 0.4  # share of the minutes for generating text, if there is none yet
GENTLE = 0.25  # share of the recipe's learning rate, since the draft is already trained
LOGGED = ("prompt_token_ids", "token_ids")  # keys of a log's lines
IDS = list_of(whole(0, 2**31 - 1), "token ids")


def adapt(
    target: str,
    head: str,
    out: Path,
    *,
    prompts: Path | None = None,
    log: Path | None = None,
    minutes: float = 5.0,
    max_new_tokens: int = 256,
    lr: float | None = None,
    overwrite: bool = False,
    **where: Any,
) -> dict[str, Any]:
    """Continue training the draft `head` for `minutes`, and export the better of before and after to `out`.

    Returns facts and held-out rates, with acceptance lengths `tau_before` and `tau`. prompts: a file of prompts, which
    the target answers in the first minutes; log: a file that `specdec serve --log` wrote, with the target's answers;
    give exactly one, else ValueError. lr: by default a quarter of the recipe's. where: dtype and device. The corpus is
    written beside the draft, as `<out>.corpus.safetensors`.
    """
    if (prompts is None) == (log is None):
        given = "neither" if log is None else "both"
        raise ValueError(f"{given} of prompts (--prompts) and log (--from-log) given: expected one of them")
    algo = detect_algo(head)
    check_out(out, target, overwrite)
    check_checkpoint(checkpoint_of(out), False, overwrite)
    is_files = algo == STANDALONE and gguf_of(head) is None  # a safetensors model stays one
    shape = HeadShape(init=head, file_format="safetensors") if is_files else HeadShape(init=head)
    corpus, training = beside(out, ".corpus.safetensors"), minutes
    made: dict[str, Any] = {}
    if log is not None:
        texts = read_log(log)
        if not _begins(corpus, texts):
            check_corpus(corpus, overwrite)
        texts.save(corpus)
    else:
        generation = Generation(gsm8k=prompts, gen_minutes=GENERATING * minutes, max_new_tokens=max_new_tokens)
        check = partial(check_student, algo, recipe(algo, minutes=minutes), shape, target)
        made = prepare(corpus, generation, target=target, overwrite=overwrite, check=check, **where)
        training = max(minutes - made["answers"]["gen_minutes"], (1 - GENERATING) * minutes)  # answers may take longer
    config = recipe(algo, minutes=training, lr=GENTLE * recipe(algo, minutes=1.0).lr if lr is None else lr)
    result = train(
        [corpus], out, config, algo=algo, shape=shape, target=target, never_worse=True, overwrite=overwrite, **where
    )
    return {"data": made, **result, "is_better": result["tau"] > result["tau_before"]}


def _begins(path: Path, corpus: Corpus) -> bool:
    """Return whether `corpus` begins with the file, which a failed run may have left, of a log that grows."""
    try:
        left = Corpus.load(path)
    except ValueError:
        return False
    return len(left) <= len(corpus) and left.digest == corpus.select(range(len(left))).digest


def read_log(path: Path) -> Corpus:
    """Return the texts of a log as a corpus. ValueError names a missing file, a line without ids, or an empty log."""
    if not path.is_file():
        raise ValueError(f"log {str(path)!r}: no such file; expected what `specdec serve --log` writes")
    pairs = []
    for place, entry in records(path):
        if not isinstance(entry, dict) or not entry.keys() >= set(LOGGED):
            raise ValueError(f"{place}: {shown(entry)}: expected an object with lists of ids {LOGGED}")
        prompt, answer = (IDS.check(f"{place}: {key}", entry[key]) for key in LOGGED)
        if prompt and answer:
            pairs.append((prompt, answer))
    if not pairs:
        raise ValueError(f"{path} has no answers: expected what `specdec serve --log` writes")
    return Corpus.of(pairs)
