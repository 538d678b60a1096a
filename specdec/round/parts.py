"""The parts of an engine, made once by `engine.assembly` and handed to whatever runs on them."""

from contextlib import AbstractContextManager
from dataclasses import dataclass

from specdec.backends import ForwardContext, compiling_kernels
from specdec.config import EngineConfig
from specdec.draft.worker import DraftWorker
from specdec.functional.ops import RoundOps
from specdec.graphs import Counters
from specdec.kv_cache import SlotTables
from specdec.round.state import EngineState
from specdec.targets.hf import HFTarget


@dataclass(frozen=True)
class Parts:
    """What programs, graphs and the core of one engine share.

    target: reads the hidden states that `worker` asks for. context: the target's attention layers and K/V pool. tables
    and state: by row, the last of which is the dummy row. may_merge: a round can be one graph, since the backends plan
    on the device.
    """

    target: HFTarget
    config: EngineConfig
    worker: DraftWorker
    context: ForwardContext
    ops: RoundOps
    tables: SlotTables
    state: EngineState
    counters: Counters
    may_merge: bool

    def compiling_kernels(self) -> AbstractContextManager[None] | None:
        """Return a context for rehearsals, None where there are none: see `backends.compiling_kernels`."""
        backends = [c.backend for c in (self.context, self.worker.context) if c is not None]
        return compiling_kernels(backends, self.target.device)
