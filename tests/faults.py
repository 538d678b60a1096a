"""Random faults against one engine, and what is left of it: for tests/test_faults.py and bench/faults.py.

Every fault has neighbours, requests of other callers that are under way. Afterwards no row and no slot may be lost, and
every neighbour must have the tokens that it has alone, unless the fault broke a launch off; then it must say so.
"""

import linecache
import random
import sys
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

import specdec
from specdec import DetachedError
from tests.heads import random_draft, random_head
from tests.recurrent_models import recurrent_model
from tests.tiny_models import VOCAB, tiny_model

NUM_TOKENS = 12
FAULTY = (
    "api.py",
    "kv_cache.py",
    "pages.py",
    "prefix_cache.py",
    "engine/",
    "functional/",
    "prefill/",
    "round/",
    "text/",
)
SOUND = "engine/turns.py"  # defers signals, so that no interrupt comes in between its lines
BAD_ARGUMENTS: tuple[dict[str, Any], ...] = (
    {"max_new_tokens": 0},
    {"max_new_tokens": 10**6},
    {"stop_token_ids": list(range(40))},
    {"stop_token_ids": [2**70]},
    {"sampling": "hot"},
    {"stop": [""]},
    {"prompts": [[]]},
    {"prompts": [[VOCAB + 3]]},
    {"prompts": {"a": 1}},
)


class Letters:
    """A tokenizer of one letter a token."""

    def __call__(self, text: str, **_: Any) -> dict[str, list[int]]:
        return {"input_ids": [ord(c) % VOCAB for c in text]}

    def decode(self, ids: list[int], **_: Any) -> str:
        return "".join(chr(65 + i) for i in ids)


@dataclass
class Tally:
    """What happened: faults by kind, how their callers heard of it, and what must stay empty."""

    faults: Counter[str] = field(default_factory=Counter)
    outcomes: Counter[str] = field(default_factory=Counter)
    neighbours: int = 0
    told: int = 0  # neighbours that ended with an error because a launch had been broken off
    wrong: list[str] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)


def is_faulty(path: str) -> bool:
    """Whether a fault may happen in this file: on the host's side of an engine."""
    own = path.rpartition("/specdec/")[2]
    return own != path and own.startswith(FAULTY) and own != SOUND


class Interrupted(BaseException):
    """Stands for KeyboardInterrupt, which pytest would take for its own."""


@contextmanager
def interrupting(rng: random.Random, kind: type[BaseException], most: int) -> Iterator[None]:
    """Raise `kind` at a random line of the engine's files, at most `most` lines from here."""
    left = rng.randrange(1, most)

    def trace(frame: Any, event: str, arg: Any) -> Any:
        nonlocal left
        path = frame.f_code.co_filename
        if not is_faulty(path):
            return None
        # A `with` is traced once more before its `__exit__` is called, and the line of a `try` in it is a no-operation
        # that its exception table leaves out: CPython lets no interrupt come in at either.
        if event == "line" and not linecache.getline(path, frame.f_lineno).lstrip().startswith(("with", "try:")):
            left -= 1
            if left == 0:
                sys.settrace(None)
                raise kind("at a random line")
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(before)


def attention() -> tuple[Any, dict[str, Any]]:
    """A model whose K/V are kept by page, for other requests, too; and how an engine is attached to it."""
    model = tiny_model("llama")
    return model, {"draft": random_head(model), "num_steps": 2, "prefix_cache": True}


def hybrid() -> tuple[Any, dict[str, Any]]:
    """A model with states by row, too, into which accepted paths are folded."""
    model = recurrent_model("qwen3_next")
    return model, {"draft": random_draft(model, "eagle"), "algo": "eagle", "num_steps": 2}


def plain_hybrid() -> tuple[Any, dict[str, Any]]:
    """The same; what a step writes counts at once."""
    return recurrent_model("qwen3_next"), {"algo": None}


SUBJECTS = {make.__name__: make for make in (attention, hybrid, plain_hybrid)}


