"""How the draft algorithms differ, as data. Sources: arXiv 2401.15077, 2503.01840, 2412.19437, 2211.17192.

What differs between checkpoints of one algorithm (order of combination, norms, what is recycled, hot vocabulary) is a
head's own configuration, and stands in the layouts that `specdec.heads.load` reads.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class AlgoSpec:
    """What one draft algorithm takes from the target.

    features: target hidden states it reads: "aux" (outputs of layers that the head names), "last" (after the final
        norm) or "none".
    id_shift: row i of the draft holds token i+1 (EAGLE family) or token i (standalone).
    """

    name: str
    features: str = "none"
    id_shift: int = 0
