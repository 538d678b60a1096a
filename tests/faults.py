"""Injects random faults into one engine and checks its state: for tests/test_faults.py and bench/faults.py.

Every fault happens beside running requests of other callers (neighbours). Afterwards no row and no slot may be lost,
and every neighbour must have the tokens that it gets alone, unless the fault interrupted a launch; then it must get an
error.
"""

import random
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

import torch

import specdec
from specdec import DetachedError
from tests.heads import random_draft, random_head
from tests.recurrent_models import recurrent_model
from tests.test_attach import greedy
from tests.tiny_models import VOCAB, tiny_model

NUM_TOKENS = 12
# What a core calls during a turn. An exception may be raised before or after the call.
SCORING = ("slot_tables.reserve", "slot_tables.release", "slot_tables.keep", "prefill.target", "target.head")
PLACES = (
    *SCORING,
    *("scheduler.grow", "scheduler.preempt", "slot_tables.grow", "_ready", "delivery.read"),
    *("scheduler.add", "scheduler.admit", "scheduler.next_prefill", "scheduler.release", "scheduler.sharing.keep"),
    *("slot_tables.write", "slot_tables.pages_of", "launcher.fill", "launcher.round", "launcher.post"),
    *("launcher.prefill", "delivery.hand_out", "delivery.hand_over"),
    *("mailbox.post", "mailbox.take", "graphs.play", "graphs.first_tokens", "prefill.draft", "target.layers"),
    *("launcher.tiers.begin", "launcher.tiers.end", "graphs.catch_up"),
    *("round.worker.draft", "models.follow", "abandon"),
)
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
    """A tokenizer with one letter per token."""

    def __call__(self, text: str, **_: Any) -> dict[str, list[int]]:
        return {"input_ids": [ord(c) % VOCAB for c in text]}

    def decode(self, ids: list[int], **_: Any) -> str:
        return "".join(chr(65 + i) for i in ids)


@dataclass
class Tally:
    """Counts faults by kind and what their callers got; `wrong` and `lost` must stay empty."""

    faults: Counter[str] = field(default_factory=Counter)
    outcomes: Counter[str] = field(default_factory=Counter)
    neighbours: int = 0
    told: int = 0  # neighbours that ended with an error because a launch had been interrupted
    wrong: list[str] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)


class Interrupted(BaseException):
    """Stands in for KeyboardInterrupt, which pytest would handle itself."""


@contextmanager
def breaking(rng: random.Random, core: Any, places: Sequence[str] = PLACES) -> Iterator[None]:
    """Raise an exception of either kind once, before or after one of the next calls of a random one of `places`."""
    kind, missing = rng.choice((Interrupted, RuntimeError)), object()
    path, _, name = rng.choice(places).rpartition(".")
    owner = attrgetter(path)(core) if path else core
    function, left, is_before = getattr(owner, name), rng.randrange(6), rng.random() < 0.5
    own = vars(owner).get(name, missing)

    def call(*args: Any, **options: Any) -> Any:
        nonlocal left
        left -= 1
        if left == -1 and is_before:
            raise kind("at a random place")
        result = function(*args, **options)
        if left == -1:
            raise kind("at a random place")
        return result

    setattr(owner, name, call)
    try:
        yield
    finally:
        delattr(owner, name) if own is missing else setattr(owner, name, own)


def missing_pages(engine: Any, rng: random.Random, share: float = 0.5) -> None:
    """Make allocations of pages fail at random, so that requests are preempted; the last running one never is."""
    scheduler = engine._core.scheduler
    grow = scheduler.grow
    scheduler.grow = lambda *given: (len(scheduler.running) < 2 or rng.random() > share) and grow(*given)


Fault = tuple[str, Callable[["Victim"], None], int]  # name, function, weight in the random choice


def attention() -> tuple[Any, dict[str, Any]]:
    """A model whose K/V pages the prefix cache shares between requests, and the options to attach it with."""
    model = tiny_model("llama")
    return model, {"draft": random_head(model), "num_steps": 2, "prefix_cache": True}


def hybrid() -> tuple[Any, dict[str, Any]]:
    """A model that also has recurrent states, into which accepted paths are folded."""
    model = recurrent_model("qwen3_next")
    return model, {"draft": random_draft(model, "eagle"), "algo": "eagle", "num_steps": 2}


def several_shapes() -> tuple[Any, dict[str, Any]]:
    """A model whose rounds are plain, chains or trees, at random."""
    model, options = attention()
    return model, {**options, "num_steps": "auto", "auto_steps": (1, 2), "topk": 2, "num_draft_tokens": 5}


def plain_hybrid() -> tuple[Any, dict[str, Any]]:
    """The same model without a draft: what a step writes is committed at once."""
    return recurrent_model("qwen3_next"), {"algo": None}


