"""Marks on the modules of a live model: which target they belong to, and the ids of its attention layers."""

import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import nn

from specdec.core import grouped

if TYPE_CHECKING:
    from specdec.reach.targets.hf import HFTarget

ATTACHED = "_specdec_attached"
LAYER_ID = "_specdec_layer_id"
HOLDER = "_specdec_engine"  # of the engine that custom_generate=FOLDER has left with a model


class Mark:
    """Marks a module with its target, by a weak reference; a copy is empty: the engine does not own copies of a
    model."""

    def __init__(self, owner: "HFTarget | None" = None):
        self._owner = None if owner is None else weakref.ref(owner)

    def owner(self) -> "HFTarget | None":
        """Return the target if it still exists, else None."""
        return None if self._owner is None else self._owner()

    def __reduce__(self) -> tuple[type["Mark"], tuple[()]]:
        return Mark, ()


def is_attached(module: nn.Module) -> bool:
    """Return whether `module` belongs to a target that is alive."""
    return owner_of(module) is not None


def owner_of(module: nn.Module) -> "HFTarget | None":
    """Return the target that `module` belongs to, if it is alive."""
    mark = getattr(module, ATTACHED, None)
    return None if mark is None else mark.owner()


class LayerTurns:
    """The layer ids of a module that is called several times per forward, in the order of its calls."""

    def __init__(self, layer_ids: Sequence[int]):
        self.layer_ids, self._turn = tuple(layer_ids), 0

    def take(self) -> int:
        """Return the id of the next call; after the last one the first one again."""
        assert self.layer_ids, "a call that was not made in the forward by which calls were numbered"
        layer_id = self.layer_ids[self._turn]
        if len(self.layer_ids) > 1:
            self._turn = (self._turn + 1) % len(self.layer_ids)
        return layer_id

    def begin(self) -> None:
        """Begin a forward, even if the last one was interrupted."""
        self._turn = 0


def layer_id(module: nn.Module) -> int:
    """Return the id of the attention call that `module` makes now."""
    number = getattr(module, LAYER_ID)
    return number.take() if isinstance(number, LayerTurns) else number


def number_layers(modules: Sequence[nn.Module]) -> list[LayerTurns]:
    """Number `modules`, in the order of their calls; return the turns of those that are called several times."""
    ids = grouped(range(len(modules)), modules.__getitem__)
    turns = {module: LayerTurns(numbers) for module, numbers in ids.items() if len(numbers) > 1}
    for module, (first, *_) in ids.items():
        setattr(module, LAYER_ID, turns.get(module, first))
    return list(turns.values())
