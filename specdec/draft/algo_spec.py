"""How the draft algorithms differ, as data. Facts and sources: arXiv 2401.15077, 2503.01840, 2412.19437, 2211.17192.

What differs between checkpoints of one algorithm (order of combination, norms, what is recycled, hot vocabulary) is a
head's own configuration, and stands in the layouts that `specdec.models.loader` reads.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType


@dataclass(frozen=True)
class AlgoSpec:
    """What one draft algorithm takes from the target.

    features: target hidden states it reads: "aux" (outputs of layers that the head names), "last" (after the final
        norm) or "none".
    id_shift: row i of the draft holds token i+1 (EAGLE family) or token i (standalone).
    shares_embedding, shares_head: taken from the target where the checkpoint has none.
    hot_vocab: it may score a subset of the target's vocabulary; `d2t` holds OFFSETS, target = draft + d2t[draft].
    """

    name: str
    features: str
    id_shift: int
    shares_embedding: bool
    shares_head: bool
    hot_vocab: bool


_SPECS = (
    AlgoSpec("eagle", "last", id_shift=1, shares_embedding=True, shares_head=True, hot_vocab=False),
    AlgoSpec("eagle3", "aux", id_shift=1, shares_embedding=True, shares_head=True, hot_vocab=True),
    AlgoSpec("nextn", "last", id_shift=1, shares_embedding=True, shares_head=True, hot_vocab=False),
    AlgoSpec("standalone", "none", id_shift=0, shares_embedding=False, shares_head=False, hot_vocab=False),
)
ALGORITHMS: Mapping[str, AlgoSpec] = MappingProxyType({spec.name: spec for spec in _SPECS})


def algo_spec(name: str) -> AlgoSpec:
    """The AlgoSpec called `name`; ValueError names what there is."""
    if name not in ALGORITHMS:
        raise ValueError(f"algo={name!r}: expected None (plain decoding), 'auto' or one of {sorted(ALGORITHMS)}")
    return ALGORITHMS[name]