SUBJECTS = {make.__name__: make for make in (attention, hybrid, plain_hybrid, several_shapes)}


class Victim:
    """An engine, the texts that its prompts have alone, and the faults injected into it.

    more: faults beside those of `run`, called with the victim.
    """

    def __init__(self, seed: int, tally: Tally, subject: str = "attention", more: Sequence[Fault] = ()):
        self.rng = random.Random(seed)
        self.tally = tally
        self.more = more
        self.model, self.options = SUBJECTS[subject]()
        self.spoilt: list[Any] = []  # requests whose logits were made NaN
        self.tokenizer = Letters()
        stem = [self.rng.randrange(3, VOCAB) for _ in range(10)]  # a prefix that every second prompt shares
        ends = [[self.rng.randrange(3, VOCAB) for _ in range(self.rng.randrange(1, 12))] for _ in range(8)]
        self.prompts = [stem * (i % 2) + end for i, end in enumerate(ends)]
        self.embedding = self.model.get_input_embeddings()
        self.embedding.register_forward_hook(lambda _, ids, out: out + out.roll(1, -1) if self.is_adapted else out)
        self.is_doubled = self.is_adapted = False
        self._known: dict[tuple[bool, bool], tuple[list[list[int]], list[float]]] = {}
        self.engine = self.attach()

    @property
    def expected(self) -> list[list[int]]:
        """Texts of all prompts under the model's current weights, by transformers."""
        return self._now()[0]

    def _now(self) -> tuple[list[list[int]], list[float]]:
        """These texts, and their log-likelihoods."""
        state = self.is_doubled, self.is_adapted
        if state not in self._known:
            texts = [greedy(self.model, p, NUM_TOKENS) for p in self.prompts]
            scores = []
            for prompt, text in zip(self.prompts, texts, strict=True):
                ids = torch.tensor([prompt + text])
                with torch.no_grad():
                    loss = self.model(ids, labels=torch.tensor([[-100] * len(prompt) + text])).loss
                scores.append(-len(text) * float(loss))
            self._known[state] = texts, scores
        return self._known[state]

    def score(self, which: Sequence[int]) -> list[float]:
        """Return the log-likelihoods of the texts of these prompts."""
        scores = self.engine.score([self.prompts[i] for i in which], [self.expected[i] for i in which])
        return [score.logprob for score in scores]

    def attach(self) -> Any:
        """Attach a new engine to the model; some of its requests are preempted."""
        engine = specdec.attach(self.model, tokenizer=self.tokenizer, max_batch=4, max_seq_len=64, **self.options)
        missing_pages(engine, random.Random(self.rng.random()), 0.2)
        if (policy := engine._core.launcher.tiers.policy) is not None:
            draws = random.Random(self.rng.random())
            policy.choose = lambda batch, context: draws.choice((0, 0, *range(4)))
        return engine

    def run(self, num_faults: int) -> None:
        """Inject `num_faults` faults of all kinds, with neighbours running."""
        kinds = Victim
        faults: list[Fault] = [
            ("bad argument", kinds.bad_argument, 20),
            ("closed stream", kinds.closed_stream, 15),
            ("tokenizer", kinds.broken_tokenizer, 15),
            ("broken off", kinds.broken_off, 40),
            ("score", kinds.broken_score, 10),
            ("live forward", kinds.broken_forward, 10),
            ("optimizer step", kinds.optimizer_step, 5),
            ("adapter", kinds.switched_adapter, 5),
            ("NaN logits", kinds.nan_logits, 6),
            ("detach", kinds.detach, 2),
            ("threads", kinds.threads, 2),
            *self.more,
        ]
        for name, fault, _ in self.rng.choices(faults, [weight for *_, weight in faults], k=num_faults):
            self.tally.faults[name] += 1
            with self.neighbours(name):
                fault(self)

    @contextmanager
    def neighbours(self, name: str) -> Iterator[None]:
        """Run up to two requests of other callers within the context; then finish them and check everything."""
        jobs = []
        for _ in range(self.rng.randrange(3)):
            i = self.rng.randrange(len(self.prompts))
            requests = self.engine._requests([self.prompts[i]], max_new_tokens=NUM_TOKENS)
            run = self.engine._run(requests)
            for _ in range(self.rng.randrange(1, 3)):
                next(run, None)
            jobs.append((run, requests[0], i))
        engine, expected = self.engine, self.expected
        yield
        for run, request, i in jobs:
            self.tally.neighbours += 1
            try:
                for _ in run:
                    pass
            except Exception as error:
                # "interrupted": a launch was cut in half; "detach": the fault itself detaches.
                is_told = "step was interrupted" in str(error) or "at a random place" in str(error) or name == "detach"
                (self._tell if is_told else self._accuse)(f"{name}: {error!r}")
                continue
            if request in self.spoilt and request.finish_reason == "error":
                self._tell(f"{name}: its logits were not finite")
            elif expected is self.expected and request.tokens != expected[i]:  # the same weights from start to end
                self._accuse(f"{name}: {request.tokens} is not {expected[i]}")
        if engine is self.engine:
            self.check(name)

    def _tell(self, what: str) -> None:
        self.tally.told += 1

    def _accuse(self, what: str) -> None:
        self.tally.wrong.append(what)

    def check(self, name: str) -> None:
        """Check that no row or slot is lost and that no request still waits."""
        core = self.engine._core
        while core.scheduler.running or core.scheduler.waiting:  # its caller was interrupted before it could abandon
            core.step()
        with core.turns:
            pass
        tables = core.slot_tables
        try:
            self.engine.check_integrity()
        except AssertionError as error:
            self.tally.lost.append(f"{name}: {error}")
        if tables.num_free_rows != tables.max_running or tables.num_free_pages != tables.num_pages:
            self.tally.lost.append(f"{name}: {tables.num_free_rows} rows, {tables.num_free_pages} pages")

    def call(self, **options: Any) -> None:
        """Call `generate`; if it returns, its tokens must be right."""
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
        """The tokenizer of one request raises, with stop strings or without."""
        stop = self.rng.choice(((), ("no such text",)))
        i = self.rng.randrange(len(self.prompts))
        requests = self.engine._requests([self.prompts[i]], max_new_tokens=NUM_TOKENS, stop=stop)
        requests[0].detokenizer.tokenizer = Broken(self.tokenizer, self.rng.randrange(3))
        try:
            for _ in self.engine._run(requests):
                requests[0].read()
        except LookupError:
            self.tally.outcomes["LookupError"] += 1

    def broken_off(self) -> None:
        with breaking(self.rng, self.engine._core):
            self.call()

    def broken_score(self) -> None:
        """An interrupted `score`; the next one must be right, whatever it was about to cache."""
        which = self.rng.sample(range(len(self.prompts)), 4)
        with breaking(self.rng, self.engine._core, SCORING), suppress(Interrupted, RuntimeError):
            self.score(which)
        got, expected = self.score(which), [self._now()[1][i] for i in which]
        if max(abs(a - b) for a, b in zip(got, expected, strict=True)) > 1e-3:
            self._accuse(f"scores: {got} are not {expected}")

    def broken_forward(self) -> None:
        """A forward of the live model that is interrupted in a layer."""

        def end(*_: Any) -> None:
            raise Interrupted

        handle = self.rng.choice(self.model.model.layers).register_forward_pre_hook(end)
        with suppress(Interrupted):
            self.model(torch.tensor([self.prompts[0]]))
        handle.remove()

    def optimizer_step(self) -> None:
        """Double or halve a weight, which is exact."""
        weight = self.embedding.weight
        weight.grad = weight.detach() * (0.5 if self.is_doubled else -1)
        torch.optim.SGD([weight], lr=1.0, fused=self.rng.random() < 0.5).step()
        weight.grad, self.is_doubled = None, not self.is_doubled
        self.call()

    def switched_adapter(self) -> None:
        """Switch an adapter as LoRA does: no weight changes."""
        self.is_adapted = not self.is_adapted
        self.engine.clear_prefix_cache()
        self.call()

    def nan_logits(self) -> None:
        """Make one row of a verify forward NaN; only that request ends, whoever owns it."""
        core = self.engine._core
        forward, left = core.target.forward, [self.rng.randrange(3)]

        def spoil(context: Any, metadata: Any, ids: torch.Tensor) -> Any:
            out = forward(context, metadata, ids)
            left[0] -= 1
            if left[0] == -1:
                self.spoilt.append(core.launcher._batch.requests[-1])
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
        """Detach in the middle of a stream; its next read must raise, and a new engine takes over."""
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
        """Eight callers at once, every second one streaming, while the live model runs too."""
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

        def owner() -> None:
            tokens = greedy(self.model, self.prompts[0], NUM_TOKENS)
            wrong.extend([f"the live model: {tokens}"] if tokens != self.expected[0] else [])

        threads = [*(threading.Thread(target=caller, args=(n,)) for n in range(8)), threading.Thread(target=owner)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120)
        if any(thread.is_alive() for thread in threads):
            wrong.append("a thread hangs")
        self.tally.wrong.extend(wrong)


class Broken:
    """A tokenizer that raises after `left` calls of decode."""

    def __init__(self, tokenizer: Letters, left: int):
        self._tokenizer, self._left = tokenizer, left

    def decode(self, ids: list[int], **options: Any) -> str:
        self._left -= 1
        if self._left < 0:
            raise LookupError("the tokenizer broke")
        return self._tokenizer.decode(ids, **options)
