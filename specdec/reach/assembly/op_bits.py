"""Names the ops whose results differ in bits between two forwards, for tokens that both have.

The inputs and outputs of every op in the first forward are recorded. In the second forward each op gets the recorded
inputs for these tokens, so it causes any difference in its outputs itself. Differences from compiled code between ops
show in the inputs of the next op.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

Rows = torch.Tensor  # [T, ...], a row per token

SHORT = 256  # most tokens of recorded forwards: inputs and outputs of all their ops are kept
MOST = 3  # most recorded forwards per case
PRODUCTS = (
    "mm",
    "addmm",
    "bmm",
    "linear",
    "gated_linear",
    "gate",
    "wide_linear",
    "packed_linear",
    "quantise",
    "fp8_linear",
    "gated_linear_fp8",
    "latent_queries",
    "latent_values",
)
KINDS = {
    "attention": ("attn",),
    "adapters": ("lora", "lora_linear"),
    "experts": ("grouped_linear", "weighted_sum"),
    "routers": ("top_scores", "topk"),
    "recurrent layers": ("conv", "scan"),
    "norms": ("rms_norm", "add_rms_norm", "rms_norm_fp8", "add_rms_norm_fp8", "joined_inputs", "mean"),
}


class Shared(NamedTuple):
    """Tokens shared by two forwards: `num` from `begin` on among the first one's `of`, and from `own` on in the
    second."""

    first: Callable[..., Rows]
    of: int
    begin: int
    own: int
    num: int = 1


class Case(NamedTuple):
    """A forward of `num_tokens` tokens, and the tokens it shares with others.

    what, size: its kind and size, as text. run, like `Shared.first`, runs layers and head within the context `within`.
    """

    what: str
    size: str
    run: Callable[..., Rows]
    num_tokens: int
    shared: Sequence[Shared]


def bits_of(values: torch.Tensor) -> torch.Tensor:
    """Return floats as ints of the same bits: NaNs and zeros are compared, too."""
    kinds = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return values.contiguous().view(kinds[values.element_size()])


class _Recording(TorchDispatchMode):
    """Records the name of each op, with copies of its float inputs, then outputs, that have a token dimension."""

    def __init__(self, num_tokens: int):
        super().__init__()
        self.num_tokens = num_tokens
        self.ops: list[tuple[str, list[torch.Tensor | None]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        got = [self._copied(t) for t in _floats((args, kwargs))]
        out = func(*args, **(kwargs or {}))
        if not func.is_view:
            self.ops.append((func.name(), got + [self._copied(t) for t in _floats(out)]))
        return out

    def _copied(self, values: torch.Tensor) -> torch.Tensor | None:
        return values.clone() if self.num_tokens in values.shape else None


class _Comparing(TorchDispatchMode):
    """Replaces the float inputs and outputs of each op by the recorded ones; found: by op, whether they differed, on
    the device."""

    def __init__(self, case: Case, known: Sequence[Sequence[tuple[str, list[torch.Tensor | None]]]]):
        super().__init__()
        self.found: dict[str, list[torch.Tensor]] = {}
        self._case, self._known, self._num_ops = case, known, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.is_view or self._has_parted(func.name()):
            return func(*args, **(kwargs or {}))
        got, name = _floats((args, kwargs)), func.name().partition("::")[2].partition(".")[0]
        self._compare(f"what is compiled before {_kind_of(name, got, [])}", 0, got)
        out = func(*args, **(kwargs or {}))
        gave = _floats(out)
        self._compare(_kind_of(name, got, gave), len(got), gave)
        self._num_ops += 1
        return out

    def _has_parted(self, name: str) -> bool:
        """Return whether a recorded forward ran another op here, or none: nothing after that can be compared."""
        return any(self._num_ops >= len(ops) or ops[self._num_ops][0] != name for ops in self._known)

    def _compare(self, name: str, begin: int, found: list[torch.Tensor]) -> None:
        """Compare an op's float inputs or outputs with those recorded from `begin` on, and overwrite them with the
        latter."""
        for shared, ops in zip(self._case.shared, self._known, strict=True):
            for own, first in zip(found, ops[self._num_ops][1][begin:], strict=False):
                pair = None if first is None else _shared_parts(own, first, self._case.num_tokens, shared)
                if pair is not None:
                    self.found.setdefault(name, []).append((bits_of(pair[0]) != bits_of(pair[1])).any())
                    pair[0].copy_(pair[1])


def _floats(values: Any) -> list[torch.Tensor]:
    return [t for t in tree_leaves(values) if isinstance(t, torch.Tensor) and t.is_floating_point()]


def _shared_parts(
    own: torch.Tensor, first: torch.Tensor, num_tokens: int, shared: Shared
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Return the shared tokens' parts of tensors of two forwards; None without a token dimension, or if `own` is
    expanded."""
    if own.dim() != first.dim():
        return None
    shapes = [
        (*own.shape[:d], shared.of, *own.shape[d + 1 :]) if n == num_tokens else () for d, n in enumerate(own.shape)
    ]
    if first.shape not in shapes or 0 in own.stride():
        return None
    along = shapes.index(first.shape)
    return own.narrow(along, shared.own, shared.num), first.narrow(along, shared.begin, shared.num)


def _kind_of(name: str, got: list[torch.Tensor], gave: list[torch.Tensor]) -> str:
    """Return the kind of an op; for matmuls with the weight's size [N, K]."""
    if name in PRODUCTS and gave:
        rows = got[name == "addmm"]
        return f"products of [{gave[0].shape[-1]}, {rows.shape[-1]}]"
    return next((kind for kind, names in KINDS.items() if name in names), name)


def differing_ops(case: Case) -> list[str]:
    """Run the forwards of `case` again, first those it is compared with, and name the ops that differ; [] for long
    ones."""
    case = case._replace(shared=case.shared[:MOST])
    if sum(shared.of for shared in case.shared) > SHORT or case.num_tokens > SHORT:
        return []
    known = []
    for shared in case.shared:
        recording = _Recording(shared.of)
        shared.first(within=recording)
        known.append(recording.ops)
    comparing = _Comparing(case, known)
    case.run(within=comparing)
    return [name for name, differs in comparing.found.items() if bool(torch.stack(differs).any())]
