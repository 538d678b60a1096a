"""Records the attention and recurrent calls and the masks of one forward of a live model, computing nothing.

Within `probing` attention returns zeros and records module, shapes, scaling, window, softcap and sinks; masks are those
that transformers would have built, classified by evaluating their own closures far out. A `Recorder` does the same for
routed recurrent calls.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.torch_version import TorchVersion
from transformers import AttentionInterface, AttentionMaskInterface, __version__
from transformers.cache_utils import DynamicCache

from specdec.backends import LayerSpec
from specdec.backends.recurrent.state_pool import ConvInputs, ConvSpec, Decay, RecurrentSpec, ScanInputs, ScanSpec
from specdec.reach.targets.adapters.attention import Attention
from specdec.reach.targets.adapters.latents import is_latent, latent_spec
from specdec.reach.targets.admission.masks import Reach, classify_mask

# Name of the cache among a forward's arguments.
CACHE = "cache" if TorchVersion(__version__) >= "5.24" else "past_key_values"
# Known tensor arguments of attention calls; any other TENSOR argument means unknown arithmetic.
HARMLESS_TENSORS = frozenset({"position_ids", "s_aux", "position_embeddings", "cache_position"})


@dataclass
class RecordedCall:
    """An attention call. own_window: the window of its module's own method. problems: reasons against it."""

    module: nn.Module
    spec: LayerSpec
    sinks: torch.Tensor | None
    mask_id: int | None
    dtype: torch.dtype
    problems: list[str]
    own_window: int | None = None


@dataclass
class Recording:
    """The record of a forward. counts_positions: layers asked the cache how many tokens it holds; asks_length: the
    stack did.

    autocast: dtype of `torch.autocast` around its attention, which the forward itself switched on; None without.
    """

    calls: list[RecordedCall] = field(default_factory=list)
    masks: list[str | Reach] = field(default_factory=list)
    counts_positions: bool = False
    asks_length: bool = False
    autocast: torch.dtype | None = None


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
    """A pseudo-cache: models add its length to token indices, and its lengths are such that this gives positions
    [T]."""

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
    """Record an attention call in the current recording, see `Attend`; return zeros."""
    mask = attention_mask
    problems = [
        f"attention takes an unknown tensor {name!r}"
        for name, value in kw.items()
        if isinstance(value, torch.Tensor) and value.numel() and name not in HARMLESS_TENSORS
    ]
    if k.shape[2] != q.shape[2]:
        problems.append(f"keys cover {k.shape[2]} positions for {q.shape[2]} queries (compressed or cached keys)")
    if q.shape[1] % k.shape[1]:
        problems.append(f"{q.shape[1]} query heads do not group over {k.shape[1]} KV heads")
    spec, v_dim = attention_spec(q, k, v, kw), v.shape[3]
    if is_latent(module):
        spec, v_dim = latent_spec(module, spec, k.shape[3])
    mask_id = int(mask) if isinstance(mask, torch.Tensor) and mask.numel() == 1 else None
    if mask is not None and mask_id is None:
        problems.append("attention gets a mask that HF's mask functions did not make")
    dtypes = {q.dtype, k.dtype, v.dtype}
    if len(dtypes) > 1:
        problems.append(f"queries, keys and values have several types ({', '.join(sorted(map(str, dtypes)))})")
    if torch.is_autocast_enabled(q.device.type):
        _recording().autocast = torch.get_autocast_dtype(q.device.type)
    window = kw.get("own_window")
    spec = spec if window is None else replace(spec, window=window)
    _recording().calls.append(RecordedCall(module, spec, kw.get("s_aux"), mask_id, k.dtype, problems, window))
    return q.new_zeros(q.shape[0], q.shape[2], q.shape[1], v_dim), None


def _record_mask(mask_function: Callable[..., Any], device: Any = "cpu", **kw: Any) -> torch.Tensor:
    recording = _recording()
    recording.masks.append(classify_mask(mask_function, torch.device(device)))
    return torch.full((1, 1, 1, 1), len(recording.masks) - 1, device="cpu")  # of four dims: Gemma 4 slices it


AttentionInterface.register("specdec_probe", record_attention)
AttentionMaskInterface.register("specdec_probe", _record_mask)


@contextmanager
def probing(attention: Attention, recording: Recording) -> Iterator[None]:
    """Send the attention calls of a model, and its masks, to `recording` within the context."""
    token = _RECORDING.set(recording)
    try:
        with attention.answered("specdec_probe", record_attention), torch.inference_mode():
            yield
    finally:
        _RECORDING.reset(token)


class RecurrentCall(NamedTuple):
    """A recurrent call with `layer_id`; dtype: of its result."""

    layer_id: int
    spec: RecurrentSpec
    dtype: torch.dtype


class Recorder:
    """A scope that records recurrent calls. calls: in order; ids may occur several times, or never."""

    def __init__(self) -> None:
        self.calls: list[RecurrentCall] = []

    def conv(self, inputs: ConvInputs, layer_id: int) -> torch.Tensor:
        """See `specdec.backends.recurrent.conv`."""
        self.calls.append(RecurrentCall(layer_id, ConvSpec(*inputs.weight.shape), inputs.x.dtype))
        return torch.zeros_like(inputs.x)

    def scan(self, inputs: ScanInputs, layer_id: int) -> torch.Tensor:
        """See `specdec.backends.recurrent.scan`."""
        _, k, v, g, beta, rates, _ = inputs
        decay: Decay = "state" if rates is not None else "key" if g.dim() == 3 else "head"
        spec = ScanSpec(v.shape[1], k.shape[1], k.shape[2], v.shape[2], decay, is_corrected=beta is not None)
        self.calls.append(RecurrentCall(layer_id, spec, v.dtype))
        return torch.zeros_like(v)
