"""What every way to generate is given, and what it gives back."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch


class Texts(NamedTuple):
    """New tokens of every request, and tokens a round where a way tells (the bonus token included)."""

    tokens: list[list[int]]
    tau: float | None = None


Run = Callable[[list[list[int]]], Texts]  # prompts -> texts


@dataclass(frozen=True)
class Task:
    """What all ways do: greedy decoding of `prompts` up to EOS or `new_tokens`.

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
        """Whether the target is on a CUDA device."""
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


@dataclass(frozen=True)
class Way:
    """A way to generate: `make` sets it up, yields what runs it, and cleans up after it.

    what, package: name of the row, and of the distribution that does it. facts: more keys of the row.
    """

    what: str
    package: str
    make: Callable[[], AbstractContextManager[Run]]
    one_at_a_time: bool = False
    facts: dict[str, Any] = field(default_factory=dict)
