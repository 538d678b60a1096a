"""The table of draft algorithms. A new algorithm is a worker in its own file and a row here."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from specdec.core.draft.assistant import AssistantWorker
from specdec.core.draft.block import BlockWorker
from specdec.core.draft.eagle import HeadWorker
from specdec.core.draft.head import BlockDraftHead, DraftHead, RecyclingHead
from specdec.core.draft.lookup import LookupWorker
from specdec.core.draft.nextn import ModulesWorker
from specdec.core.draft.standalone import StandaloneWorker
from specdec.core.draft.worker import AlgoSpec, DraftParts, DraftWorker
from specdec.reach.heads.formats import formats


@dataclass(frozen=True)
class Algorithm:
    """spec: its inputs from the target; make(parts, draft): makes its worker; has_model: False if draft is None."""

    spec: AlgoSpec
    make: Callable[[DraftParts, Any], DraftWorker]
    has_model: bool = True


def _head_worker(parts: DraftParts, head: DraftHead) -> DraftWorker:
    if isinstance(head, BlockDraftHead):
        return BlockWorker(parts, head)
    assert isinstance(head, RecyclingHead)
    return (HeadWorker if head.num_modules == 1 else ModulesWorker)(parts, head)


_OTHERS = (
    Algorithm(AlgoSpec("standalone"), StandaloneWorker),
    Algorithm(AlgoSpec("assistant", "last"), AssistantWorker),
    Algorithm(AlgoSpec("lookup"), LookupWorker, has_model=False),
)


def algorithms() -> Mapping[str, Algorithm]:
    """Return every algorithm by name: those of head formats, and the others."""
    heads = [Algorithm(AlgoSpec(row.algo, row.features, row.id_shift), _head_worker) for row in formats().values()]
    return {row.spec.name: row for row in (*heads, *_OTHERS)}


def algorithm(name: str) -> Algorithm:
    """Return the row called `name`; ValueError lists the known names."""
    known = algorithms()
    if name not in known:
        raise ValueError(f"algo={name!r}: expected None (plain decoding), 'auto' or one of {sorted(known)}")
    return known[name]
