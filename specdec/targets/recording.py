"""What one forward of a live model is seen to do: its attention calls and its masks, while nothing is computed.

Within `probing` attention answers zeros and notes module, shapes, scaling, window, softcap and sinks; masks are those
that transformers would have built, classified by evaluating their own closures far out.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.cache_utils import DynamicCache

from specdec.backends import LayerSpec
from specdec.targets.masks import Reach, classify_mask
from specdec.targets.overrides import ConfigViews
from specdec.targets.own_attention import OwnAttention, own_replaced

# Known tensor arguments of attention calls; any other TENSOR argument means arithmetic that we do not know.
HARMLESS_TENSORS = frozenset({"position_ids", "s_aux", "position_embeddings", "cache_position"})


@dataclass
class Call:
    """An attention call. own_window: what its module's own method lets it see. problems: reasons against it."""

    module: nn.Module
    spec: LayerSpec
    sinks: torch.Tensor | None
    mask_id: int | None
    dtype: torch.dtype
    problems: list[str]
    own_window: int | None = None


@dataclass
class Recording:
    """Of a forward. counts_positions: layers asked the cache how many tokens it holds; asks_length: the stack did."""

    calls: list[Call] = field(default_factory=list)
    masks: list[str | Reach] = field(default_factory=list)
    counts_positions: bool = False
    asks_length: bool = False


_RECORDING: ContextVar[Recording] = ContextVar("specdec_probe")


def _recording() -> Recording:
    """Return the recording of the probe in progress; RuntimeError for a call that is not part of it."""
    recording = _RECORDING.get(None)
    if recording is None:
        raise RuntimeError(
            "the model ran in another thread while attach() was probing it: attach first, then use the model"
        )
    return recording


class PassThroughCache(DynamicCache):
    """Takes K/V updates without storing them, so that keys are exactly this forward's."""

    def update(self, key_states: Any, value_states: Any, *args: Any, **kwargs: Any) -> Any:
        return key_states, value_states

    def get_seq_length(self, *args: Any, **kwargs: Any) -> int:
        if args or kwargs:  # a layer asks; a stack asks without a number
            _recording().counts_positions = True
        else:
            _recording().asks_length = True
        return 0

    def get_query_offset(self, *args: Any, **kwargs: Any) -> int:  # of masks
        return 0


class Positions:
    """In the place of a cache: tokens count from its length, so it answers what makes the sums their positions [T]."""

    def __init__(self, positions: torch.Tensor):
        self._starts = positions - torch.arange(positions.shape[0], device=positions.device)

    def update(self, key_states: Any, value_states: Any, *args: Any, **kwargs: Any) -> Any:
        return key_states, value_states

    def get_seq_length(self, layer_idx: int = 0) -> torch.Tensor:
        """Return [T] int64."""
        return self._starts


def attention_spec(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, kw: Mapping[str, Any]) -> LayerSpec:
    """Return a layer's spec from transformers' attention call: q/k/v [B, heads, T, dim] and other arguments."""
    return LayerSpec(
        num_heads=q.shape[1],
        num_kv_heads=k.shape[1],
        qk_dim=q.shape[3],
        v_dim=v.shape[3],
        scaling=float(kw["scaling"]) if kw.get("scaling") is not None else q.shape[3] ** -0.5,
        window=kw.get("sliding_window"),
        softcap=kw.get("softcap"),
        has_sinks=kw.get("s_aux") is not None,
    )


def record_attention(
    module: nn.Module, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, attention_mask: Any = None, **kw: Any
) -> tuple[torch.Tensor, None]:
    mask = attention_mask
    problems = [
        f"attention takes a tensor {name!r} that we do not know"
        for name, value in kw.items()
        if isinstance(value, torch.Tensor) and name not in HARMLESS_TENSORS
    ]
    if k.shape[2] != q.shape[2]:
        problems.append(f"keys cover {k.shape[2]} positions for {q.shape[2]} queries (compressed or cached keys)")
    if q.shape[1] % k.shape[1]:
        problems.append(f"{q.shape[1]} query heads do not group over {k.shape[1]} KV heads")
    spec = attention_spec(q, k, v, kw)
    mask_id = int(mask) if isinstance(mask, torch.Tensor) and mask.numel() == 1 else None
    if mask is not None and mask_id is None:
        problems.append("attention gets a mask that HF's mask functions did not make")
    dtypes = {q.dtype, k.dtype, v.dtype}
    if len(dtypes) > 1:
        problems.append(f"queries, keys and values have several types ({', '.join(sorted(map(str, dtypes)))})")
    _recording().calls.append(Call(module, spec, kw.get("s_aux"), mask_id, k.dtype, problems))
    out = q.new_zeros(q.shape[0], q.shape[2], q.shape[1], v.shape[3])
    return out, None


def _record_mask(mask_function: Callable[..., Any], device: Any = "cpu", **kw: Any) -> torch.Tensor:
    recording = _recording()
    recording.masks.append(classify_mask(mask_function, torch.device(device)))
    return torch.tensor(len(recording.masks) - 1, device="cpu")


AttentionInterface.register("specdec_probe", record_attention)
AttentionMaskInterface.register("specdec_probe", _record_mask)


def _record_own(own: OwnAttention, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Any) -> torch.Tensor:
    """Record a call of a module's own method, q, k and v [1, heads, T, dim]; return zeros [1, heads, T, v_dim]."""
    measured = own.measure(q.shape[3], is_masked=mask is not None)
    known = {} if isinstance(measured, str) else measured._asdict()
    out, _ = record_attention(own.module, q, k, v, mask, **known)
    call = _recording().calls[-1]
    call.own_window = call.spec.window
    if isinstance(measured, str):
        call.problems.append(measured)
    return out.transpose(1, 2)


@contextmanager
def probing(model: PreTrainedModel, recording: Recording, own: Sequence[OwnAttention]) -> Iterator[None]:
    """Send attention calls and masks of `model` to `recording` within the context, those of its `own` methods, too."""
    by_module = {attention.module: attention for attention in own}
    token = _RECORDING.set(recording)
    try:
        with (
            ConfigViews(model, "specdec_probe").shown(),
            own_replaced(own, lambda module, *args: _record_own(by_module[module], *args)),
            torch.inference_mode(),
        ):
            yield
    finally:
        _RECORDING.reset(token)
