"""Quantised linear layers of live models through our kernels, where there are some; others run their own forward.

FP8 weights are read in place. 4-bit weights are packed at attach in our kernels' layout; the module's own tensors stay,
for its own forward. Each layer's result by our op is first compared with its own forward.
"""

import warnings
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

from specdec.backends.differences import SEED, bound, distance
from specdec.backends.linear import has_kernels
from specdec.backends.linear.fp8 import BLOCK, fp8_linear, quantise
from specdec.backends.linear.packed import MAGIC, NF4_GROUP, pack, pack_nf4, packed_linear, takes
from specdec.reach.targets.admission.quantised import BY_CHANNEL, has_blocks, is_kind, is_stand_in, quantised_linears
from specdec.reach.targets.overrides import replaced

BUFFERS = ("_specdec_words", "_specdec_scales")  # of a layer while it is routed, where a trace finds them
NUM_COMPARED = 16  # rows
MISSING = (0, 1)  # offsets by which GPTQ stores zero points too small: 0 in its second format, 1 in its first
AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)  # of eight neighbouring columns in a word


class Packed(NamedTuple):
    """The weights of a layer in the layout of `specdec::packed_linear`."""

    words: torch.Tensor
    scales: torch.Tensor


class Quantised:
    """The layers of `model` that our kernels multiply, with their packed weights, and the functions that pack them."""

    def __init__(self, model: nn.Module):
        like = model.get_input_embeddings().weight  # type: ignore[operator]
        layers = quantised_linears(model) if has_kernels(like) else []
        with torch.no_grad(), torch.inference_mode(False):
            found = {layer: _find(layer, like) for layer in layers}
        self._layers = {layer: own for layer, own in found.items() if own is not None}
        if len(self._layers) < len(layers):
            warnings.warn(
                f"{len(layers) - len(self._layers)} of {len(layers)} quantised layers run their own forward: there is "
                "no kernel for their kind, or its results differ",
                stacklevel=2,
            )

    @contextmanager
    def routed(self) -> Iterator[None]:
        """Multiply by our ops within the context, except layers with a stand-in."""
        places: list[tuple[dict[str, Any], str, Any]] = []
        for layer, (packed, _) in self._layers.items():
            if not is_stand_in(layer):
                forward = _in_fp8(layer) if packed is None else _by_words(layer, packed)
                places.append((vars(layer), "forward", forward))
                places += [(layer._buffers, *named) for named in zip(BUFFERS, packed or (), strict=False)]
        with replaced(places):
            yield

    @torch.no_grad()
    @torch.inference_mode(False)
    def refresh(self, written: Collection[Any]) -> None:
        """Pack the weights of those layers that are among `written` again, in place."""
        for layer, (packed, read) in self._layers.items():
            if packed is not None and layer in written:
                for ours, theirs in zip(packed, read(), strict=True):
                    ours.copy_(theirs)


def _find(layer: Any, like: torch.Tensor) -> tuple[Packed | None, Callable[[], Packed]] | None:
    """Return the packed weights of `layer`, None if it is read in place, and the function that packs it. None if our
    op's results for random rows differ from its own forward's by more than rounding. like: of the model's dtype and
    device."""
    random = torch.Generator(like.device).manual_seed(SEED)
    x = torch.randn(NUM_COMPARED, layer.in_features, generator=random, device=like.device).to(like.dtype)
    for read in _readers(layer, like.dtype):
        packed = read()
        ours = (_in_fp8(layer) if packed is None else _by_words(layer, packed))(x)
        if distance(ours, layer(x)) <= bound(like.dtype):
            return packed, read
    return None


