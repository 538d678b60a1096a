"""Checkpoint layouts: recognised by their tensor names, which they map to ours.

Our own names are those of the heads' classes. A layout is never recognised by the name of its folder. The layouts of a
kind of head are in its `HeadFormat`.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

AUX_IDS = "eagle_aux_hidden_state_layer_ids"  # of EAGLE-3: as files count layers
AUX_LAYERS = "specdec_aux_layers"  # our own: indices of the layers whose output is read, unambiguously
OWN_KEY = "specdec_nextn"  # our own: fields of NextNConfig that differ from its defaults
STANDALONE = "standalone"  # an ordinary causal LM: no head, loaded as a whole
MAX_MODULES = 8  # MTP layers of one target

# In any layout: buffers that older transformers stored, which follow from the config.
IGNORED = re.compile(r"(^|\.)rotary_emb\.inv_freq$")


@dataclass(frozen=True)
class Layout:
    """One layout.

    mark: a pattern that matches a tensor of this layout and of no later one. prefixes: (the layout's, ours), of which
    the first match is used, in either direction; "{m}" counts MTP layers from 0, "{at}" from the number of the target's
    layers. hidden_first: its projection reads [hidden, embedding]. holds_target: the tensors are among those of a whole
    target.
    """

    name: str
    algo: str
    mark: str
    prefixes: tuple[tuple[str, str], ...]
    hidden_first: bool = False
    holds_target: bool = False

    def ours(self, name: str, num_layers: int | None = None) -> str | None:
        """Return our name of the layout's tensor `name`; None if it is not one of the layout's."""
        return _rename(name, self._pairs(num_layers))

    def theirs(self, name: str, num_layers: int | None = None) -> str:
        """Return the layout's name of our tensor `name`."""
        renamed = _rename(name, [(ours, theirs) for theirs, ours in self._pairs(num_layers)])
        assert renamed is not None, f"the layout {self.name!r} has no name for {name!r}"
        return renamed

    @lru_cache(maxsize=16)  # noqa: B019  (a layout lives as long as the program)
    def _pairs(self, num_layers: int | None) -> tuple[tuple[str, str], ...]:
        """Return the prefixes, for every MTP layer that there could be."""
        pairs: list[tuple[str, str]] = []
        for theirs, ours in self.prefixes:
            modules = range(MAX_MODULES if "{" in theirs else 1)
            pairs += [(theirs.format(m=m, at=(num_layers or 0) + m), ours.format(m=m)) for m in modules]
        return tuple(pairs)


def _rename(name: str, prefixes: Iterable[tuple[str, str]]) -> str | None:
    found = next(((old, new) for old, new in prefixes if name.startswith(old)), None)
    return None if found is None else found[1] + name.removeprefix(found[0])


def same(*prefixes: str) -> tuple[tuple[str, str], ...]:
    """Pair prefixes that a layout has in common with us."""
    return tuple((p, p) for p in prefixes)


WHOLE_MODEL = Layout(
    name=STANDALONE,
    algo=STANDALONE,
    mark=r"(model\.|language_model\.)+(embed_tokens|layers\.0)\.|transformer\.(wte|h\.0)\.|gpt_neox\.",
    prefixes=(),
)


def mtp_indices(layout: Layout, names: Iterable[str]) -> list[int]:
    """Return the indices of the MTP layers among tensors `names`, ascending; the target's own layers do not count."""
    pattern = {"nextn": layout.mark, "qwen_mtp": r"mtp\.layers\.(\d{1,6})\."}.get(
        layout.name, r"(model\.)?mtp_layers\.(\d{1,6})\."
    )
    found = (re.match(pattern, name) for name in names)
    return sorted({int(re.search(r"\.(\d+)\.", m[0])[1]) for m in found if m})  # type: ignore[index]
