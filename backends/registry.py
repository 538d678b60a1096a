"""Registry of backends by name, and the choice among them."""

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from types import MappingProxyType

import torch

from specdec.backends.base import AttentionBackend, Capabilities, LayerSpec, unmet_needs
from specdec.backends.library import has_triton
from specdec.backends.recurrent.reference import TORCH_RECURRENT
from specdec.backends.recurrent.state_pool import RecurrentOps
from specdec.backends.torch_ref import TorchBackend
from specdec.core.errors import AttachError


def _triton() -> type[AttentionBackend]:
    if not has_triton():
        raise ImportError("triton is not installed: pip install triton")
    from specdec.backends.triton.backend import TritonBackend

    return TritonBackend


def _flashinfer(is_mixed: bool) -> type[AttentionBackend]:
    _triton()
    from specdec.backends.flashinfer.backend import FlashInferBackend, MixedBackend

    return MixedBackend if is_mixed else FlashInferBackend


# A class is imported on first use, since triton is optional.
BACKENDS: Mapping[str, Callable[[], type[AttentionBackend]]] = MappingProxyType(
    {
        "triton": _triton,
        "torch": lambda: TorchBackend,
        "flashinfer": lambda: _flashinfer(is_mixed=False),
        "triton+flashinfer": lambda: _flashinfer(is_mixed=True),
    }
)
_AUTO = ("triton+flashinfer", "triton", "torch")  # in the order of preference


def compiling_kernels(
    backends: Iterable[AttentionBackend], device: torch.device
) -> AbstractContextManager[Callable[[], int]] | None:
    """Return a context in which kernels are compiled in parallel, and not launched; see `backends.triton.launch.ahead`.

    None if that is impossible or does not pay: not all `backends` rehearse, SPECDEC_AHEAD=0 turns it off, or `attach`
    knows that Triton's cache has the kernels.
    """
    if device.type != "cuda" or os.environ.get("SPECDEC_AHEAD") == "0" or not all(b.rehearses for b in backends):
        return None
    from specdec.backends.triton.launch.ahead import compiling_ahead
    from specdec.backends.triton.launch.workers import kernels_are_cached

    return None if kernels_are_cached() else compiling_ahead(device)


def pick_backend(
    name: str, layers: Sequence[LayerSpec], dtype: torch.dtype, device: torch.device
) -> tuple[type[AttentionBackend], str]:
    """Return the backend class for `name` and why it was picked.

    On CUDA, "auto" picks the first that can run the model: Triton with FlashInfer for long prefills, if FlashInfer's
    kernels are compiled already; Triton; torch.
    Raises ValueError for an unknown name and AttachError, with every unmet need, if none can run the model.
    """
    if name != "auto" and name not in BACKENDS:
        raise ValueError(f"backend={name!r}: expected 'auto' or one of {sorted(BACKENDS)}")
    if name == "auto" and device.type != "cuda":
        return TorchBackend, f"auto: the model is on {device.type}, where torch is the fastest"
    against: list[str] = []
    for candidate in _AUTO if name == "auto" else (name,):
        try:
            backend = BACKENDS[candidate]()
        except ImportError as error:
            against.append(f"backend {candidate}: {error}")
            continue
        unusable = backend.unusable_on(device)
        reasons = [unusable] if unusable else unmet_needs(backend.capabilities, layers, dtype)
        if not reasons and name == "auto" and (reason := backend.not_ready(layers, dtype, device)):
            reasons = [reason]
        if not reasons:
            return backend, _why(name, candidate, against)
        against += [f"backend {candidate}: {reason}" for reason in reasons]
    raise AttachError("the model", against)


def takes_latents(name: str) -> bool:
    """Return whether the backend `name`, or any that "auto" picks, attends over latents (`LayerSpec.v_in_k`)."""
    return name != "flashinfer"


def _why(asked: str, picked: str, against: Sequence[str]) -> str:
    if asked != "auto":
        return "asked for"
    return f"auto: {picked} is the fastest that can run it" + (f" ({'; '.join(against)})" if against else "")


def pick_recurrent(capabilities: Capabilities) -> RecurrentOps:
    """Return the operations of recurrent layers for a backend with `capabilities`."""
    if not capabilities.fused_ops:
        return TORCH_RECURRENT
    from specdec.backends.triton.recurrent.ops import TRITON_RECURRENT

    return TRITON_RECURRENT
