"""Compares the kernels that an engine will run with their torch twins (`check_kernels`), on its device and model sizes.

`targets.admission.equality` compares our route with the model's own forward on the twins, and tests cover some sizes,
GPUs and Triton versions only. A kernel compiled elsewhere may still be wrong without an error. Attention, recurrent
layers and expert matmuls are checked here; trees, sampling and placement only by tests.
"""

from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version

import torch

from specdec.backends.attention_check import attention_checks
from specdec.backends.differences import Check
from specdec.backends.experts.check import expert_checks
from specdec.backends.recurrent.check import recurrent_checks
from specdec.backends.sample_tree import Tail
from specdec.backends.torch_ref import TorchBackend
from specdec.core.errors import AttachError
from specdec.core.round.parts import Parts
from specdec.graphs.building import rehearse
from specdec.reach.targets.adapters.experts import distinct_weights

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
        of_backends = list(_backend_checks(parts))
        models = [model for model in (target.model, parts.worker.module) if model is not None]
        of_experts = [c for model in models for given in distinct_weights(model) for c in expert_checks(*given)]
        rehearse((), parts.compiling_kernels(), lambda: _compile(of_backends + of_experts))
        problems, own = ([p for check in checks for p in check.problems()] for checks in (of_backends, of_experts))
    if target.any_rank(bool(problems or own)):
        advice = BY_TRITON if own else BY_BACKEND
        found = [*problems, *own] or [ELSEWHERE]
        raise AttachError(type(target.model).__name__, [*found, _environment(target.device), advice])


def _compile(checks: list[Check]) -> None:
    for check in checks:
        check.ours()


def _backend_checks(parts: Parts) -> Iterator[Check]:
    """Yield the checks of the target and of a draft with layers: of attention, unless torch computes it, and of
    recurrent layers, in the forwards that they run."""
    config, worker, dtype = parts.config, parts.worker, parts.target.dtype
    verify = Tail(config.verify_width, config.tree_words)
    cases = [(parts.context, dtype, [verify], verify)]
    if worker.context is not None:
        steps, extend = Tail(config.topk, config.draft_words), Tail(config.num_steps + 1, 0)
        longest = Tail(config.draft_tail, config.draft_words)
        cases.append((worker.context, worker.dtype or dtype, [steps, extend], longest))
    for context, own_dtype, tails, most in cases:
        if not isinstance(context.backend, TorchBackend):
            yield from attention_checks(context.backend, context.layers, own_dtype, parts.target.device, tails)
        if context.state_pool is not None:
            yield from recurrent_checks(context.state_pool, most, config.num_steps + 1, own_dtype)


def _environment(device: torch.device) -> str:
    found = []
    for name in ("triton", "torch", "flashinfer-python"):
        try:
            found.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            continue
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    return f"with {', '.join(found)} on {where}"
