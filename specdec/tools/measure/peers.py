"""Times ways to generate the same texts: transformers' own, and engines.

Each runs twice, and the second time counts; a failing one gives a row with its error.
"""

import gc
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from itertools import count
from typing import Any, NamedTuple

import torch
from transformers import ContinuousBatchingConfig, GenerationConfig

from specdec import __version__
from specdec.api import attach
from specdec.core.config import EngineConfig
from specdec.core.functional.sampling import SamplingParams
from specdec.reach.targets.shape import eos_ids_of
from specdec.tools.measure.shapes import acceptance_rates

HF = "transformers"
VERSIONS = {HF: version(HF), "specdec": __version__}
BLOCK = 256  # tokens of a KV block, transformers' default
NUM_DRAFTED = 3  # tokens per round, the default of an engine
Row = dict[str, Any]


class Texts(NamedTuple):
    """New tokens of every request, and tokens per round if the way reports them (the bonus token included).

    expected_tau: the mean of the imposed acceptance over many rounds.
    """

    tokens: list[list[int]]
    tau: float | None = None
    expected_tau: float | None = None


Run = Callable[[list[list[int]]], Texts]  # prompts -> texts


@dataclass(frozen=True)
class Task:
    """The same task for all ways: greedy decoding of `prompts` up to EOS or `new_tokens`.

    draft, algo: of the engine, as `attach` takes them, algo not "auto"; None, None: no draft. assistant: a small causal
    LM of the target's vocabulary, on its device. few: requests for ways that take one at a time. is_random: weights are
    random, so acceptance is imposed on engines, and texts are not compared.
    """

    model: Any
    prompts: list[list[int]]
    new_tokens: int
    draft: Any = None
    algo: str | None = None
    assistant: Any = None
    few: int = 4
    is_random: bool = False

    @property
    def is_cuda(self) -> bool:
        """Return whether the target is on a CUDA device."""
        return self.model.device.type == "cuda"

    @property
    def ends(self) -> list[int]:
        """Ids that end a text; none with random weights."""
        return eos_ids_of(self.model)

    def tensor(self, prompt: list[int]) -> torch.Tensor:
        """Return the ids on the target's device: [tokens], int64."""
        return torch.tensor(prompt, device=self.model.device)

    def cut(self, tokens: list[int]) -> list[int]:
        """Return the tokens before the first EOS: ways differ in whether they return it, and in their padding."""
        ends = set(self.ends)
        return tokens[: next((i for i, token in enumerate(tokens) if token in ends), len(tokens))]


class Way(NamedTuple):
    """A way to generate: `make` sets it up, yields the function that runs it, and cleans up after it.

    what, package: name of the row, and of the distribution that runs it.
    """

    what: str
    package: str
    make: Callable[[], AbstractContextManager[Run]]
    one_at_a_time: bool = False


def measure(task: Task, ways: Iterable[Way]) -> Iterator[Row]:
    """Yield a row for every way. The texts of the first way are the reference for the others.

    `tokens` are those before EOS, of all requests; `tokens_per_s` is their number by the wall clock, prefill included.
    `first_s`: seconds of setting up and of the first run, compiling and capturing included. `equal`: how many of the
    row's texts equal those of the first way, on a real target.
    """
    reference: list[list[int]] | None = None
    for way in ways:
        prompts = task.prompts[: task.few] if way.one_at_a_time else task.prompts
        row: Row = {"what": way.what, "package": way.package, "version": VERSIONS[way.package]}
        row |= {"requests": len(prompts), "new_tokens": task.new_tokens, "one_at_a_time": way.one_at_a_time}
        found, texts = timed(way, task, prompts)
        if reference is None:
            reference = texts or []
        if texts and reference and not task.is_random:
            found["equal"] = sum(a == b for a, b in zip(texts, reference, strict=False))
        yield row | found


def timed(way: Way, task: Task, prompts: list[list[int]]) -> tuple[Row, list[list[int]] | None]:
    """Return the numbers of one way and its texts, up to EOS; or an error and None."""
    times = [time.perf_counter()]
    try:
        with way.make() as run:
            for _ in range(2):
                out = run(prompts)
                if task.is_cuda:
                    torch.cuda.synchronize()
                times.append(time.perf_counter())
        texts = [task.cut(text) for text in out.tokens]
        assert len(texts) == len(prompts), f"{len(texts)} texts of {len(prompts)} requests"
    except Exception as error:  # a way that does not work here is a result to report
        return {"error": f"{type(error).__name__}: {error}"[:300]}, None
    finally:
        if task.is_cuda:  # the next way finds no graphs or caches of this one
            torch._dynamo.reset()
            gc.collect()
            torch.cuda.empty_cache()
    begun, first, last = times
    num, seconds = sum(map(len, texts)), last - first
    row: Row = {"tokens": num, "seconds": round(seconds, 4), "tokens_per_s": round(num / seconds, 1)}
    taus = {"tau": out.tau, "expected_tau": out.expected_tau}
    row |= {name: None if tau is None else round(tau, 3) for name, tau in taus.items()}
    return row | {"first_s": round(first - begun, 2)}, texts


