"""The kernels that an engine will run held against their torch twins, if wanted: on its device, at its models' sizes.

`targets.admission.equality` compares our route with the model's own forward on the twins, and tests see some sizes,
GPUs and versions of Triton. What is compiled elsewhere may be wrong all the same, without an error. Attention,
recurrent layers and products with experts are checked; trees, sampling and placement are left to tests.
"""

from collections.abc import Iterator, Sequence
from importlib.metadata import PackageNotFoundError, version

import torch
from torch import nn

from specdec.backends.attention_check import attention_checks
from specdec.backends.differences import Check
from specdec.backends.experts_check import expert_checks
from specdec.backends.op import ForwardContext
from specdec.backends.recurrent_check import recurrent_checks
from specdec.backends.sample_tree import Tail
from specdec.backends.torch_ref import TorchBackend
from specdec.errors import AttachError
from specdec.graphs.building import rehearse
from specdec.round.parts import Parts
from specdec.targets.adapters.experts import distinct_weights

WRONG = "its text could be wrong, so it is not attached; please report this"
BY_BACKEND = f"{WRONG}. backend='torch' runs none of these kernels and is slow; other versions of Triton may be right"
BY_TRITON = f"{WRONG}. Other versions of Triton may be right; experts run on its kernels whatever the backend"
ELSEWHERE = "on another rank, kernels differ from their torch twins"


def check_kernels(parts: Parts) -> None:
    """Raise AttachError, on all ranks, if a kernel differs from its twin by more than rounding can explain on any.

    For `EngineConfig.check_kernels`; without it, nothing is checked.
    """
    target = parts.target
    if not parts.config.check_kernels:
        return
    with torch.no_grad():
        of_backends = [*_target_checks(parts), *_draft_checks(parts)]
        of_experts = [check for model in (target.model, parts.worker.module) for check in _expert_checks(model)]
        rehearse((), parts.compiling_kernels(), lambda: _compile([*of_backends, *of_experts]))
        problems, own = ([p for check in checks for p in check.problems()] for checks in (of_backends, of_experts))
    if target.any_rank(bool(problems or own)):
        advice = BY_TRITON if own else BY_BACKEND
        found = [*problems, *own] or [ELSEWHERE]
        raise AttachError(type(target.model).__name__, [*found, _environment(target.device), advice])


def _compile(checks: Sequence[Check]) -> None:
    for check in checks:
        check.ours()


def _target_checks(parts: Parts) -> list[Check]:
    tail = Tail(parts.config.verify_width, parts.config.tree_words)
    return _checks(parts, parts.context, parts.target.dtype, [tail], tail)


def _draft_checks(parts: Parts) -> list[Check]:
    """Of a draft with layers: its steps, and what it runs after a verify."""
    config, worker = parts.config, parts.worker
    if worker.context is None:
        return []
    tails = [Tail(config.topk, config.draft_words), Tail(config.num_steps + 1, 0)]
    longest = Tail(config.draft_tail, config.draft_words)
    return _checks(parts, worker.context, worker.dtype or parts.target.dtype, tails, longest)


def _checks(
    parts: Parts, context: ForwardContext, dtype: torch.dtype, tails: Sequence[Tail], longest: Tail
) -> list[Check]:
    """Checks of attention in forwards of `tails`, and of recurrent layers with `longest`; none of torch's."""
    checks: list[Check] = []
    if not isinstance(context.backend, TorchBackend):
        checks += attention_checks(context.backend, context.layers, dtype, parts.target.device, tails)
    if context.state_pool is not None:
        checks += recurrent_checks(context.state_pool, longest, parts.config.num_steps + 1, dtype)
    return checks


def _expert_checks(model: nn.Module | None) -> Iterator[Check]:
    for weights in () if model is None else distinct_weights(model):
        yield from expert_checks(*weights)


def _environment(device: torch.device) -> str:
    found = []
    for name in ("triton", "torch", "flashinfer-python"):
        try:
            found.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            continue
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    return f"with {', '.join(found)} on {where}"
