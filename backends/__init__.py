"""Attention over the paged KV pool. Backends know shapes and slots, never algorithms or models."""

import typing

from specdec.core import names_from

if typing.TYPE_CHECKING:
    from specdec.backends.base import AttentionBackend, AttentionCall, Capabilities, LayerSpec, Rope, unmet_needs
    from specdec.backends.bridge import AttentionBridge
    from specdec.backends.experts import grouped_linear
    from specdec.backends.metadata import MetadataBuilder
    from specdec.backends.op import ForwardContext, attention, forward_context
    from specdec.backends.registry import BACKENDS, compiling_kernels, pick_backend
    from specdec.backends.torch_ref import TorchBackend
    from specdec.core.batch import AttentionMetadata, ForwardMode
    from specdec.core.cache.pool import KVPool
    from specdec.core.cache.tables import SlotTables

__all__ = [
    "BACKENDS",
    "AttentionBackend",
    "AttentionBridge",
    "AttentionCall",
    "AttentionMetadata",
    "Capabilities",
    "ForwardContext",
    "ForwardMode",
    "KVPool",
    "LayerSpec",
    "MetadataBuilder",
    "Rope",
    "SlotTables",
    "TorchBackend",
    "attention",
    "compiling_kernels",
    "forward_context",
    "grouped_linear",
    "pick_backend",
    "unmet_needs",
]

_HOMES = ("base", "op", "bridge", "experts", "metadata", "registry", "torch_ref", ".core.cache.tables")
__getattr__ = names_from(__name__, __all__, _HOMES)
