"""A head format: its layouts, and the functions that read, write and make its heads. `heads.formats` is the table."""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedModel

from specdec.core.draft.head import DraftHead
from specdec.reach.targets.shape import TargetShape

MAX_MODULES = 8  # MTP layers of one target

Tensors = dict[str, torch.Tensor]
HotIds = Callable[[int], torch.Tensor]


@dataclass(frozen=True)
class Layout:
    """A checkpoint layout, recognised by its tensor names alone.

    mark: a pattern that matches a tensor name of this layout and of no later one. prefixes: pairs (the file's, ours),
    of which the first match is used; our names are those of the head's class. "{m}" numbers MTP layers from 0, "{at}"
    from config.json's num_hidden_layers, as files do. module: a pattern of a tensor of an MTP layer, with its number as
    group 1. hidden_first: the projection reads [hidden, embedding]. holds_target: it is a whole target's layout, too.
    """

    name: str
    algo: str
    mark: str
    prefixes: tuple[tuple[str, str], ...]
    module: str = ""
    hidden_first: bool = False
    holds_target: bool = False

    def pairs(self, first: int) -> list[tuple[str, str]]:
        """Return the prefixes of all possible MTP layers, whose first has the number `first` in files."""
        return [
            (theirs.format(m=m, at=first + m), ours.format(m=m))
            for theirs, ours in self.prefixes
            for m in range(MAX_MODULES if "{" in theirs else 1)
        ]

    def theirs(self, name: str, first: int = 0) -> str:
        """Return the file's name of our tensor `name`."""
        found = renamed(name, [(ours, theirs) for theirs, ours in self.pairs(first)])
        assert found is not None, f"the layout {self.name!r} has no name for {name!r}"
        return found

    def modules(self, names: Iterable[str]) -> list[int]:
        """Return the numbers of the MTP layers among the file's tensors `names`, ascending."""
        found = (re.match(self.module, name) for name in names) if self.module else ()
        return sorted({int(match[1]) for match in found if match})


def renamed(name: str, pairs: Iterable[tuple[str, str]]) -> str | None:
    """Replace the first prefix of (old, new) that `name` begins with; None if there is none."""
    return next((new + name.removeprefix(old) for old, new in pairs if name.startswith(old)), None)


def same(*prefixes: str) -> tuple[tuple[str, str], ...]:
    """Return pairs of prefixes that are equal in files and in our names."""
    return tuple((p, p) for p in prefixes)


class Stored(NamedTuple):
    """A head as read: `head` on the meta device; tensors: all of its state by our names, as stored or derived.

    kept: dtypes of tensors that are not converted to the head's dtype.
    """

    head: DraftHead
    tensors: Iterable[tuple[str, torch.Tensor]]
    kept: Mapping[str, torch.dtype] = {}


@dataclass(frozen=True)
class Saving:
    """Options of `save_head`, for a format's `write`; layout: the name of one of the format's layouts."""

    layout: str
    lm_head_from_target: bool = False
    verifier: Mapping[str, Any] | None = None
    num_layers: int | None = None


@dataclass(frozen=True)
class Training:
    """Training defaults and model-card texts of one kind of draft.

    recipe: fields that differ from the defaults of `tools.train.config.TrainConfig`. takes: fields of `HeadShape` there
    that apply to a new draft. name, fits: for its card: the kind of draft, and the targets that it fits.
    """

    recipe: Mapping[str, Any]
    takes: frozenset[str]
    name: str
    fits: str


@dataclass(frozen=True)
class HeadFormat:
    """A kind of head: its layouts, and the functions that read, write and create it.

    algo: the name of its algorithm. layouts: those it is read from, the most specific first.
    read(files, target): the head in `files` (`heads.files.HeadFiles`); None if config.json is invalid, or if target is
    None (`inspect`) and the head consists of the target's layers. Problems and notes are added to `files`.
    write(head, saving): (config.json, tensors by our names).
    fresh(model, shape, seed, hot_ids): a new head to train, in fp32 on the device of the target `model`; shape: a
    `tools.train.config.HeadShape`; hot_ids(n): the n target ids of a hot vocabulary, [n] int64.
    written(head): names of the layouts it can be written in, the default first.
    features, id_shift: see `AlgoSpec`. shares_lm_head_rows: the lm_head may be left out of a file, since its rows may
    be the target's. combining: a pattern of the names of the linear layers that read [embedding, feature].
    """

    algo: str
    layouts: tuple[Layout, ...]
    read: Callable[[Any, TargetShape | None], Stored | None]
    write: Callable[[Any, Saving], tuple[dict[str, Any], Tensors]]
    fresh: Callable[[PreTrainedModel, Any, int, HotIds], DraftHead]
    written: Callable[[Any], tuple[str, ...]]
    training: Training
    features: str = "last"
    id_shift: int = 1
    shares_lm_head_rows: bool = False
    combining: str = "fc"
