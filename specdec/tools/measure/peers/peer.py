"""Times ways to generate the same texts: each twice, the second time counts; one that fails is a row with its error."""

import gc
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from importlib.metadata import version
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch

from specdec import __version__

Row = dict[str, Any]


class Texts(NamedTuple):
    """New tokens of every request, and tokens a round where a way tells (the bonus token included)."""

    tokens: list[list[int]]
    tau: float | None = None


Run = Callable[[list[list[int]]], Texts]  # prompts -> texts


@dataclass(frozen=True)
class Task:
    """The same task for all ways: greedy decoding of `prompts` up to EOS or `new_tokens`.

    draft, algo: of the engine, as `attach` takes them, algo spelt out; None, None: there is none. assistant: a small
    causal LM of the target's vocabulary, on its device. few: requests of the ways that take one at a time. is_random:
    weights are random, so acceptance is imposed on engines, and nothing is compared.
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
        ids = self.model.generation_config.eos_token_id
        return list(ids) if isinstance(ids, list | tuple) else ([] if ids is None else [ids])

    def tensor(self, prompt: list[int]) -> torch.Tensor:
        """Return the ids on the target's device: [tokens], int64."""
        return torch.tensor(prompt, device=self.model.device)

    def cut(self, tokens: list[int]) -> list[int]:
        """Return what precedes the first EOS: ways differ in whether they return it, and what they pad with."""
        ends = set(self.ends)
        return tokens[: next((i for i, token in enumerate(tokens) if token in ends), len(tokens))]


class Way(NamedTuple):
    """A way to generate: `make` sets it up, yields what runs it, and cleans up after it.

    what, package: name of the row, and of the distribution that does it.
    """

    what: str
    package: str
    make: Callable[[], AbstractContextManager[Run]]
    one_at_a_time: bool = False


def measure(task: Task, ways: Iterable[Way]) -> Iterator[Row]:
    """Yield a row for every way. The texts of the first are what those of the others are compared with.

    `tokens` are those before EOS, of all requests; `tokens_per_s` is their number by the wall clock, prefill included.
    `first_s`: seconds that setting up and the first run took, compiling and capturing included. `equal`: how many of
    the row's texts are those of the first way, on a real target.
    """
    reference: list[list[int]] | None = None
    for way in ways:
        prompts = task.prompts[: task.few] if way.one_at_a_time else task.prompts
        row: Row = {"what": way.what, "package": way.package, "version": _version(way.package)}
        row |= {"requests": len(prompts), "new_tokens": task.new_tokens, "one_at_a_time": way.one_at_a_time}
        found, texts = timed(way, task, prompts)
        if reference is None:
            reference = texts or []
        if texts and reference and not task.is_random:
            found["equal"] = sum(a == b for a, b in zip(texts, reference, strict=False))
        yield row | found


def timed(way: Way, task: Task, prompts: list[list[int]]) -> tuple[Row, list[list[int]] | None]:
    """Return the numbers of one way and its texts, up to EOS; or an error and None."""
    if _version(way.package) is None:
        return {"error": "not installed"}, None
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
    except Exception as error:  # a way that does not work here is a fact to report
        return {"error": f"{type(error).__name__}: {error}"[:300]}, None
    finally:
        if task.is_cuda:  # the next way finds no graphs or caches of this one
            torch._dynamo.reset()
            gc.collect()
            torch.cuda.empty_cache()
    begun, first, last = times
    num, seconds = sum(map(len, texts)), last - first
    row = {"tokens": num, "seconds": round(seconds, 4), "tokens_per_s": round(num / seconds, 1)}
    return row | {"first_s": round(first - begun, 2), "tau": None if out.tau is None else round(out.tau, 3)}, texts


def _version(package: str) -> str | None:
    """Return the version of an installed package, else None."""
    if package == "specdec":  # its distribution may have another name
        return __version__
    return version(package) if find_spec(package) is not None else None
