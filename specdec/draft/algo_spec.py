"""How the draft algorithms differ, as data. Facts and sources: arXiv 2401.15077, 2503.01840."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType


@dataclass(frozen=True)
class AlgoSpec:
    """What one draft algorithm takes from the target and how its head combines it.

    num_aux: target hidden states taken, by layer index ("aux layers"); 0 takes none.
    combine: order of the two halves of the layer's input, "emb_hid" or "hid_emb".
    recycle: what a draft step feeds back, the hidden state before ("pre_norm") or after ("post_norm") the out norm.
    id_shift: row i of the draft holds token i+1 (EAGLE family) or token i (standalone).
    shares_embedding, shares_head: taken from the target where the checkpoint has none.
    hot_vocab: the head scores a subset of the target's vocabulary; `d2t` holds OFFSETS, target = draft + d2t[draft].
    """

    name: str
    num_aux: int
    combine: str
    recycle: str
    id_shift: int
    shares_embedding: bool
    shares_head: bool
    hot_vocab: bool


ALGORITHMS: Mapping[str, AlgoSpec] = MappingProxyType(
    {
        "eagle3": AlgoSpec(
            name="eagle3",
            num_aux=3,
            combine="emb_hid",
            recycle="pre_norm",
            id_shift=1,
            shares_embedding=True,
            shares_head=True,
            hot_vocab=True,
        )
    }
)


def algo_spec(name: str) -> AlgoSpec:
    """The AlgoSpec called `name`; ValueError names what there is."""
    if name not in ALGORITHMS:
        raise ValueError(f"algo={name!r}: expected None (plain decoding), 'auto' or one of {sorted(ALGORITHMS)}")
    return ALGORITHMS[name]
