"""Ways of specdec: plain decoding and a draft, and the same with compiled layers."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from specdec.api import attach
from specdec.config import EngineConfig
from specdec.functional.sampling import SamplingParams
from specdec.measure.peers.way import Run, Task, Texts, Way
from specdec.measure.shapes import acceptance_rates


def ways(task: Task, *, compile: bool = False) -> Iterator[Way]:
    """Yield an engine without a draft, one with it if there is one, and with `compile` both of them compiled, too."""
    kinds: dict[str, dict[str, Any]] = {"": {"compile": False}}
    if compile:
        kinds[", compiled"] = {"compile": True}
    for suffix, more in kinds.items():
        yield Way(f"specdec, no draft{suffix}", "specdec", partial(_engine, task, None, None, **more))
        if task.algo is not None:
            drafted = partial(_engine, task, task.draft, task.algo, **more)
            yield Way(f"specdec, {task.algo}{suffix}", "specdec", drafted)


@contextmanager
def _engine(task: Task, draft: Any, algo: str | None, **settings: Any) -> Iterator[Run]:
    """An engine that holds all requests at once."""
    longest = max(map(len, task.prompts)) + task.new_tokens
    settings["max_batch"] = len(task.prompts)
    if longest > EngineConfig.max_seq_len:
        settings["max_seq_len"] = longest
    if algo is not None and task.is_random:
        settings["synthetic_acceptance"] = acceptance_rates(EngineConfig.num_steps)
    engine = attach(task.model, draft, algo, **settings)

    def run(prompts: list[list[int]]) -> Texts:
        laws = [SamplingParams(seed=i) for i in range(len(prompts))]  # greedy; the seeds draw imposed acceptance
        out = engine.generate(prompts, max_new_tokens=task.new_tokens, sampling=laws)
        return Texts(out.tokens, out.stats.tau)

    try:
        yield run
    finally:
        engine.detach()
