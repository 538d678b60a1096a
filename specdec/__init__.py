"""Speculative decoding for Hugging Face `transformers` models: the same text, faster."""

from specdec.api import Engine, attach
from specdec.config import EngineConfig
from specdec.errors import AttachError, CapacityError, CheckpointError, DetachedError, GraphError
from specdec.functional.sampling import SamplingParams
from specdec.metrics import AcceptanceStats, acceptance_length
from specdec.outputs import GenerationOutput, GenerationStats, GraphCost, Report, RequestOutput

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
    "Report",
    "RequestOutput",
    "SamplingParams",
    "acceptance_length",
    "attach",
]
