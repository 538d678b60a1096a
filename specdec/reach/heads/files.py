"""An opened head checkpoint: its config.json, its tensors by our names, and the notes and problems of reading them."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch

from specdec.core.draft.head import DraftHead
from specdec.core.errors import CheckpointError
from specdec.reach.checkpoints.fitting import is_copy, tensor_problems, warn_if_random
from specdec.reach.checkpoints.folders import as_checkpoint_error
from specdec.reach.checkpoints.tensors import FLOATS, Shapes, TensorFiles
from specdec.reach.heads.format import Layout
from specdec.reach.targets.shape import TargetShape

EMBEDDING, LM_HEAD = "embed_tokens.weight", "lm_head.weight"

Wanted = dict[str, tuple[int, ...]]
Config = TypeVar("Config")
Head = TypeVar("Head", bound=DraftHead)


@dataclass
class HeadFiles:
    """The opened files of a head.

    raw: config.json. names: our tensor name to the file's; unknown tensors keep the file's. found: shape and dtype, by
    the same keys. modules: numbers of MTP layers. copies: file name to our name, for further tensors that map to a name
    of ours already in `names`. notes: where values come from. problems: why the head cannot be read. doubts: where
    config.json contradicts the tensors, which then win.
    """

    folder: Path
    layout: Layout
    raw: Mapping[str, Any]
    files: TensorFiles
    names: Mapping[str, str]
    found: Shapes
    modules: Sequence[int] = ()
    copies: Mapping[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    doubts: list[str] = field(default_factory=list)

    def named(self, ours: str) -> str:
        """Return the file's name of our tensor, even if it is missing."""
        return self.names.get(ours) or self.layout.theirs(ours, next(iter(self.modules), 0))

    def read(self, ours: Sequence[str]) -> dict[str, torch.Tensor]:
        """Read tensors by our names, as stored, on the CPU."""
        stored = self.files.read([self.names[name] for name in ours])
        return {name: stored[self.names[name]] for name in ours}

    def items(self, ours: Sequence[str]) -> Iterator[tuple[str, torch.Tensor]]:
        """Read tensors by our names, one at a time."""
        return ((name, self.read([name])[name]) for name in ours)

    def has(self, prefix: str) -> bool:
        """Return whether there is a tensor named `prefix`, or of a module below it."""
        return any(name == prefix or name.startswith(prefix + ".") for name in self.found)

    def count(self, prefix: str) -> int:
        """Return the number of numbered modules below `prefix`."""
        below = (n.removeprefix(prefix + ".").split(".")[0] for n in self.found if n.startswith(prefix + "."))
        return len({number for number in below if number.isdigit()})

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of our tensor `name`, () if there is none."""
        return self.found[name][0] if name in self.found else ()

    def compare(self, key: str, stated: Any, found: int) -> None:
        """Add a doubt if `stated`, the value of `key`, differs from `found`, the tensors' value, which wins."""
        if stated is not None and stated != found:
            self.doubts.append(f"config.json has {key}={stated}, the tensors have {found}, which is used")

    def flag(self, key: str, tensor: str, absent: bool | None = False) -> bool:
        """Return whether `tensor` exists; adds a problem if the bool `key` says otherwise.

        A missing key means `absent`; None: it agrees with the tensors.
        """
        has_tensor = self.has(tensor)
        value = self.raw.get(key, absent)
        if key not in self.raw and (value or has_tensor):
            taken = has_tensor if absent is None else absent
            self.notes.append(f"{key}: {str(taken).lower()}; config.json does not say")
        if value is not None and bool(value) != has_tensor:
            whence = f"{key}={value}" if key in self.raw else f"no {key!r}, which means {str(value).lower()}"
            self.problems.append(
                f"config.json has {whence}, but there is {'a' if has_tensor else 'no'} tensor {tensor}"
            )
        return has_tensor

    def parse(self, reader: Callable[..., Config], *more: Any) -> Config:
        """Return reader(self, *more), a config; CheckpointError for any exception."""
        with as_checkpoint_error(self.folder, f"config.json cannot be read as that of {self.layout.name!r}"):
            return reader(self, *more)

    def make(self, head_class: Callable[..., Head], *arguments: Any) -> Head:
        """Make a head on the meta device. CheckpointError, with all problems so far, if that fails."""
        try:
            with torch.device("meta"):
                return head_class(*arguments)
        except Exception as error:
            what = f"the head cannot be made: {error}"
            raise CheckpointError(str(self.folder), [*self.problems, what]) from error

    def check_target(self, target: TargetShape | None, width: int, vocab_size: int) -> None:
        """Add a problem if config.json's hidden size `width` or `vocab_size` differs from the target's."""
        if target is not None and width != target.hidden_size:
            self.problems.append(
                f"made for hidden size {width}, the target has {target.hidden_size}: another target's head"
            )
        if target is not None and vocab_size != target.vocab_size:
            self.problems.append(f"made for a vocabulary of {vocab_size}, the target has {target.vocab_size}")

    def is_own(self, name: str, target: TargetShape | None) -> bool:
        """Return whether EMBEDDING or LM_HEAD is stored and differs from the target's, if there is one.

        CheckpointError if MTP layers bring copies that differ.
        """
        if target is None:
            return name in self.found
        module = getattr(target, name.removesuffix(".weight"))
        if self.shape(name) != (target.vocab_size, module.weight.shape[1]) or self.found[name][1] not in FLOATS:
            return False  # absent, or of a shape or type that is reported as a problem
        weight, stored = target.rows_of(module), self.read([name])[name]
        for again, ours in self.copies.items():
            if ours == name and not torch.equal(self.files.read([again])[again], stored):
                what = f"{again} differs from {self.named(name)}: expected one for all"
                raise CheckpointError(str(self.folder), [what])
        if is_copy(stored, weight):
            return False
        if name == EMBEDDING:
            warn_if_random(stored, weight, str(self.folder))
        return True

    def check(self, wanted: Wanted, optional: Wanted, why: Callable[[str, tuple[int, ...] | None], str]) -> None:
        """List missing, unexpected and misshapen tensors as problems.

        why(name, shape): the likely cause for our tensor and the shape it has, None if it is missing; "" if unknown.
        """
        self.problems += tensor_problems(wanted, optional, self.found, self.named, why)


def shapes_of(head: DraftHead) -> Wanted:
    """Return the shape of every tensor of `head`."""
    return {name: tuple(tensor.shape) for name, tensor in head.state_dict().items()}
