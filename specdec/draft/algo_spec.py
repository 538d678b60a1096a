"""How the draft algorithms differ, as data. Facts and sources: arXiv 2401.15077, 2503.01840, 2412.19437, 2211.17192.

What differs between checkpoints of one algorithm (order of combination, norms, what is recycled, hot vocabulary) is a
head's own configuration, and stands in the layouts that `specdec.heads.load` reads.
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
    """

    name: str
    features: str
    id_shift: int


_SPECS = (
    AlgoSpec("eagle", features="last", id_shift=1),
    AlgoSpec("eagle3", features="aux", id_shift=1),
    AlgoSpec("nextn", features="last", id_shift=1),
    AlgoSpec("standalone", features="none", id_shift=0),
)
ALGORITHMS: Mapping[str, AlgoSpec] = MappingProxyType({spec.name: spec for spec in _SPECS})


def algo_spec(name: str) -> AlgoSpec:
    """The AlgoSpec called `name`; ValueError names what there is."""
    if name not in ALGORITHMS:
        raise ValueError(f"algo={name!r}: expected None (plain decoding), 'auto' or one of {sorted(ALGORITHMS)}")
    return ALGORITHMS[name]
