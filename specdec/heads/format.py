"""All that differs between kinds of draft head: reading, checking, building and writing checkpoints, and training.

`heads.formats` is the table of kinds; the common part is in `heads.open`, `heads.build` and `heads.write`, and for
training in `train.students`.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from specdec.draft.head import DraftHead
from specdec.heads.base import LayerConfig
from specdec.heads.configs import Reading
from specdec.heads.files import HeadFiles
from specdec.heads.layouts import Layout
from specdec.targets.shape import TargetShape

Wanted = dict[str, tuple[int, ...]]
IsOwn = Callable[[str, Any], bool]  # whether the stored tensor of our name differs from a module's weight


@dataclass(frozen=True)
class Training:
    """Training defaults and card texts of one kind of draft.

    recipe: fields in which it differs from the defaults of `train.config.TrainConfig`. takes: fields of
    `train.students.Shape` that apply to a fresh student. name, fits: for its card, what it is and for which targets.
    """

    recipe: Mapping[str, Any]
    takes: frozenset[str]
    name: str
    fits: str


class HeadFormat(ABC):
    """One kind of head; a config is whatever its class is made from.

    algo: its name as an algorithm. features: target hidden states that it reads, see `AlgoSpec`. layouts: those it is
    read from, the most specific first. written: names of those it can be written in, the default first.
    shares_lm_head_rows: whether its lm_head can be left out, since its rows may be the target's. combining: a pattern
    of the names of the linear layers that read [embedding, feature].
    training: defaults and card texts.
    """

    algo: str
    features: str = "last"
    layouts: tuple[Layout, ...]
    written: tuple[str, ...]
    shares_lm_head_rows: bool = False
    combining: str = "fc"
    training: Training

    @abstractmethod
    def read_config(self, reading: Reading, layout: Layout, names: Sequence[str]) -> Any | None:
        """Make the config from config.json and tensors, `names` being the file's; None if it cannot be made."""

    @abstractmethod
    def make(self, config: Any, target: TargetShape) -> DraftHead:
        """Make the head on the device in force; ValueError if it cannot be made for `target`."""

    @abstractmethod
    def config_json(
        self,
        layout: str,
        head: Any,
        lm_head_from_target: bool,
        verifier: Mapping[str, Any] | None,
        num_layers: int | None,
    ) -> dict[str, Any]:
        """Return config.json of `head` in `layout`; the arguments are those of `save_head`."""

    @abstractmethod
    def fresh(self, model: PreTrainedModel, shape: Any, seed: int, hot_ids: Callable[[int], torch.Tensor]) -> DraftHead:
        """Make a head to be trained, in fp32 on the device of the target `model`.

        shape: a `train.students.Shape`; hot_ids(n): the n target tokens that a head had best score, [n] int64.
        """

    def first_index(self, layout: Layout, names: Sequence[str]) -> int | None:
        """Return the number that the layout's "{at}" begins with."""
        return None

    def sizes(self, config: Any) -> tuple[int, int] | None:
        """Return (hidden size, vocabulary) of its target, from config.json; None if that does not say."""
        return None

    def with_own_copies(self, config: Any, target: TargetShape, is_own: IsOwn) -> Any:
        """Return `config` with what the head stores itself: embeddings and heads that differ from the target's."""
        return config

    def try_out(self, head: Any) -> list[str]:
        """List what is wrong with a head that was made from sizes alone."""
        return []

    def leave_out(self, files: HeadFiles, head: Any, wanted: Wanted) -> Wanted:
        """Return tensors that may be missing, and take some of them out of `wanted`."""
        return {"embed_tokens.weight": (head.vocab_size, head.hidden_size)}

    def value_problems(self, files: HeadFiles, head: Any, wanted: Wanted) -> list[str]:
        """List what is wrong with values, where shapes are right."""
        return []

    def why(self, head: Any, name: str, shape: tuple[int, ...] | None) -> str:
        """Return the likely cause of a problem with our tensor `name`; shape: the one it has, None if it is missing."""
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
        """Add to `state` the tensors that a file may leave out."""
        return None

    def kept_dtypes(self, head: Any, target: TargetShape) -> dict[str, torch.dtype]:
        """Return dtypes of tensors that are not converted, by our names."""
        return {}

    def finish(self, head: Any, device: torch.device) -> None:
        """Finish `head` after its weights are loaded."""
        return None

    def default_layout(self, head: Any) -> str:
        """Return the layout that `head` is written in if none is asked for."""
        return self.written[0]

    def to_write(self, head: Any, state: dict[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], int | None]:
        """Return `state` as stored in files, and the number that the layout's "{at}" begins with."""
        return state, None


def layer_json(c: LayerConfig) -> dict[str, Any]:
    """Return a Llama-like layer as config.json has it."""
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