class Victim:
    """An engine, what its requests yield alone, and the faults it is put to."""

    def __init__(self, seed: int, tally: Tally, subject: str = "attention"):
        self.rng = random.Random(seed)
        self.tally = tally
        self.model, self.options = SUBJECTS[subject]()
        self.spoilt: list[Any] = []  # requests whose logits were made NaN
        self.tokenizer = Letters()
        stem = [self.rng.randrange(3, VOCAB) for _ in range(10)]  # the prefix cache has it for every second prompt
        ends = [[self.rng.randrange(3, VOCAB) for _ in range(self.rng.randrange(1, 12))] for _ in range(8)]
        self.prompts = [stem * (i % 2) + end for i, end in enumerate(ends)]
        self.engine = self.attach()
        self.expected = [self.engine.generate([p], max_new_tokens=NUM_TOKENS).tokens[0] for p in self.prompts]
        self.scores = [self.score([i])[0] for i in range(len(self.prompts))]

    def score(self, which: Sequence[int]) -> list[float]:
        """Log-likelihoods of the texts of these prompts."""
        scores = self.engine.score([self.prompts[i] for i in which], [self.expected[i] for i in which])
        return [score.logprob for score in scores]

    def attach(self) -> Any:
        """A fresh engine on the model."""
        return specdec.attach(self.model, tokenizer=self.tokenizer, max_batch=4, max_seq_len=64, **self.options)

    def run(self, num_faults: int) -> None:
        """`num_faults` faults of all kinds, with neighbours beside them."""
        kinds: list[tuple[str, Callable[[], None], int]] = [
            ("bad argument", self.bad_argument, 20),
            ("closed stream", self.closed_stream, 15),
            ("tokenizer", self.broken_tokenizer, 15),
            ("interrupt", self.interrupt, 30),
            ("exception", self.exception, 10),
            ("score", self.broken_score, 10),
            ("NaN logits", self.nan_logits, 6),
            ("detach", self.detach, 2),
            ("threads", self.threads, 2),
        ]
        names, weights = [k for k, *_ in kinds], [w for *_, w in kinds]
        by_name = {name: fault for name, fault, _ in kinds}
        for _ in range(num_faults):
            name = self.rng.choices(names, weights)[0]
            self.tally.faults[name] += 1
            with self.neighbours(name):
                by_name[name]()

    @contextmanager
    def neighbours(self, name: str) -> Iterator[None]:
        """Within, up to two requests of other callers are under way; then they finish and everything is checked."""
        jobs = []
        for _ in range(self.rng.randrange(3)):
            i = self.rng.randrange(len(self.prompts))
            requests = self.engine._requests([self.prompts[i]], max_new_tokens=NUM_TOKENS)
            run = self.engine._run(requests)
            for _ in range(self.rng.randrange(1, 3)):
                next(run, None)
            jobs.append((run, requests[0], i))
        engine = self.engine
        yield
        for run, request, i in jobs:
            self.tally.neighbours += 1
            try:
                for _ in run:
                    pass
            except Exception as error:
                # "broken off": a launch was cut in half; "detached": it asked for that.
                is_told = "broken off" in str(error) or "at a random line" in str(error) or name == "detach"
                (self._tell if is_told else self._accuse)(f"{name}: {error!r}")
                continue
            if request in self.spoilt and request.finish_reason == "error":
                self._tell(f"{name}: its logits were not finite")
            elif request.tokens != self.expected[i]:
                self._accuse(f"{name}: {request.tokens} is not {self.expected[i]}")
        if engine is self.engine:
            self.check(name)

    def _tell(self, what: str) -> None:
        self.tally.told += 1

    def _accuse(self, what: str) -> None:
        self.tally.wrong.append(what)

    def check(self, name: str) -> None:
        """No row and no slot is lost, and nobody is left behind."""
        core = self.engine._core
        while core.scheduler.running or core.scheduler.waiting:  # a caller that was cut off before it could abandon
            core.step()
        with core.turns:
            pass
        tables = core.slot_tables
        try:
            self.engine.check_integrity()
        except AssertionError as error:
            self.tally.lost.append(f"{name}: {error}")
        if tables.num_free_rows != tables.max_batch or tables.num_free_pages != tables.num_pages:
            self.tally.lost.append(f"{name}: {tables.num_free_rows} rows, {tables.num_free_pages} pages")

    def call(self, **options: Any) -> None:
        """A call of `generate` whose tokens must be right if it returns."""
        i = self.rng.randrange(len(self.prompts))
        prompts = options.pop("prompts", [self.prompts[i]])
        try:
            out = self.engine.generate(prompts, **{"max_new_tokens": NUM_TOKENS, **options})
        except BaseException as error:
            self.tally.outcomes[type(error).__name__] += 1
            return
        self.tally.outcomes["returned"] += 1
        if out.finish_reasons != ["error"] and not options.get("stop") and out.tokens[0] != self.expected[i]:
            self._accuse(f"the caller's own: {out.tokens[0]} is not {self.expected[i]}")

    def bad_argument(self) -> None:
        self.call(**self.rng.choice(BAD_ARGUMENTS))

    def closed_stream(self) -> None:
        stream = self.engine.stream([self.rng.choice(self.prompts)], max_new_tokens=NUM_TOKENS)
        for _ in range(self.rng.randrange(4)):
            next(stream, None)
        stream.close()

    def broken_tokenizer(self) -> None:
        """It breaks over the text of one request, with stop strings or without."""
        stop = self.rng.choice(((), ("no such text",)))
        i = self.rng.randrange(len(self.prompts))
        requests = self.engine._requests([self.prompts[i]], max_new_tokens=NUM_TOKENS, stop=stop)
        requests[0].detokenizer.tokenizer = Broken(self.tokenizer, self.rng.randrange(3))
        try:
            for _ in self.engine._run(requests):
                requests[0].read()
        except LookupError:
            self.tally.outcomes["LookupError"] += 1

    def interrupt(self) -> None:
        with interrupting(self.rng, Interrupted, 900):
            self.call()

    def exception(self) -> None:
        with interrupting(self.rng, RuntimeError, 900):
            self.call()

    def broken_score(self) -> None:
        """Scores are broken off; the next ones are right, whatever was about to be kept for them."""
        which = self.rng.sample(range(len(self.prompts)), 4)
        with interrupting(self.rng, RuntimeError, 900):
            try:
                self.score(which)
                self.tally.outcomes["returned"] += 1
            except RuntimeError as error:
                self.tally.outcomes[type(error).__name__] += 1
        got, expected = self.score(which), [self.scores[i] for i in which]
        if max(abs(a - b) for a, b in zip(got, expected, strict=True)) > 1e-3:
            self._accuse(f"scores: {got} are not {expected}")

    def nan_logits(self) -> None:
        """The first row of one verify forward is NaN; that one request ends, whoever it belongs to."""
        core = self.engine._core
        forward, left = core.target.forward, [self.rng.randrange(3)]

        def spoil(context: Any, metadata: Any, ids: torch.Tensor) -> Any:
            out = forward(context, metadata, ids)
            left[0] -= 1
            if left[0] == -1:
                self.spoilt.append(core._batch.requests[-1])
                out.logits.view(metadata.num_reqs, -1, VOCAB)[-1] = float("nan")
            return out

        core.target.forward = spoil
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                self.call()
        finally:
            core.target.forward = forward

    def detach(self) -> None:
        """In the middle of a stream; its next piece says so, and a new engine takes over."""
        stream = self.engine.stream([self.prompts[0]], max_new_tokens=NUM_TOKENS)
        next(stream, None)
        self.engine.detach()
        try:
            next(stream)
            self._accuse("a stream went on after detach")
        except DetachedError:
            self.tally.outcomes["DetachedError"] += 1
        self.engine = self.attach()

    def threads(self) -> None:
        """Eight callers at once, every second one a stream, and the live model beside them."""
        wrong: list[str] = []

        def caller(n: int) -> None:
            i = n % len(self.prompts)
            text = self.tokenizer.decode(self.expected[i])
            try:
                if n % 2:
                    got = "".join(self.engine.stream([self.prompts[i]], max_new_tokens=NUM_TOKENS))
                    wrong.extend([f"stream: {got} is not {text}"] if got != text else [])
                else:
                    tokens = self.engine.generate([self.prompts[i]], max_new_tokens=NUM_TOKENS).tokens[0]
                    wrong.extend([f"thread: {tokens} is not {self.expected[i]}"] if tokens != self.expected[i] else [])
            except BaseException as error:
                wrong.append(f"thread: {error!r}")

        threads = [threading.Thread(target=caller, args=(n,)) for n in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120)
        if any(thread.is_alive() for thread in threads):
            wrong.append("a thread hangs")
        self.tally.wrong.extend(wrong)


class Broken:
    """A tokenizer that breaks after `left` calls of decode."""

    def __init__(self, tokenizer: Letters, left: int):
        self._tokenizer, self._left = tokenizer, left

    def decode(self, ids: list[int], **options: Any) -> str:
        self._left -= 1
        if self._left < 0:
            raise LookupError("the tokenizer broke")
        return self._tokenizer.decode(ids, **options)
