"""Generates a corpus with an engine on the target: answers to questions, and chats including their user turns.

A corpus can be generated in shards, one process per device; merged, they hold every job once.
"""

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from specdec.api import Engine, attach
from specdec.core.ranges import FLAG, Range, check_fields, optional, whole
from specdec.core.text.inputs import encode
from specdec.core.text.prompts import chat_ids, read_questions, tokenizer_fingerprint
from specdec.reach.checkpoints.replacing import check_place
from specdec.reach.targets.pretrained import BUNDLED
from specdec.reach.targets.shape import position_limit
from specdec.tools.options import option, ranges_of
from specdec.tools.train.config import MINUTES
from specdec.tools.train.fit import sizes
from specdec.tools.train.regenerate import Budget, TurnJob, answer, answer_jobs, self_chat_prompts, user_turn_frame
from specdec.tools.train.target import load

USER_TURN_SHARE = 0.3  # of the generation budget; answers take the rest
USER_TURN_TOKENS = 128
ANSWER_SEEDS = 1 << 20  # added to the user turns' seed for chat answers, so that shards draw different samples
GRAPH_BATCHES = (64, 128, 256, 512)  # few and large: a batch is full until its chunk runs out
CHUNK_BATCHES = 8  # batches drain at the end of a chunk, so chunks are long; answers are saved after each
MAX_BATCH = {"cuda": 512, "cpu": 32}


def _shard(value: str) -> str:
    index, _, count = str(value).partition("/")
    if not (index.isdecimal() and count.isdecimal() and int(index) < int(count)):
        raise ValueError
    return value


def _temperatures(value: str) -> str:
    if not isinstance(value, str):
        raise TypeError
    if not all(0 <= float(law) < math.inf for law in value.split(",")):
        raise ValueError
    return value


COUNT, SEED, MANY = whole(1), whole(0), optional(whole(1))
SHARD = Range("i/n with i of 0..n-1, such as 0/4", _shard)
TEMPERATURES = Range("numbers from 0, such as 0,0.7,1.0", _temperatures)


@dataclass(frozen=True)
class Generation:
    """Settings of a generation run. shard: "i/n": part i of n of the questions' jobs, and as large a share of the
    chats, from a seed of its own. ValueError names a wrong field."""

    gsm8k: Path | None = option("Path of GSM8K's train.jsonl.")
    num_questions: int | None = option("GSM8K questions to answer; default: all.", allowed=MANY)
    samples_per_question: int = option("Answers per question.", 3, allowed=COUNT)
    chats: int = option("Chats: user turns that the target writes, and answers once.", 0, allowed=SEED)
    temperatures: str = option("Temperatures of answers, used in turn.", "0,0.7,1.0", allowed=TEMPERATURES)
    max_new_tokens: int = option("Maximum tokens per answer.", 256, allowed=COUNT)
    gen_minutes: float | None = option("Time limit for generating, in minutes.", allowed=MINUTES)
    max_batch: int | None = option("Requests decoded together; default 512 on CUDA, else 32.", allowed=MANY)
    shard: str = option(
        "i/n: generate part i (from 0) of n of the questions, and the same share of the chats.", "0/1", allowed=SHARD
    )
    compile: bool = option("Compile the target's layers for generating.", False, "--compile", allowed=FLAG)
    seed: int = option("Seed of question order, user turns and answers.", 0, allowed=SEED)

    def __post_init__(self) -> None:
        check_fields(self, ranges_of(type(self)))
        if self.gsm8k is None and not self.chats:
            raise ValueError("nothing to generate: pass gsm8k=PATH of train.jsonl, or chats=N, or both")

    @property
    def laws(self) -> list[float]:
        """The temperatures as floats."""
        return [float(t) for t in self.temperatures.split(",")]

    @property
    def part(self) -> slice:
        """The slice of this shard in the list of jobs that all shards share."""
        index, _, count = self.shard.partition("/")
        return slice(int(index), None, int(count))

    @property
    def num_chats(self) -> int:
        return len(range(self.chats)[self.part])

    @property
    def turn_seed(self) -> int:
        """The seed of the user turns, different in every shard."""
        return self.seed * 1009 + int(self.part.start)


def check_corpus(out: Path, overwrite: bool) -> None:
    """Raise ValueError if `out` is a folder, or a file that may not be overwritten."""
    check_place(out)
    if out.is_dir():
        raise ValueError(f"out={str(out)!r} is a folder: expected a file for the corpus, such as corpus.safetensors")
    if out.exists() and not overwrite:  # it may have taken hours
        raise ValueError(
            f"{str(out)!r} exists already: train on it with `specdec train fit --corpus {out}`, name another, or "
            "pass overwrite=True (--overwrite)"
        )


