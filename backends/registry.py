"""Names of backends and the choice among them."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType

import torch

from specdec.backends.base import AttentionBackend, LayerSpec, unmet_needs
from specdec.backends.torch_ref import TorchBackend
from specdec.errors import AttachError

BACKENDS: Mapping[str, type[AttentionBackend]] = MappingProxyType({"torch": TorchBackend})


def pick_backend(name: str, layers: Sequence[LayerSpec], dtype: torch.dtype) -> tuple[type[AttentionBackend], str]:
    """The backend class for `name` ("auto" takes the first that can run the model) and why it was picked.

    Raises ValueError for an unknown name and AttachError, with every unmet need, if none can run the model.
    """
    if name != "auto" and name not in BACKENDS:
        raise ValueError(f"backend={name!r}: expected 'auto' or one of {sorted(BACKENDS)}")
    candidates = list(BACKENDS) if name == "auto" else [name]
    reasons: list[str] = []
    for candidate in candidates:
        unmet = unmet_needs(BACKENDS[candidate].capabilities, layers, dtype)
        if not unmet:
            return BACKENDS[candidate], "asked for" if name != "auto" else f"first able of {list(BACKENDS)}"
        reasons += [f"backend {candidate}: {reason}" for reason in unmet]
    raise AttachError("the model", reasons)
