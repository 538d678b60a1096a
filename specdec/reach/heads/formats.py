"""The table of head formats, and the detection of a checkpoint's layout. To add a format, add a file and a row here."""

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import MappingProxyType

from specdec.core.errors import CheckpointError
from specdec.reach.checkpoints.folders import read_json
from specdec.reach.heads.block_format import BLOCK
from specdec.reach.heads.eagle3_format import EAGLE3
from specdec.reach.heads.eagle_format import EAGLE
from specdec.reach.heads.format import HeadFormat, Layout
from specdec.reach.heads.nextn_format import NEXTN

# Their layouts are tried in this order: a mark matches a tensor of its layout and of none further down.
ROWS: tuple[HeadFormat, ...] = (BLOCK, EAGLE3, NEXTN, EAGLE)

STANDALONE = "standalone"  # an ordinary causal LM: no head, loaded as a whole
ASSISTANT = "assistant"  # layers that attend to the target's K/V: loaded as a whole, too
WHOLE = (ASSISTANT, STANDALONE)
WHOLE_MODEL = Layout(
    name=STANDALONE,
    algo=STANDALONE,
    mark=r"(model\.|language_model\.)+(embed_tokens|layers\.0)\.|transformer\.(wte|h\.0)\.|gpt_neox\.",
    prefixes=(),
)

# Before all others, since it has a causal LM's tensors between its projections.
ASSISTANTS = Layout(name=ASSISTANT, algo=ASSISTANT, mark=r"(pre|post)_projection\.", prefixes=())


def formats() -> Mapping[str, HeadFormat]:
    """Return every head format by the name of its algorithm."""
    return MappingProxyType({row.algo: row for row in ROWS})


def layouts() -> Mapping[str, Layout]:
    """Return every layout of heads by name, the most specific first."""
    return MappingProxyType({layout.name: layout for row in ROWS for layout in row.layouts})


def layouts_of(names: Iterable[str]) -> list[Layout]:
    """Return the layouts that the tensor `names` match: a head's, a whole model's, or both for a target with MTP."""
    names = list(names)
    if any(re.match(ASSISTANTS.mark, n) for n in names):
        return [ASSISTANTS]
    found = [layout for layout in (*layouts().values(), WHOLE_MODEL) if any(re.match(layout.mark, n) for n in names)]
    return found[:1] + [layout for layout in found[1:] if layout is WHOLE_MODEL]


def pick_layout(folder: Path, names: list[str], algo: str | None) -> Layout:
    """Return the layout of the tensor `names`; for a target with an MTP layer that of `algo`, by default "nextn".
    CheckpointError for an unknown layout, or one of another algorithm than `algo`."""
    found = layouts_of(names)
    if not found and (algo == STANDALONE or _is_causal_lm(folder)):
        return WHOLE_MODEL
    if not found:
        known = (
            "block has hidden_norm, eagle3 midlayer.* or layers.0.hidden_norm, eagle fc and layers.0, nextn eh_proj, "
            "mtp.* or mtp_layers, assistant pre_projection"
        )
        raise CheckpointError(str(folder), [f"unknown layout: it holds {sorted(names)[:6]} …; {known}"])
    asked = [layout for layout in found if algo in (None, layout.algo)]
    if not asked:
        held = " and ".join(layout.algo for layout in found)
        raise CheckpointError(str(folder), [f"algo={algo!r}, but it holds {held!r}{why_absent(str(algo), held)}"])
    return asked[0]


def why_absent(algo: str, found: str) -> str:
    """Return ": " and why a checkpoint of algorithm `found` has no head for `algo`; "" if no cause is known."""
    if algo != "nextn" or found != STANDALONE:
        return ""
    names = [layout.prefixes[0][0].format(m=0, at="N") + "*" for layout in formats()[algo].layouts]
    return (
        f": an MTP layer is not in this checkpoint; looked for {', '.join(names)} (transformers drops it when it saves "
        "a model; use the original repository). For a target that never had one, `specdec train run --algo nextn` "
        "trains one"
    )


def _is_causal_lm(folder: Path) -> bool:
    """Return whether config.json names a class of transformers that has an output head."""
    classes = read_json(folder, "config.json").get("architectures")
    names = [name for name in classes if isinstance(name, str)] if isinstance(classes, list) else []
    return any(name.endswith(("ForCausalLM", "LMHeadModel")) for name in names)