def prepare(
    out: Path,
    g: Generation,
    *,
    target: str = BUNDLED,
    dtype: str = "auto",
    device: str = "auto",
    overwrite: bool = False,
    check: Callable[[PreTrainedModel, Any], None] = lambda *_: None,
) -> dict[str, Any]:
    """Generate a corpus with the target, write it to the file `out`, and return its sizes and generation times.

    overwrite: replace an existing file. check: called with target and tokenizer before any work. ValueError for prompts
    and max_new_tokens past the target's positions, and where no request is left.
    """
    check_corpus(out, overwrite)
    model, tokenizer = load(target, dtype, device)
    check(model, tokenizer)
    fingerprint = tokenizer_fingerprint(tokenizer)
    questions = chat_ids(read_questions(g.gsm8k, g.num_questions), tokenizer) if g.gsm8k else []
    turn_tokens = min(g.max_new_tokens, USER_TURN_TOKENS) if g.chats else 0
    frame = sum(len(encode(tokenizer, part)) for part in user_turn_frame(tokenizer)) if g.chats else 0
    longest = max([frame + turn_tokens, *map(len, questions)])
    limit, _ = position_limit(model.config.get_text_config())
    if limit is not None and longest + g.max_new_tokens > limit:
        raise ValueError(
            f"the longest prompt has {longest} tokens, and max_new_tokens={g.max_new_tokens}: the target has positions "
            f"up to {limit}; leave such questions out, or take fewer new tokens"
        )
    engine = generating_engine(model, g, longest + g.max_new_tokens)
    chunk = CHUNK_BATCHES * engine.config.max_batch
    turns = Budget(g.gen_minutes * USER_TURN_SHARE if g.gen_minutes and g.chats else None)
    chats = self_chat_prompts(engine, tokenizer, g.num_chats, g.turn_seed, turn_tokens, chunk=chunk, budget=turns)
    turns_report = turns.report()
    rest = Budget(g.gen_minutes - turns.seconds / 60 if g.gen_minutes else None)
    jobs = shard_jobs(g, questions, chats)
    if not jobs:
        raise ValueError(
            f"nothing to generate: of {g.num_chats} chats of shard {g.shard} the target wrote no user turn that can be "
            "kept; pass gsm8k, or more chats"
        )
    corpus = answer(engine, jobs, g.max_new_tokens, chunk=chunk, budget=rest, keep=lambda c: c.save(out, fingerprint))
    engine.detach()
    corpus.save(out, fingerprint)
    if len(corpus):
        print(corpus.show(tokenizer, 0))
    return {
        "corpus": str(out),
        "target": target,
        "shard": g.shard,
        "questions": len(questions),
        "chats": len(chats),
        "user_turns": turns_report,
        "answers": rest.report(),
        **sizes(corpus),
    }


def shard_jobs(g: Generation, questions: Sequence[list[int]], chats: Sequence[list[int]]) -> list[TurnJob]:
    """Return the requests of this shard, its part of all questions' jobs and its own chats, shuffled so that a run cut
    short has the same mix."""
    of_questions = answer_jobs(questions, g.laws, g.samples_per_question, g.seed)[g.part]
    jobs = of_questions + answer_jobs(chats, g.laws, 1, g.turn_seed + ANSWER_SEEDS)
    random.Random(g.seed).shuffle(jobs)
    return jobs


def generating_engine(model: PreTrainedModel, g: Generation, max_seq_len: int) -> Engine:
    """Attach an engine without a draft, set for throughput: large batches, and few graphs, of the needed kind only."""
    kind = model.device.type
    max_batch = g.max_batch or MAX_BATCH.get(kind, MAX_BATCH["cpu"])
    settings: dict[str, Any] = {"max_batch": max_batch, "max_seq_len": max_seq_len, "compile": g.compile}
    if kind == "cuda":
        settings["graph_batches"] = tuple(sorted({*(b for b in GRAPH_BATCHES if b < max_batch), max_batch}))
        # a batch that mixes greedy and sampled requests counts as sampled; user turns are always sampled
        settings["graph_sampling"] = ("greedy",) if set(g.laws) == {0.0} and not g.chats else ("sampled",)
    return attach(model, None, algo=None, **settings)
