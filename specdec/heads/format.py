"""What a kind of draft head has of its own where checkpoints are read, held against a target, built and written.

`heads.formats` is the table of kinds; what is alike stands in `heads.open`, `heads.build` and `heads.write`.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from specdec.heads.base import DraftHead, LayerConfig
from specdec.heads.configs import Reading
from specdec.heads.files import HeadFiles
from specdec.heads.layouts import Layout
from specdec.targets.shape import TargetShape

Wanted = dict[str, tuple[int, ...]]
IsOwn = Callable[[str, Any], bool]  # whether the stored tensor of our name differs from a module's weight


class HeadFormat(ABC):
    """One kind of head; a config is whatever its class is made from.

    algo: its row in `draft.algorithms`. layouts: those it is read from, the more telling ones first. written: names of
    those it can be written in, the first by default. shares_lm_head_rows: whether its lm_head can be left out, since
    its rows may be the target's. combining: a pattern of the names of the products that read [embedding, feature].
    """

    algo: str
    layouts: tuple[Layout, ...]
    written: tuple[str, ...]
    shares_lm_head_rows: bool = False
    combining: str = "fc"

    @abstractmethod
    def read_config(self, reading: Reading, layout: Layout, names: Sequence[str]) -> Any | None:
        """The config that config.json and tensors make, `names` being the file's; None if it cannot be made."""

    @abstractmethod
    def make(self, config: Any, target: TargetShape) -> DraftHead:
        """The head, made on the device in force; ValueError if it cannot be made for `target`."""

    @abstractmethod
    def config_json(
        self,
        layout: str,
        head: Any,
        lm_head_from_target: bool,
        verifier: Mapping[str, Any] | None,
        num_layers: int | None,
    ) -> dict[str, Any]:
        """config.json of `head` in `layout`; the arguments are those of `save_head`."""

    def first_index(self, layout: Layout, names: Sequence[str]) -> int | None:
        """The number that the layout's "{at}" begins with."""
        return None

    def sizes(self, config: Any) -> tuple[int, int] | None:
        """(hidden size, vocabulary) of the target it was made for, as config.json has them; None: it does not say."""
        return None

    def with_own_copies(self, config: Any, target: TargetShape, is_own: IsOwn) -> Any:
        """`config` with what the head keeps for itself: stored embeddings and heads that are not the target's."""
        return config

    def try_out(self, head: Any) -> list[str]:
        """What is wrong with a head that was made from sizes alone."""
        return []

    def leave_out(self, files: HeadFiles, head: Any, wanted: Wanted) -> Wanted:
        """Tensors that may be missing, some of them taken out of `wanted`."""
        return {"embed_tokens.weight": (head.vocab_size, head.hidden_size)}

    def value_problems(self, files: HeadFiles, head: Any, wanted: Wanted) -> list[str]:
        """What is wrong with values, where shapes are right."""
        return []

    def why(self, head: Any, name: str, shape: tuple[int, ...] | None) -> str:
        """The likely cause of a problem with our tensor `name`; shape: what it has, None if it is missing."""
        return "config.json and weights do not belong together" if name in head.state_dict() else ""

    def complete(
        self,
        files: HeadFiles,
        head: Any,
        state: dict[str, torch.Tensor],
        target: TargetShape,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """Add to `state` what a file may leave out."""
        return None

    def kept_dtypes(self, head: Any, target: TargetShape) -> dict[str, torch.dtype]:
        """Dtypes of tensors that are not converted, by our names."""
        return {}

    def finish(self, head: Any, device: torch.device) -> None:
        """After the weights are there."""
        return None

    def default_layout(self, head: Any) -> str:
        """The layout that `head` is written in if none is asked for."""
        return self.written[0]

    def to_write(self, head: Any, state: dict[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], int | None]:
        """`state` as files have it, and the number that the layout's "{at}" begins with."""
        return state, None


def layer_json(c: LayerConfig) -> dict[str, Any]:
    """A Llama-like layer as config.json has it."""
    scaling = {"rope_scaling": c.rope_scaling} if c.rope_scaling is not None else {}
    return {
        "hidden_size": c.hidden_size,
        "intermediate_size": c.intermediate_size,
        "num_attention_heads": c.num_heads,
        "num_key_value_heads": c.num_kv_heads,
        "head_dim": c.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": c.rms_norm_eps,
        "rope_theta": c.rope_theta,
        **scaling,
    }
