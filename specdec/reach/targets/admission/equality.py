"""Admission by equality: our route must give the logits of the model's own forward, or the model is not attached.

Two requests are prefilled in one packed forward, then one verifies a chain and the other a tree. The model's own code,
with its own attention, masks and positions, gets the same texts as a batch with a row for each path. This exposes every
other way in which tokens affect each other than the recorded attention: a recurrent branch, or positions that are
counted instead of read. Effects beyond a dozen tokens do not show here; the probe judges those from masks and
arguments.
"""

import inspect
import warnings
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from operator import le

import torch
from torch.distributed import DistError
from transformers import PreTrainedModel

from specdec.backends import AttentionBackend, ForwardContext, TorchBackend, forward_context
from specdec.backends.differences import TOLERANCE, bound, distance, largest_difference
from specdec.backends.recurrent.reference import TORCH_RECURRENT
from specdec.backends.recurrent.state_pool import StatePool
from specdec.core.batch import AttentionMetadata, ForwardMode
from specdec.core.cache.pool import KVPool
from specdec.core.errors import AttachError, RankError
from specdec.reach.targets.admission.probe import ModelSpec
from specdec.reach.targets.admission.quantised import stand_ins
from specdec.reach.targets.compiling.echo import disturbed

PROMPT_LENS = (8, 5)
LENGTH = 12  # of a row of the batch
WIDTH = 16  # KV slots of a request
DEPTHS = ((0, 1, 2, 3), (0, 1, 1, 2))  # of the verified nodes: a chain, and a tree whose paths are 0-1-3, 0-2
ANCESTORS = ((1, 3, 7, 15), (1, 3, 5, 11))  # including the nodes themselves, as bits
PATHS = ((0, (0, 1, 2, 3)), (1, (0, 1, 3)), (1, (0, 2)))  # request and nodes: a row of the batch each
# Places (row, position) in the batch of our logits: the prefill's, the chain's, the tree's.
PLACES = {
    "a prefill": tuple((r, i) for r, n in enumerate(PROMPT_LENS) for i in range(n)),
    "a chain": tuple((0, 8 + i) for i in range(4)),
    "a tree": ((1, 5), (1, 6), (2, 6), (1, 7)),
}
_COUNTED = (
    "{name} numbers positions in two ways: its generate() from 0, its forward without position_ids from "
    "elsewhere. The engine uses those of generate() for text and likelihoods."
)
Run = Callable[[AttentionMetadata, torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Difference:
    """The difference between logits over our pool and the model's own: the forward, the error, and the allowed
    error."""

    where: str
    error: float
    allowed: float

    @property
    def is_too_large(self) -> bool:
        """Return whether it exceeds rounding; NaN does."""
        return not self.error <= self.allowed

    def __str__(self) -> str:
        return (
            f"in {self.where} over our KV pool its logits differ from its own forward's by {self.error:.1e} of their "
            f"size (allowed: {self.allowed:.1e}): something beside its attention calls reads other tokens, or counts "
            "positions"
        )


def check_equality(
    model: PreTrainedModel,
    spec: ModelSpec,
    run: Run,
    dtype: torch.dtype,
    device: torch.device,
    any_rank: Callable[[bool], bool],
) -> None:
    """Raise AttachError if `run` does not give the logits of the model's own forward, on any of the ranks.

    A model whose bare forward and `generate` count positions differently is compared at the positions of `generate`,
    with a warning. See `differences`; any_rank: returns whether something is so on any rank; all ranks call it.
    """

    def own(ids: torch.Tensor, **placed: torch.Tensor) -> torch.Tensor:
        return model(input_ids=ids, use_cache=False, **placed).logits

    def generating(ids: torch.Tensor) -> torch.Tensor:
        return own(ids, position_ids=torch.arange(ids.shape[1], device=ids.device).expand_as(ids))

    def compared(theirs: Callable[[torch.Tensor], torch.Tensor]) -> list[Difference]:
        try:
            return differences(spec, run, theirs, dtype, device, any_rank)
        except (RankError, DistError):
            raise
        except Exception as error:
            reason = f"it could not be compared with its own forward: {error}"
            raise AttachError(type(model).__name__, [reason, *spec.doubts]) from error

    with stand_ins(model):
        found = compared(own)
    if not any_rank(any(d.is_too_large for d in found)):
        return
    is_placed = "position_ids" in inspect.signature(model.forward).parameters
    if is_placed and not any_rank(any(d.is_too_large for d in compared(generating))):
        warnings.warn(_COUNTED.format(name=type(model).__name__), stacklevel=6)
        return
    worst = next((d for d in found if d.is_too_large), found[0])
    raise AttachError(type(model).__name__, [str(worst), *spec.doubts])


@torch.inference_mode()
def differences(
    spec: ModelSpec,
    run: Run,
    own: Callable[[torch.Tensor], torch.Tensor],
    dtype: torch.dtype,
    device: torch.device,
    any_rank: Callable[[bool], bool],
) -> list[Difference]:
    """Compare forwards over a small pool of `dtype` with the model's own; a prefill, a chain and a tree.

    run(metadata, input_ids [T]) gives logits [T, V], its attention answered by the scope in force; own(input_ids
    [B, L]) gives [B, L, V]. In 16 bits, and with TF32, if some differ by more than any model may, a second run measures
    the effect of rounding, as `echo` does.
    """
    prompts, nodes = _texts(spec.num_ids, device)
    batch = own(torch.stack([_row(prompts, nodes, *path) for path in PATHS]))
    theirs = [batch[[r for r, _ in places], [i for _, i in places]] for places in PLACES.values()]
    ids = torch.cat([*prompts, nodes.flatten()])
    ours = _forwards(spec, run, ids, dtype, None)
    unit = _rounding_unit(dtype, device)
    if unit < TOLERANCE[torch.float32] / 100:  # far below it: a single differing logit is seen
        pairs = ((t.view(1, -1) for t in scored(a, b)) for a, b in zip(ours, theirs, strict=True))
        measured = [(float(largest_difference(*pair)), TOLERANCE[torch.float32]) for pair in pairs]
    else:
        errors, limits = [distance(*scored(a, b)) for a, b in zip(ours, theirs, strict=True)], [bound(dtype)] * 3
        if any_rank(not all(map(le, errors, limits))):  # NaN, too
            moved = _forwards(spec, run, ids, dtype, unit)
            limits = [bound(dtype, distance(*scored(c, a))) for a, c in zip(ours, moved, strict=True)]
        measured = list(zip(errors, limits, strict=True))
    return [Difference(where, *m) for where, m in zip(PLACES, measured, strict=True)]


def _texts(vocab_size: int, device: torch.device) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Return two prompts, and the nodes [2, 4] after them; ids are far from both ends, where special ones are."""
    count = sum(PROMPT_LENS) + 8
    spread = torch.arange(count, device=device).view(3, -1).t().flatten()  # neighbouring ids of the text differ
    ids = (vocab_size // 4 + spread * max(1, vocab_size // (2 * count))).clamp(max=vocab_size - 1)
    *prompts, nodes = ids.split([*PROMPT_LENS, 8])
    return prompts, nodes.view(2, 4)


def _row(prompts: list[torch.Tensor], nodes: torch.Tensor, request: int, path: tuple[int, ...]) -> torch.Tensor:
    """Return a row [LENGTH] of the batch: a prompt, a path, and padding."""
    text = torch.cat([prompts[request], nodes[request, list(path)]])
    return torch.cat([text, text[: LENGTH - text.numel()]])


def _forwards(
    spec: ModelSpec, run: Run, ids: torch.Tensor, dtype: torch.dtype, unit: float | None
) -> list[torch.Tensor]:
    """Return logits of the prefill, the chain and the tree; unit: relative disturbance of attention's results."""
    pool = KVPool([layer.shape for layer in spec.layers], 1 + 2 * WIDTH, dtype, ids.device)
    states = () if not spec.recurrent else (StatePool(spec.recurrent, 2, 4, dtype, ids.device, TORCH_RECURRENT),)
    context = ForwardContext(TorchBackend(), pool, spec.layers, spec.sinks, lambda mode: None, states)
    logits = []
    for metadata, part in zip(_batches(context.backend, ids.device), ids.split([sum(PROMPT_LENS), 8]), strict=True):
        with forward_context(context, metadata), nullcontext() if unit is None else disturbed(unit):
            logits.append(run(metadata, part))
    prefill, verified = logits
    return [prefill, *verified.split(4)]


def _batches(backend: AttentionBackend, device: torch.device) -> Iterator[AttentionMetadata]:
    """Yield the metadata of the packed prefill, then of the verification."""
    table = 1 + torch.arange(2 * WIDTH, dtype=torch.int32, device=device).view(2, WIDTH)
    rows = torch.arange(2, device=device)
    depths = torch.tensor(DEPTHS, device=device)
    yield backend.metadata.prefill(table, rows, [0, 0], PROMPT_LENS)
    yield backend.metadata.uniform(
        ForwardMode.TARGET_VERIFY,
        table,
        rows,
        torch.tensor(PROMPT_LENS, device=device),
        q_len=4,
        max_prefix=max(PROMPT_LENS),
        depths=depths,
        tail_depths=depths,
        ancestor_bits=torch.tensor(ANCESTORS, device=device).unsqueeze(2),
    )


def _rounding_unit(dtype: torch.dtype, device: torch.device) -> float:
    """Return the rounding of matrix products, relative."""
    is_tf32 = torch.backends.cuda.matmul.fp32_precision == "tf32"  # however it was set
    return 2.0**-11 if is_tf32 and dtype is torch.float32 and device.type == "cuda" else torch.finfo(dtype).eps / 2


def scored(ours: torch.Tensor, theirs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return both as float64, without tokens that the model never emits, whose logits have no scale, and without rows
    that it makes NaN itself, as with a damaged embedding; if nothing is left, they are equal."""
    is_banned, is_sound = theirs <= torch.finfo(theirs.dtype).min, ~theirs.isnan().any(-1)
    if not is_sound.any():
        return theirs.new_ones(1, 1), theirs.new_ones(1, 1)
    both = (logits.double().masked_fill(is_banned, 0)[is_sound] for logits in (ours, theirs))
    return next(both), next(both)
