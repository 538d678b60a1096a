"""Speculative decoding for Hugging Face `transformers` models: the same text, faster.

Names are imported on first use: `specdec.graphs` and `specdec.backends` need no `transformers`.
"""

import importlib
import typing

from specdec.core import names_from as _names_from

if typing.TYPE_CHECKING:
    from specdec.api import Engine, attach, engine_of
    from specdec.core.config import EngineConfig
    from specdec.core.errors import AttachError, CapacityError, CheckpointError, DetachedError, GraphError, RankError
    from specdec.core.grammar.grammar import Grammar
    from specdec.core.metrics import AcceptanceStats, acceptance_length
    from specdec.core.outputs import GenerationOutput, GenerationStats, GraphCost, Report, RequestOutput
    from specdec.core.sampling_params import SamplingParams

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
    "Grammar",
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

_ROOMS = ("backends", "graphs", "shipped")  # public modules
_CORE = ("errors", "config", "grammar.grammar", "metrics", "outputs", "sampling_params")
_HOMES = (*(f"core.{name}" for name in _CORE), "api")
_find = _names_from(__name__, __all__, _HOMES)


def __getattr__(name: str) -> typing.Any:
    return importlib.import_module(f"specdec.{name}") if name in _ROOMS else _find(name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_ROOMS})