def _in_fp8(layer: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    by_channel = is_kind(layer, BY_CHANNEL)

    def forward(x: torch.Tensor) -> torch.Tensor:
        bias = [] if layer.bias is None else [layer.bias]
        scales = layer.weight_scale[0] if by_channel else layer.weight_scale_inv
        return fp8_linear(*quantise(x, by_channel), [layer.weight], [scales], bias, x.dtype)

    return forward


def _by_words(layer: Any, packed: Packed) -> Callable[[torch.Tensor], torch.Tensor]:
    def forward(x: torch.Tensor) -> torch.Tensor:
        return packed_linear(x, [packed.words], [packed.scales], [] if layer.bias is None else [layer.bias])

    return forward


def _readers(layer: Any, dtype: torch.dtype) -> Iterator[Callable[[], Any]]:
    """Yield functions that may pack `layer`, by its kind; for a layer that is read in place, one that returns None."""
    N, K = layer.out_features, layer.in_features
    if is_kind(layer, "FP8Linear", BY_CHANNEL):
        if N % 16 == 0 and (K % BLOCK == 0 if is_kind(layer, BY_CHANNEL) else has_blocks(layer)):
            yield lambda: None
    elif (
        is_kind(layer, "BaseQuantLinear") and layer.bits == 4 and dtype in MAGIC and takes(N, K, K // len(layer.scales))
    ):
        if layer.qweight.shape == (K // 8, N):
            yield from (partial(_read_gptq, layer, dtype, missing) for missing in MISSING)
        elif layer.qweight.shape == (K, N // 8):
            yield partial(_read_awq, layer, dtype)
    elif is_kind(layer, "Linear4bit") and dtype in MAGIC and takes(N, K, NF4_GROUP) and _is_nf4(layer, dtype):
        yield partial(_read_nf4, layer)
    elif _has_scheme(layer) and dtype in MAGIC and takes(N, K, K // layer.weight_scale.shape[-1]):
        yield partial(_read_rounded, layer, dtype)


def _is_nf4(layer: Any, dtype: torch.dtype) -> bool:
    """Return whether a layer of bitsandbytes has NF4 with 64 features per scale, and computes in `dtype`."""
    state = layer.weight.quant_state
    return (state.quant_type, state.blocksize) == ("nf4", NF4_GROUP) and layer.compute_dtype in (None, dtype)


def _read_nf4(layer: Any) -> Packed:
    """Read bitsandbytes' layout: bytes of two features, the upper half first, in the order of rows."""
    state, data = layer.weight.quant_state, layer.weight.data.reshape(-1)
    scales = state.absmax
    if state.nested:
        from bitsandbytes.functional import dequantize_blockwise

        scales = dequantize_blockwise(scales, state.state2) + state.offset
    values = torch.stack([data >> 4, data & 15], -1).view(layer.out_features, layer.in_features)
    return Packed(*pack_nf4(values, scales.view(layer.out_features, -1)))


def _read_rounded(layer: Any, dtype: torch.dtype) -> Packed:
    """Read a layer of compressed-tensors after it was decompressed: multiples of its scales [N, K / G]."""
    scales = layer.weight_scale
    values = layer.weight.float() / scales.float().repeat_interleave(layer.in_features // scales.shape[1], 1)
    return Packed(*pack((values.round() + 8).clamp(0, 15), scales.to(dtype)))


def _has_scheme(layer: Any) -> bool:
    """Return whether `layer` is one of compressed-tensors with 4-bit symmetric weights and plain rows."""
    scheme = getattr(layer, "quantization_scheme", None)
    weights = getattr(scheme, "weights", None)
    is_plain = scheme is not None and scheme.input_activations is None and hasattr(layer, "weight_scale")
    return is_plain and weights is not None and weights.num_bits == 4 and str(weights.type).endswith("int")


def _read_gptq(layer: Any, dtype: torch.dtype, missing: int) -> Packed:
    """Read GPTQ's layout: words of eight features, [K / 8, N], zero points of eight columns, [K / G, N / 8]."""
    values = _nibbles(layer.qweight.T)
    zeros = _nibbles(layer.qzeros) + missing
    return Packed(*pack(values, layer.scales.T.to(dtype), zeros.T))


def _read_awq(layer: Any, dtype: torch.dtype) -> Packed:
    """Read AWQ's layout: words of eight columns, in an order of their own, [K, N / 8]; zero points [K / G, N / 8]."""
    values, zeros = (
        _nibbles(t).unflatten(1, (-1, 8))[..., AWQ_PLACES].flatten(1) for t in (layer.qweight, layer.qzeros)
    )
    return Packed(*pack(values.T, layer.scales.T.to(dtype), zeros.T))


def _nibbles(words: torch.Tensor) -> torch.Tensor:
    """Return the eight values of each word of 32 bits, [rows, 8 * columns], the lowest bits first."""
    shifts = torch.arange(0, 32, 4, dtype=torch.int32, device=words.device)
    return (words.unsqueeze(-1) >> shifts & 15).flatten(1)
