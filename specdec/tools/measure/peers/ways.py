"""The ways that `specdec bench peers` times: transformers' own, engines, and other libraries that are installed."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from transformers import ContinuousBatchingConfig, GenerationConfig

from specdec.api import attach
from specdec.core.config import EngineConfig
from specdec.core.functional.sampling import SamplingParams
from specdec.reach.heads.load import save_head
from specdec.tools.measure.peers.peer import Run, Task, Texts, Way
from specdec.tools.measure.shapes import acceptance_rates

BLOCK = 256  # tokens of a KV block, transformers' default
NUM_DRAFTED = 3  # tokens a round, as many as an engine drafts by default


def ways(task: Task, *, compile: bool = False) -> Iterator[Way]:
    """Yield plain `generate` first, which the others' texts are compared with, then engines: a run that is cut short
    has both. compile: engines with compiled layers, too."""
    own = partial(Way, package="transformers")
    yield own("generate", make=partial(_generate, task))
    for suffix, is_compiled in (("", False), (", compiled", True))[: 1 + compile]:
        yield Way(f"specdec, no draft{suffix}", "specdec", partial(_engine, task, None, None, is_compiled))
        if task.algo is not None:
            drafted = partial(_engine, task, task.draft, task.algo, is_compiled)
            yield Way(f"specdec, {task.algo}{suffix}", "specdec", drafted)
    yield own("generate, static cache", make=partial(_static, task))
    yield own("generate_batch, graphs", make=partial(_generate_batch, task, use_cuda_graph=True))
    yield own("generate_batch", make=partial(_generate_batch, task))
    lookup = partial(_generate, task, prompt_lookup_num_tokens=NUM_DRAFTED)
    yield own("prompt lookup", make=lookup, one_at_a_time=True)
    if task.assistant is not None:
        assisted = partial(_generate, task, assistant_model=task.assistant)
        yield own("assisted", make=assisted, one_at_a_time=True)
    yield Way("economize, lookup", "economize", partial(_economize, task, "lookup"))
    if task.assistant is not None:
        yield Way("economize, draft model", "economize", partial(_economize, task, "draft_model"))
    if task.algo == "eagle3" and not task.is_random:
        yield Way("economize, eagle3", "economize", partial(_economize, task, "eagle3"))
    yield Way("flashspec, lookup", "flashspec", partial(_flashspec, task, None), one_at_a_time=True)
    if task.assistant is not None:
        drafted = partial(_flashspec, task, task.assistant)
        yield Way("flashspec, draft model", "flashspec", drafted, one_at_a_time=True)


@contextmanager
def _engine(task: Task, draft: Any, algo: str | None, compile: bool) -> Iterator[Run]:
    """An engine that holds all requests at once."""
    longest = max(map(len, task.prompts)) + task.new_tokens
    settings: dict[str, Any] = {"compile": compile, "max_batch": len(task.prompts)}
    if longest > EngineConfig.max_seq_len:
        settings["max_seq_len"] = longest
    if algo is not None and task.is_random:
        settings["synthetic_acceptance"] = acceptance_rates(EngineConfig.num_steps)
    with attach(task.model, draft, algo, **settings) as engine:

        def run(prompts: list[list[int]]) -> Texts:
            greedy = [SamplingParams(seed=i) for i in range(len(prompts))]  # the seeds draw imposed acceptance
            out = engine.generate(prompts, max_new_tokens=task.new_tokens, sampling=greedy)
            return Texts(out.tokens, out.stats.tau)

        yield run


@contextmanager
def _generate(task: Task, **options: Any) -> Iterator[Run]:
    """All prompts at once; one by one with a draft, since transformers' drafting takes no batch."""
    if "assistant_model" in options or "prompt_lookup_num_tokens" in options:
        yield lambda prompts: Texts([_call(task, [p], **options)[0] for p in prompts])
    else:
        yield lambda prompts: Texts(_call(task, prompts, **options))


def _call(task: Task, prompts: list[list[int]], **options: Any) -> list[list[int]]:
    """New tokens of one greedy `generate` of prompts, padded on the left."""
    width = max(map(len, prompts))
    ids = torch.stack([task.tensor([0] * (width - len(p)) + p) for p in prompts])
    mask = torch.stack([task.tensor([0] * (width - len(p)) + [1] * len(p)) for p in prompts])
    greedy = {"do_sample": False, "repetition_penalty": 1.0, "pad_token_id": 0, "max_new_tokens": task.new_tokens}
    out = task.model.generate(input_ids=ids, attention_mask=mask, **greedy, **options)
    return out[:, width:].tolist()


@contextmanager
def _static(task: Task) -> Iterator[Run]:
    """A static cache: on CUDA transformers compiles the decoding forward by itself (mode "reduce-overhead")."""
    try:
        with _generate(task, cache_implementation="static") as run:
            yield run
    finally:
        for name in ("_compiled_call", "_cache"):  # what transformers keeps on the model between calls
            task.model.__dict__.pop(name, None)


@contextmanager
def _generate_batch(task: Task, **options: Any) -> Iterator[Run]:
    """Continuous batching. Its manager is kept between the runs, as a server would keep it."""
    if not task.is_cuda:
        if options.get("use_cuda_graph"):
            raise RuntimeError("CUDA graphs need a CUDA device")
        # A pool that just holds the requests: by default it takes nine tenths of a host's free memory.
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
        task.model.set_attn_implementation(before)  # where the manager failed, its paged one was left


@contextmanager
def _economize(task: Task, technique: str) -> Iterator[Run]:
    """A ragged batch through `decode_batch`, its CUDA graphs on where there is CUDA."""
    economize = import_module("economize")
    config = economize.DecodeConfig(cycle_length=NUM_DRAFTED + 1, cuda_graphs=task.is_cuda)

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
        with attach(task.model, task.draft, task.algo, max_batch=1, cuda_graph=False, prefill_graph="off") as engine:
            head: Any = engine.draft_module
            save_head(folder, head, lm_head_from_target=False, dtype=task.model.dtype)
        return economize.load(task.model, folder)
    own = import_module(f"economize.techniques.{technique}")
    if technique == "lookup":
        return economize.apply(task.model, own.LookupConfig())
    config = copy.deepcopy(task.assistant.config)
    config.__dict__.pop("quantization_config", None)  # the mark of a GGUF file: transformers would not save it
    plain = type(task.assistant)(config).to(task.assistant.dtype)
    plain.load_state_dict(task.assistant.state_dict())
    plain.save_pretrained(folder)
    return economize.apply(task.model, own.DraftModelConfig(model=str(folder)))


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

    yield run
