"""The table of draft algorithms. A new one is a worker in a file of its own and a row here."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from specdec.draft.algo_spec import AlgoSpec
from specdec.draft.eagle import HeadWorker
from specdec.draft.lookup import LookupWorker
from specdec.draft.nextn import ModulesWorker
from specdec.draft.standalone import StandaloneWorker
from specdec.draft.worker import DraftParts, DraftWorker
from specdec.heads.base import DraftHead


@dataclass(frozen=True)
class Algorithm:
    """spec: what it takes from the target; make(parts, draft): its worker; has_model: False where draft is None."""

    spec: AlgoSpec
    make: Callable[[DraftParts, Any], DraftWorker]
    has_model: bool = True


def _head_worker(parts: DraftParts, head: DraftHead) -> DraftWorker:
    return (HeadWorker if head.num_modules == 1 else ModulesWorker)(parts, head)


_ROWS = (
    Algorithm(AlgoSpec("eagle", features="last", id_shift=1), _head_worker),
    Algorithm(AlgoSpec("eagle3", features="aux", id_shift=1), _head_worker),
    Algorithm(AlgoSpec("nextn", features="last", id_shift=1), _head_worker),
    Algorithm(AlgoSpec("standalone"), StandaloneWorker),
    Algorithm(AlgoSpec("lookup"), LookupWorker, has_model=False),
)
ALGORITHMS: Mapping[str, Algorithm] = MappingProxyType({row.spec.name: row for row in _ROWS})


def algorithm(name: str) -> Algorithm:
    """The row called `name`; ValueError names what there is."""
    if name not in ALGORITHMS:
        raise ValueError(f"algo={name!r}: expected None (plain decoding), 'auto' or one of {sorted(ALGORITHMS)}")
    return ALGORITHMS[name]
