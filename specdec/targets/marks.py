"""Marks on the modules of a live model: which target they belong to, and the numbers of its attention layers."""

import weakref
from typing import TYPE_CHECKING

from torch import nn

if TYPE_CHECKING:
    from specdec.targets.hf import HFTarget

ATTACHED = "_specdec_attached"
LAYER_ID = "_specdec_layer_id"


class Mark:
    """Marks a module with the target it belongs to. It holds a weak reference, and a copy of it is empty: copies of a
    model are not part of the engine."""

    def __init__(self, owner: "HFTarget | None" = None):
        self._owner = None if owner is None else weakref.ref(owner)

    def owner(self) -> "HFTarget | None":
        """Return the target if it still exists, else None."""
        return None if self._owner is None else self._owner()

    def __reduce__(self) -> tuple[type["Mark"], tuple[()]]:
        return Mark, ()


def is_attached(module: nn.Module) -> bool:
    """Return whether `module` belongs to a target that is alive."""
    mark = getattr(module, ATTACHED, None)
    return mark is not None and mark.owner() is not None
