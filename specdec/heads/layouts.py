"""The checkpoint layouts of draft heads, as data: how one is told by its tensor names, and what it calls our tensors.

Our own names are those of `EagleHead`, `Eagle3Head` and `NextNHead`. A layout is never told by the name of its folder.

eagle: SafeAILab's EAGLE-1/2 (arXiv 2401.15077, 2406.16858). eagle3: SafeAILab's EAGLE-3 (arXiv 2503.01840), and what
SpecForge and SGLang write with the same names. speculators: vLLM's EAGLE-3 format. nextn: DeepSeek-V3 and GLM-4.5,
whose MTP layer follows the target's last. qwen_mtp: Qwen3-Next and Qwen3.5. mimo: MiMo. speculators_mtp: vLLM's.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType

AUX_IDS = "eagle_aux_hidden_state_layer_ids"  # of EAGLE-3: as files count layers
AUX_LAYERS = "specdec_aux_layers"  # our own: indices of the layers whose output is read, beyond doubt
OWN_KEY = "specdec_nextn"  # our own: fields of NextNConfig that differ from what a layout means
STANDALONE = "standalone"  # an ordinary causal LM: no head, loaded as a whole
MAX_EXTRA_LAYERS = 16  # of an EAGLE-3 head beyond its first
MAX_MODULES = 8  # MTP layers of one target

# In any layout: buffers that older transformers stored, which follow from the config.
IGNORED = re.compile(r"(^|\.)rotary_emb\.inv_freq$")


@dataclass(frozen=True)
class Layout:
    """One layout.

    mark: a pattern that matches a tensor of this layout and of none further down. prefixes: (the layout's, ours), the
    first that fits counts, either way; "{m}" counts MTP layers from 0, "{at}" from the number of the target's layers.
    hidden_first: its projection reads [hidden, embedding]. holds_target: the tensors lie among those of a whole target.
    """

    name: str
    algo: str
    mark: str
    prefixes: tuple[tuple[str, str], ...]
    hidden_first: bool = False
    holds_target: bool = False

    def ours(self, name: str, num_layers: int | None = None) -> str | None:
        """Our name of the layout's tensor `name`; None if it is none of the layout's."""
        return _rename(name, self._pairs(num_layers))

    def theirs(self, name: str, num_layers: int | None = None) -> str:
        """The layout's name of our tensor `name`."""
        renamed = _rename(name, [(ours, theirs) for theirs, ours in self._pairs(num_layers)])
        assert renamed is not None, f"the layout {self.name!r} has no name for {name!r}"
        return renamed

    @lru_cache(maxsize=16)  # noqa: B019  (a layout lives as long as the program)
    def _pairs(self, num_layers: int | None) -> tuple[tuple[str, str], ...]:
        """The prefixes, for every MTP layer that there could be."""
        pairs: list[tuple[str, str]] = []
        for theirs, ours in self.prefixes:
            modules = range(MAX_MODULES if "{" in theirs else 1)
            pairs += [(theirs.format(m=m, at=(num_layers or 0) + m), ours.format(m=m)) for m in modules]
        return tuple(pairs)


def _rename(name: str, prefixes: Iterable[tuple[str, str]]) -> str | None:
    found = next(((old, new) for old, new in prefixes if name.startswith(old)), None)
    return None if found is None else found[1] + name.removeprefix(found[0])


def _same(*prefixes: str) -> tuple[tuple[str, str], ...]:
    return tuple((p, p) for p in prefixes)


_EAGLE3_SHARED = _same("fc.", "fc_norm.", "input_norm.", "norm.", "lm_head.", "embed_tokens.", "d2t", "t2d")


def _mtp_layer(at: str) -> tuple[tuple[str, str], ...]:
    """MiMo's names, which speculators took over, of the layer `at`."""
    return (
        (f"{at}.token_layernorm.", "mtp.{m}.enorm."),
        (f"{at}.hidden_layernorm.", "mtp.{m}.hnorm."),
        (f"{at}.final_layernorm.", "mtp.{m}.norm."),
        (f"{at}.input_proj.", "mtp.{m}.eh_proj."),
        (f"{at}.", "mtp.{m}.layer."),
    )


_ALL = (
    Layout(
        name="eagle3",
        algo="eagle3",
        mark=r"midlayer\.",
        prefixes=(*_same("midlayer.", "additional_layers."), *_EAGLE3_SHARED),
    ),
    Layout(
        name="speculators",
        algo="eagle3",
        mark=r"layers\.0\.hidden_norm\.|d2t$",
        prefixes=(
            ("layers.0.", "midlayer."),
            *((f"layers.{i + 1}.", f"additional_layers.{i}.") for i in range(MAX_EXTRA_LAYERS)),
            *_EAGLE3_SHARED,
        ),
    ),
    Layout(
        name="speculators_mtp",
        algo="nextn",
        mark=r"mtp_layers\.",
        prefixes=(*_mtp_layer("mtp_layers.{m}"), *_same("embed_tokens.", "lm_head.")),
    ),
    Layout(
        name="mimo",
        algo="nextn",
        mark=r"model\.mtp_layers\.",
        prefixes=_mtp_layer("model.mtp_layers.{m}"),
        hidden_first=True,
        holds_target=True,
    ),
    Layout(
        name="qwen_mtp",
        algo="nextn",
        mark=r"mtp\.",
        prefixes=(
            ("mtp.fc.", "mtp.0.eh_proj."),
            ("mtp.pre_fc_norm_embedding.", "mtp.0.enorm."),
            ("mtp.pre_fc_norm_hidden.", "mtp.0.hnorm."),
            ("mtp.norm.", "mtp.0.norm."),
            ("mtp.embed_tokens.", "embed_tokens."),
            ("mtp.lm_head.", "lm_head."),
            ("mtp.layers.0.", "mtp.0.layer."),
        ),
        holds_target=True,
    ),
    Layout(
        name="nextn",
        algo="nextn",
        mark=r"model\.layers\.\d{1,6}\.(eh_proj|enorm|hnorm|shared_head)\.",
        prefixes=(
            ("model.layers.{at}.eh_proj.", "mtp.{m}.eh_proj."),
            ("model.layers.{at}.enorm.", "mtp.{m}.enorm."),
            ("model.layers.{at}.hnorm.", "mtp.{m}.hnorm."),
            ("model.layers.{at}.shared_head.norm.", "mtp.{m}.norm."),
            ("model.layers.{at}.shared_head.head.", "lm_head."),
            ("model.layers.{at}.embed_tokens.", "embed_tokens."),
            ("model.layers.{at}.", "mtp.{m}.layer."),
        ),
        holds_target=True,
    ),
    Layout(
        name="eagle",
        algo="eagle",
        mark=r"(fc|layers\.\d+)\.",
        prefixes=_same("fc.", "layers.", "embed_tokens."),
    ),
    Layout(
        name=STANDALONE,
        algo=STANDALONE,
        mark=r"(model\.|language_model\.)+(embed_tokens|layers\.0)\.|transformer\.(wte|h\.0)\.|gpt_neox\.",
        prefixes=(),
    ),
)
LAYOUTS: Mapping[str, Layout] = MappingProxyType({layout.name: layout for layout in _ALL})


def layouts_of(names: Iterable[str]) -> list[Layout]:
    """The layouts that tensors of these names make up, most telling first: a target with an MTP layer has two."""
    names = list(names)
    found = [layout for layout in _ALL if any(re.match(layout.mark, name) for name in names)]
    heads = [layout for layout in found if layout.name != STANDALONE]
    return heads[:1] + [layout for layout in found if layout.name == STANDALONE]


def mtp_indices(layout: Layout, names: Iterable[str]) -> list[int]:
    """Indices of the MTP layers among tensors `names`, ascending; what the target has does not count."""
    pattern = {"nextn": layout.mark, "qwen_mtp": r"mtp\.layers\.(\d{1,6})\."}.get(
        layout.name, r"(model\.)?mtp_layers\.(\d{1,6})\."
    )
    found = (re.match(pattern, name) for name in names)
    return sorted({int(re.search(r"\.(\d+)\.", m[0])[1]) for m in found if m})  # type: ignore[index]
