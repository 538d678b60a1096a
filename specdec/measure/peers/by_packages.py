"""Ways of other libraries, where they are installed: economize and flashspec. Imported only when they run."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from specdec.api import attach
from specdec.heads.load import save_head
from specdec.measure.peers.way import Run, Task, Texts, Way

CYCLE = 4  # economize: tokens a cycle; three are drafted, as by an engine


def ways(task: Task) -> Iterator[Way]:
    """Yield both libraries' prompt lookup, the assistant as their draft model, and an EAGLE-3 head in economize."""
    theirs = partial(Way, package="economize")
    yield theirs("economize, lookup", make=lambda: _economize(task, "lookup"))
    if task.assistant is not None:
        yield theirs("economize, draft model", make=lambda: _economize(task, "draft_model"))
    if task.algo == "eagle3" and not task.is_random:
        yield theirs("economize, eagle3", make=lambda: _economize(task, "eagle3"))
    one = partial(Way, package="flashspec", one_at_a_time=True)
    yield one("flashspec, lookup", make=lambda: _flashspec(task, None))
    if task.assistant is not None:
        yield one("flashspec, draft model", make=lambda: _flashspec(task, task.assistant))


@contextmanager
def _economize(task: Task, technique: str) -> Iterator[Run]:
    """A ragged batch through `decode_batch`, its CUDA graphs on where there is CUDA."""
    economize = import_module("economize")
    config = economize.DecodeConfig(cycle_length=CYCLE, cuda_graphs=task.is_cuda)

    def run(prompts: list[list[int]]) -> Texts:
        rows = [task.tensor(p) for p in prompts]
        found = peer.decode_batch(rows, task.new_tokens, decoding=config, stop=task.ends or None)
        accepted = [num for result in found for _, num in result.acceptance]
        tau = 1 + sum(accepted) / len(accepted) if accepted else None
        return Texts([result.tokens.tolist() for result in found], tau)

    with TemporaryDirectory() as folder:
        peer = _economized(task, technique, Path(folder))
        try:
            yield run
        finally:
            peer.detach()


def _economized(task: Task, technique: str, folder: Path) -> Any:
    """The target with a drafter of economize's attached; drafts reach it through files in `folder`."""
    economize = import_module("economize")
    if technique == "eagle3":
        engine = attach(task.model, task.draft, task.algo, max_batch=1, cuda_graph=False, prefill_graph="off")
        head: Any = engine.draft_module
        try:
            save_head(folder, head, lm_head_from_target=False, dtype=task.model.dtype)
        finally:
            engine.detach()
        return economize.load(task.model, folder)
    own = import_module(f"economize.techniques.{technique}")
    if technique == "lookup":
        return economize.apply(task.model, own.LookupConfig())
    _plain_copy(task.assistant).save_pretrained(folder)
    return economize.apply(task.model, own.DraftModelConfig(model=str(folder)))


def _plain_copy(model: Any) -> Any:
    """The same model without the mark of a GGUF file, with which transformers would not save it."""
    config = copy.deepcopy(model.config)
    config.__dict__.pop("quantization_config", None)
    plain = type(model)(config).to(model.dtype)
    plain.load_state_dict(model.state_dict())
    return plain


@contextmanager
def _flashspec(task: Task, assistant: Any) -> Iterator[Run]:
    """One request at a time, its default settings: compiled on CUDA; with a model, prompt lookup before it."""
    flashspec, verifier = import_module("flashspec"), import_module("flashspec.engine.verifier")
    name, device, dtype = "target", task.model.device, task.model.dtype
    if assistant is None:
        drafter = import_module("flashspec.engine.ngram").NgramDrafter()
    else:
        kind = import_module("flashspec.engine.hf_drafter").HuggingFaceDrafter
        drafter = kind("assistant", device, dtype, temperature=0.0, model=assistant)
    greedy = flashspec.SamplingConfig(temperature=0.0)
    where = {"device": str(device), "dtype": str(dtype).removeprefix("torch."), "eos_token_ids": tuple(task.ends)}
    config = flashspec.FlashSpecConfig(sampling=greedy, target_name=name, **where)
    engine = flashspec.SpeculativeEngine(config, [drafter], verifier.TargetModel(name, device, dtype, model=task.model))

    def run(prompts: list[list[int]]) -> Texts:
        found = [engine.generate(task.tensor(p)[None], max_new_tokens=task.new_tokens) for p in prompts]
        steps = [step.emitted for result in found for step in result.arm_steps]
        tau = sum(steps) / len(steps) if steps else None
        return Texts([[i for i in result.output_ids[0].tolist() if i >= 0] for result in found], tau)

    try:
        yield run
    finally:
        if task.is_cuda:
            torch._dynamo.reset()  # it compiles with CUDA graphs of torch's own