def ways(task: Task) -> Iterator[Way]:
    """Yield plain `generate` first, the reference, then engines: a run cut short has both."""
    yield Way("generate", HF, partial(_generate, task))
    yield Way("specdec, no draft", "specdec", partial(_engine, task, None, None))
    if task.algo is not None:
        yield Way(f"specdec, {task.algo}", "specdec", partial(_engine, task, task.draft, task.algo))
    yield Way("generate, static cache", HF, partial(_static, task))
    yield Way("generate_batch, graphs", HF, partial(_generate_batch, task, use_cuda_graph=True))
    yield Way("generate_batch", HF, partial(_generate_batch, task))
    yield Way("prompt lookup", HF, partial(_generate, task, prompt_lookup_num_tokens=NUM_DRAFTED), one_at_a_time=True)
    if task.assistant is not None:
        yield Way("assisted", HF, partial(_generate, task, assistant_model=task.assistant), one_at_a_time=True)


@contextmanager
def _engine(task: Task, draft: Any, algo: str | None) -> Iterator[Run]:
    """Set up an engine that holds all requests at once."""
    longest = max(map(len, task.prompts)) + task.new_tokens
    settings: dict[str, Any] = {"max_batch": len(task.prompts)}
    if longest > EngineConfig.max_seq_len:
        settings["max_seq_len"] = longest
    if algo is not None and task.is_random:
        settings["synthetic_acceptance"] = acceptance_rates(EngineConfig.num_steps)
    calls, rates = count(), settings.get("synthetic_acceptance")  # imposed acceptance is drawn by each call's own seed
    with attach(task.model, draft, algo, **settings) as engine:

        def run(prompts: list[list[int]]) -> Texts:
            first = next(calls) * len(prompts)
            greedy = [SamplingParams(seed=first + i) for i in range(len(prompts))]
            out = engine.generate(prompts, max_new_tokens=task.new_tokens, sampling=greedy)
            return Texts(out.tokens, out.stats.tau, 1 + sum(rates) if rates else None)

        yield run


@contextmanager
def _generate(task: Task, **options: Any) -> Iterator[Run]:
    """Run all prompts at once, padded on the left; one by one with a draft, since transformers' drafting takes no
    batch."""
    greedy = {"do_sample": False, "repetition_penalty": 1.0, "pad_token_id": 0, "max_new_tokens": task.new_tokens}

    def call(prompts: list[list[int]]) -> list[list[int]]:
        width = max(map(len, prompts))
        ids = torch.stack([task.tensor([0] * (width - len(p)) + p) for p in prompts])
        mask = torch.stack([task.tensor([0] * (width - len(p)) + [1] * len(p)) for p in prompts])
        return task.model.generate(input_ids=ids, attention_mask=mask, **greedy, **options)[:, width:].tolist()

    is_alone = "assistant_model" in options or "prompt_lookup_num_tokens" in options
    yield lambda prompts: Texts([text for p in prompts for text in call([p])] if is_alone else call(prompts))


@contextmanager
def _static(task: Task) -> Iterator[Run]:
    """Use a static cache: on CUDA transformers compiles the decoding forward itself (mode "reduce-overhead")."""
    try:
        with _generate(task, cache_implementation="static") as run:
            yield run
    finally:
        for name in ("_compiled_call", "_cache"):  # transformers keeps these on the model between calls
            task.model.__dict__.pop(name, None)


@contextmanager
def _generate_batch(task: Task, **options: Any) -> Iterator[Run]:
    """Use continuous batching. Its manager is kept between the runs, as in a server."""
    if not task.is_cuda:
        if options.get("use_cuda_graph"):
            raise RuntimeError("CUDA graphs need a CUDA device")
        # A pool that just holds the requests: the default takes nine tenths of a host's free memory.
        longest = max(map(len, task.prompts))
        blocks = (2 + (longest + task.new_tokens) // BLOCK) * len(task.prompts)
        options |= {"block_size": BLOCK, "num_blocks": blocks, "max_batch_tokens": max(longest, 512)}
    ends = task.ends or -1
    config = GenerationConfig(max_new_tokens=task.new_tokens, do_sample=False, eos_token_id=ends, pad_token_id=0)
    settings = ContinuousBatchingConfig(**options)

    def run(prompts: list[list[int]]) -> Texts:
        given = {"generation_config": config, "continuous_batching_config": settings}
        found = task.model.generate_batch(prompts, **given, persistent_manager=True)
        errors = [out.error for out in found.values() if out.error]
        if errors or len(found) < len(prompts):
            raise RuntimeError(f"{len(found)} of {len(prompts)} requests came back; errors: {errors[:1]}")
        names = sorted(found, key=lambda name: int(name.split("_")[-1]))
        return Texts([list(found[name].generated_tokens) for name in names])

    before = task.model.config._attn_implementation
    try:
        yield run
    finally:
        task.model.destroy_cached_continuous_batching_manager()
        task.model.set_attn_implementation(before)  # a failed manager leaves its paged attention behind
