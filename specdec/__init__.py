"""Speculative decoding for Hugging Face `transformers` models: the same text, faster.

Names are imported on first use: `specdec.graphs` and `specdec.backends` need no `transformers`.
"""

import importlib
import typing

if typing.TYPE_CHECKING:
    from specdec.api import Engine, attach, engine_of
    from specdec.config import EngineConfig
    from specdec.errors import AttachError, CapacityError, CheckpointError, DetachedError, GraphError, RankError
    from specdec.metrics import AcceptanceStats, acceptance_length
    from specdec.outputs import GenerationOutput, GenerationStats, GraphCost, Report, RequestOutput
    from specdec.sampling_params import SamplingParams

__version__ = "0.1.0"

__all__ = [
    "AcceptanceStats",
    "AttachError",
    "CapacityError",
    "CheckpointError",
    "DetachedError",
    "Engine",
    "EngineConfig",
    "GenerationOutput",
    "GenerationStats",
    "GraphCost",
    "GraphError",
    "RankError",
    "Report",
    "RequestOutput",
    "SamplingParams",
    "acceptance_length",
    "attach",
    "engine_of",
]

_NAMES_OF = {
    "api": ("Engine", "attach", "engine_of"),
    "config": ("EngineConfig",),
    "errors": ("AttachError", "CapacityError", "CheckpointError", "DetachedError", "GraphError", "RankError"),
    "metrics": ("AcceptanceStats", "acceptance_length"),
    "outputs": ("GenerationOutput", "GenerationStats", "GraphCost", "Report", "RequestOutput"),
    "sampling_params": ("SamplingParams",),
}
_ROOMS = ("backends", "graphs", "shipped")  # public modules


def __getattr__(name: str) -> typing.Any:
    if name in _ROOMS:
        return importlib.import_module(f"specdec.{name}")
    for module, names in _NAMES_OF.items():
        if name in names:
            return getattr(importlib.import_module(f"specdec.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_ROOMS})
