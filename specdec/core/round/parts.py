"""The parts of an engine, made once by `specdec.reach.assembly` and passed to the code that runs on them."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from specdec.backends.op import ForwardContext
from specdec.core.cache.tables import SlotTables
from specdec.core.config import EngineConfig
from specdec.core.draft.worker import DraftWorker
from specdec.core.functional.ops import RoundOps
from specdec.core.round.state import EngineState
from specdec.core.target import LiveModels, Target
from specdec.graphs.counters import Counters

if TYPE_CHECKING:
    from specdec.core.grammar.feed import MaskFeed
    from specdec.core.grammar.matcher import Compiler


@dataclass(frozen=True)
class Parts:
    """Objects that programs, graphs and the core of one engine share.

    target: reads the hidden states that `worker` asks for. context: the target's attention layers and K/V pool. tables
    and state: by row, the last of which is the dummy row. compiling_kernels: see `backends.registry`. feed, grammars:
    None where no request may have a grammar.
    """

    target: Target
    config: EngineConfig
    worker: DraftWorker
    context: ForwardContext
    ops: RoundOps
    tables: SlotTables
    state: EngineState
    counters: Counters
    models: LiveModels
    compiling_kernels: Callable[[], AbstractContextManager[Callable[[], int]] | None]
    feed: "MaskFeed | None" = None
    grammars: "Compiler | None" = None
