"""The draft's model traced and compiled, as the target's layers are, for the graphs of rounds and prefills."""

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from specdec.config import EngineConfig
from specdec.draft.eagle import Compiled, HeadWorker
from specdec.draft.standalone import StandaloneWorker
from specdec.draft.worker import DraftWorker
from specdec.errors import GraphError
from specdec.targets.checked import EXAMPLES, Batch, Subject, trace_checked
from specdec.targets.compiled import compile_layers, why_uncompiled
from specdec.targets.experts import experts_routed


def compile_draft(worker: DraftWorker, config: EngineConfig, prefill_mode: str) -> str:
    """Compile the draft's layers where rounds are compiled; return how they came to run as they do, in words.

    A head that does not trace runs as it is, as a target does; compile=True warns of it, and raises GraphError under
    strict. prefill_mode: the target's.
    """
    if not isinstance(worker, StandaloneWorker | HeadWorker):
        return ""
    why = why_uncompiled(config, worker.hot_ids.device)
    if isinstance(worker, StandaloneWorker):
        return f"not compiled: {why}" if why else compile_layers(worker.model, config, prefill_mode).told
    try:
        if not why:
            _compile_head(worker, config)
    except GraphError as error:
        worker.drop_compiled()
        why = str(error)
        if config.compile is True and config.strict:
            raise GraphError(f"the draft's layers: {error}") from error
        if config.compile is True:
            warnings.warn(f"the draft runs uncompiled: {error}. Leave compile out if that is expected", stacklevel=6)
    return f"not compiled: {why}" if why else "compiled"


def _compile_head(worker: HeadWorker, config: EngineConfig) -> None:
    """Trace every module of a head, states of (ids, positions, states) [T, ...], and the norm before its output head,
    where that is not part of it."""
    head, examples = worker.head, _examples(worker)
    states_alone = [[(states,) for _ids, _positions, states in batches] for batches in examples]

    def traced(run: Callable[..., Any], examples: Sequence[Sequence[Batch]], num_layers: int) -> Compiled:
        subject = Subject(
            run=run,
            examples=examples,
            ready=lambda: experts_routed(worker.expert_configs),
            num_outputs=1,
            num_layers=num_layers,
            largest=max(config.prefill_tokens, config.max_batch * config.tail_reserve),
        )
        return trace_checked(subject, config, head.weight.device)

    num_layers = max(1, len(head.attention_layers) // worker.num_modules)
    for module in range(worker.num_modules):

        def run(
            ids: torch.Tensor, positions: torch.Tensor, hidden: torch.Tensor, module: int = module
        ) -> tuple[torch.Tensor]:
            return (worker.run_live(ids, positions, hidden, module),)

        def norm(states: torch.Tensor, module: int = module) -> tuple[torch.Tensor]:
            return (head.normed(states, module),)

        worker.compiled[module] = traced(run, examples, num_layers)
        if not (head.recycles_normed or isinstance(head.out_norm(module), nn.Identity)):
            worker.compiled_norms[module] = traced(norm, states_alone, 0)


def _examples(worker: HeadWorker) -> list[list[Batch]]:
    """Return batches of the sizes of EXAMPLES with random states."""
    random, device = torch.Generator().manual_seed(0), worker.head.weight.device
    groups: list[list[Batch]] = []
    for sizes in EXAMPLES:
        num_tokens = sum(sizes)
        ids = torch.randint(0, worker.vocab_size, (num_tokens,), generator=random, device="cpu").to(device)
        positions = torch.arange(num_tokens, device=device) % worker.rope_tables.shape[0]
        states = torch.randn(num_tokens, worker.hidden_size, generator=random, device="cpu").to(device, worker.dtype)
        groups.append(list(zip(*(t.split(list(sizes)) for t in (ids, positions, states)), strict=True)))
    return groups
