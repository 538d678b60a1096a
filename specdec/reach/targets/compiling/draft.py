"""The draft's model traced and compiled, as the target's layers are, for the graphs of rounds and prefills."""

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from specdec.core.config import EngineConfig
from specdec.core.draft.assistant import AssistantWorker
from specdec.core.draft.block import BlockWorker
from specdec.core.draft.eagle import HeadWorker
from specdec.core.draft.head import DraftHead
from specdec.core.draft.standalone import StandaloneWorker
from specdec.core.draft.worker import DraftWorker
from specdec.reach.targets.compiling.checked import NUM_TOKENS, Batch, Layers, Subject, trace_checked
from specdec.reach.targets.compiling.target import compile_layers, compiled_or_why, random_tokens, why_uncompiled
from specdec.reach.targets.hf import HFTarget

if TYPE_CHECKING:
    from specdec.graphs.compile.trace import Traced


def compile_draft(worker: DraftWorker, config: EngineConfig, prefill_mode: str) -> str:
    """Compile the draft's layers where rounds are compiled; return how they came to run as they do, in words.

    A head that does not trace runs as it is, as a target does; see `compiled_or_why`. prefill_mode: the target's.
    """
    if not isinstance(worker, StandaloneWorker | AssistantWorker | HeadWorker | BlockWorker):
        return ""
    why = why_uncompiled(config, worker.hot_ids.device)
    if why:
        return f"not compiled: {why}"
    if isinstance(worker, StandaloneWorker):
        assert isinstance(worker.model, HFTarget)
        return compile_layers(worker.model, config, prefill_mode)[1]
    names = "the draft's layers", "the draft"
    if isinstance(worker, BlockWorker):
        return compiled_or_why(partial(_compile_block, worker, config), config, names)
    if isinstance(worker, AssistantWorker):
        return compiled_or_why(partial(_compile_assistant, worker, config), config, names)
    return compiled_or_why(partial(_compile_head, worker, config), config, names)


def _compile_head(worker: HeadWorker, config: EngineConfig) -> list["Traced"]:
    """Trace every module of a head, states of (ids, positions, states) [T, ...], and the norm before its output head,
    where that is not part of it."""
    head, inputs = worker.head, _inputs(worker)
    done: list[Traced] = []

    def traced(run: Callable[..., Any], inputs: Batch, num_layers: int) -> "Traced":
        done.append(_traced(head, config, lambda *given: (run(*given),), inputs, num_layers))
        return done[-1]

    num_layers = max(1, len(head.attention_layers) // worker.num_modules)
    with ExitStack() as undo:
        undo.callback(worker.drop_compiled)
        for module in range(worker.num_modules):
            worker.compiled[module] = traced(partial(worker.run_live, module=module), inputs, num_layers)
            if not (head.recycles_normed or isinstance(head.out_norm(module), nn.Identity)):
                worker.compiled["norm", module] = traced(partial(head.normed, module=module), inputs[2:], 0)
        undo.pop_all()
    return done


def _compile_block(worker: BlockWorker, config: EngineConfig) -> list["Traced"]:
    """Trace the pass over a block, and the products that make K/V of features."""
    head, num_layers = worker.head, len(worker.head.attention_layers)
    ids, positions, features = _inputs(worker)
    with ExitStack() as undo:
        undo.callback(worker.drop_compiled)
        worker.compiled["block"] = block = _traced(head, config, worker.run_live, (ids, positions), num_layers)
        keys_values = _traced(head, config, worker.keys_values_live, (features,), 0, 2 * num_layers)
        worker.compiled["keys_values"] = keys_values
        undo.pop_all()
    return [block, keys_values]


def _compile_assistant(worker: AssistantWorker, config: EngineConfig) -> list["Traced"]:
    """Trace a step: own states of (ids, positions, states of the target's width) [T, ...]."""
    device, random = worker.hot_ids.device, torch.Generator().manual_seed(0)
    states = torch.randn(NUM_TOKENS, worker.hidden_size, generator=random, device="cpu").to(device, worker.dtype)
    subject = Subject(
        run=worker.run_live,
        module=worker.assistant.model,
        inputs=(*random_tokens(NUM_TOKENS, worker.vocab_size, device), states),
        ready=worker.assistant.routed,
        num_outputs=1,
        num_layers=worker.assistant.num_layers,
        largest=config.max_batch * config.topk,
    )
    traced = trace_checked(subject, config, device)
    worker.compiled["step"] = traced
    return [traced]


def _traced(
    head: DraftHead, config: EngineConfig, run: Layers, inputs: Batch, num_layers: int, num_outputs: int = 1
) -> "Traced":
    """Trace `run` of a head; see `Subject`."""
    subject = Subject(
        run=run,
        module=head,
        inputs=inputs,
        ready=head.routed,
        num_outputs=num_outputs,
        num_layers=num_layers,
        largest=max(config.prefill_tokens, config.max_batch * config.tail_reserve),
    )
    return trace_checked(subject, config, head.weight.device)


def _inputs(worker: HeadWorker | BlockWorker) -> Batch:
    """Return ids, positions and random states, or features, [NUM_TOKENS, ...]."""
    random, device = torch.Generator().manual_seed(0), worker.head.weight.device
    ids, positions = random_tokens(NUM_TOKENS, worker.vocab_size, device)
    head = worker.head
    width = worker.hidden_size or len(head.aux_layers) * head.target_hidden_size
    states = torch.randn(NUM_TOKENS, width, generator=random, device="cpu").to(device, worker.dtype)
    return ids, positions % worker.rope_tables.shape[0], states
