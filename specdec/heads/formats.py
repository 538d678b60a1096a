"""The table of head formats. A new kind of head is a file (its module and its `HeadFormat`) and a row here."""

import re
from collections.abc import Iterable, Mapping
from types import MappingProxyType

from specdec.heads.eagle3_format import Eagle3Format
from specdec.heads.eagle_format import EagleFormat
from specdec.heads.format import HeadFormat
from specdec.heads.layouts import STANDALONE, WHOLE_MODEL, Layout
from specdec.heads.nextn_format import NextNFormat

# Their layouts are tried in this order: a mark matches a tensor of its layout and of none further down.
ROWS: tuple[HeadFormat, ...] = (Eagle3Format(), NextNFormat(), EagleFormat())


def formats() -> Mapping[str, HeadFormat]:
    """Return every format by its algorithm."""
    return MappingProxyType({row.algo: row for row in ROWS})


def layouts() -> Mapping[str, Layout]:
    """Return every layout by name, the most specific first, a whole model last."""
    return MappingProxyType({layout.name: layout for row in ROWS for layout in row.layouts} | {STANDALONE: WHOLE_MODEL})


def layouts_of(names: Iterable[str]) -> list[Layout]:
    """Return the layouts that tensors of these names match, most specific first: a target with an MTP layer has two."""
    names = list(names)
    found = [layout for layout in layouts().values() if any(re.match(layout.mark, name) for name in names)]
    heads = [layout for layout in found if layout.name != STANDALONE]
    return heads[:1] + [layout for layout in found if layout.name == STANDALONE]
