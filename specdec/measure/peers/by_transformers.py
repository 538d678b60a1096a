"""Ways of transformers: `generate`, a static cache, `generate_batch`, prompt lookup and assisted decoding."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from transformers import ContinuousBatchingConfig, GenerationConfig

from specdec.measure.peers.way import Run, Task, Texts, Way

BLOCK = 256  # tokens of a KV block, transformers' default
LOOKUP_TOKENS = 3  # as many as an engine drafts by default


def ways(task: Task) -> Iterator[Way]:
    """Yield plain `generate` first: the others' texts are compared with its."""
    own = partial(Way, package="transformers")
    yield own("generate", make=lambda: _generate(task))
    yield own("generate, static cache", make=lambda: _static(task), facts={"compiled": task.is_cuda})
    yield own("generate_batch, graphs", make=lambda: _generate_batch(task, use_cuda_graph=True))
    yield own("generate_batch", make=lambda: _generate_batch(task))
    one = partial(own, one_at_a_time=True)
    yield one("prompt lookup", make=lambda: _generate(task, prompt_lookup_num_tokens=LOOKUP_TOKENS))
    if task.assistant is not None:
        yield one("assisted", make=lambda: _generate(task, assistant_model=task.assistant))


@contextmanager
def _generate(task: Task, **options: Any) -> Iterator[Run]:
    """All prompts at once; one by one with a draft, since transformers' drafting takes no batch."""
    if "assistant_model" in options or "prompt_lookup_num_tokens" in options:
        yield lambda prompts: Texts([_call(task, [p], **options)[0] for p in prompts])
    else:
        yield lambda prompts: Texts(_call(task, prompts, **options))


@contextmanager
def _static(task: Task) -> Iterator[Run]:
    """A static cache: on CUDA transformers compiles the decoding forward by itself (mode "reduce-overhead")."""
    try:
        with _generate(task, cache_implementation="static") as run:
            yield run
    finally:
        for name in ("_compiled_call", "_cache"):  # what transformers keeps on the model between calls
            task.model.__dict__.pop(name, None)
        if task.is_cuda:
            torch._dynamo.reset()  # frees the CUDA graphs and their pool


@contextmanager
def _generate_batch(task: Task, **options: Any) -> Iterator[Run]:
    """Continuous batching. Its manager is kept between the runs, as a server would keep it."""
    if not task.is_cuda:
        if options.get("use_cuda_graph"):
            raise RuntimeError("CUDA graphs need a CUDA device")
        options |= _small_pool(task)
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


def _small_pool(task: Task) -> dict[str, int]:
    """Settings of a pool that just holds the requests: by default it takes nine tenths of a host's free memory."""
    longest = max(map(len, task.prompts))
    blocks = 2 + (longest + task.new_tokens) // BLOCK
    return {"block_size": BLOCK, "num_blocks": blocks * len(task.prompts), "max_batch_tokens": max(longest, 512)}


def _call(task: Task, prompts: list[list[int]], **options: Any) -> list[list[int]]:
    """New tokens of one greedy `generate` of prompts, padded on the left."""
    width = max(map(len, prompts))
    ids = torch.stack([task.tensor([0] * (width - len(p)) + p) for p in prompts])
    mask = torch.stack([task.tensor([0] * (width - len(p)) + [1] * len(p)) for p in prompts])
    law = {"do_sample": False, "repetition_penalty": 1.0, "pad_token_id": 0, "max_new_tokens": task.new_tokens}
    out = task.model.generate(input_ids=ids, attention_mask=mask, **law, **options)
    return out[:, width:].tolist()
