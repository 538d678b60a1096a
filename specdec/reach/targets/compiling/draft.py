"""The draft's model traced and compiled, as the target's layers are, for the graphs of rounds and prefills."""

from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from specdec.core.config import EngineConfig
from specdec.core.draft.assistant import AssistantWorker
from specdec.core.draft.block import BlockWorker
from specdec.core.draft.eagle import HeadWorker
from specdec.core.draft.standalone import StandaloneWorker
from specdec.core.draft.worker import DraftWorker
from specdec.reach.targets.compiling.checked import NUM_TOKENS, Batch, Comparison, Layers, Subject, trace_checked
from specdec.reach.targets.compiling.target import compile_layers, compiled_or_why, random_tokens, why_uncompiled
from specdec.reach.targets.hf import HFTarget

if TYPE_CHECKING:
    from specdec.graphs.compile.trace import Traced


class _Part(NamedTuple):
    """A part of a draft's model that is traced by itself: its name among the worker's compiled parts; see `Subject`."""

    name: object
    run: Layers
    inputs: Batch
    num_layers: int = 0
    num_outputs: int = 1


def compile_draft(worker: DraftWorker, config: EngineConfig, prefill_mode: str, later: list[Comparison] | None) -> str:
    """Compile the draft's layers where rounds are compiled; return in words how they run, and why.

    A head that does not trace runs uncompiled, as a target does; see `compiled_or_why`. prefill_mode: the target's.
    later: see `trace_checked`.
    """
    if not isinstance(worker, StandaloneWorker | AssistantWorker | HeadWorker | BlockWorker):
        return ""
    why = why_uncompiled(config, worker.hot_ids.device)
    if why:
        return f"not compiled: {why}"
    if isinstance(worker, StandaloneWorker):
        assert isinstance(worker.model, HFTarget)
        return compile_layers(worker.model, config, prefill_mode, later)[1]
    return compiled_or_why(partial(_compile, worker, config, later), config, ("the draft's layers", "the draft"))


def _compile(
    worker: HeadWorker | BlockWorker | AssistantWorker, config: EngineConfig, later: list[Comparison] | None
) -> "list[Traced]":
    """Trace all parts of a draft; if one fails, the draft runs uncompiled."""
    model: Any = worker.assistant if isinstance(worker, AssistantWorker) else worker.head
    most = max(config.prefill_tokens, config.max_batch * config.tail_reserve)
    done: list[Traced] = []
    waiting: list[Comparison] = []
    assert worker.module is not None
    with ExitStack() as undo:
        undo.callback(worker.drop_compiled)
        for part in _parts(worker):
            subject = Subject(
                run=part.run,
                module=worker.module,
                inputs=part.inputs,
                ready=model.routed,
                num_outputs=part.num_outputs,
                num_layers=part.num_layers,
                largest=config.max_batch * config.topk if isinstance(worker, AssistantWorker) else most,
            )
            traced = trace_checked(subject, config, worker.hot_ids.device, None if later is None else waiting)
            worker.compiled[part.name] = traced
            done.append(traced)
        undo.pop_all()
    if later is not None:
        later += waiting
    return done


def _parts(worker: HeadWorker | BlockWorker | AssistantWorker) -> Iterator[_Part]:
    """Yield the parts: an assistant's step; a block head's pass over a block, and the projections of features to K/V;
    of other heads every module with the norm before its output head, and the first module's norm by itself."""
    inputs = _inputs(worker)
    if isinstance(worker, AssistantWorker):
        yield _Part("step", worker.run_live, inputs, worker.assistant.num_layers)
        return
    head, num_layers = worker.head, len(worker.head.attention_layers)
    if isinstance(worker, BlockWorker):
        yield _Part("block", worker.run_live, inputs[:2], num_layers)
        yield _Part("keys_values", worker.keys_values_live, inputs[2:], 0, 2 * num_layers)
        return
    for module in range(worker.num_modules):
        run, num_outputs = partial(worker.run_live, module=module), 1 + worker.head.norms_late(module)
        yield _Part(module, run, inputs, max(1, num_layers // worker.num_modules), num_outputs)
    if worker.head.norms_late():
        yield _Part("norm", lambda states: (head.normed(states),), inputs[2:])


def _inputs(worker: HeadWorker | BlockWorker | AssistantWorker) -> Batch:
    """Return ids, positions and random states, or features, [NUM_TOKENS, ...]."""
    random, device = torch.Generator().manual_seed(0), worker.hot_ids.device
    ids, positions = random_tokens(NUM_TOKENS, worker.vocab_size, device)
    width = worker.hidden_size
    if isinstance(worker, BlockWorker):
        width = len(worker.head.aux_layers) * worker.head.target_hidden_size
    states = torch.randn(NUM_TOKENS, width, generator=random, device="cpu").to(device, worker.dtype)
    if isinstance(worker, AssistantWorker):
        return ids, positions, states
    return ids, positions % worker.rope_tables.shape[0], states
