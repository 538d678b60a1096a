"""The first half of admission: one forward of the live model with a recording attention function.

It records every attention call (module, shapes, scaling, window, softcap, sinks) and every mask HF would have built,
classified by evaluating HF's own mask closure far out. What cannot be run, or would differ only far into a text, is a
reason against the model; what merely looks foreign is a doubt. `equality`, the second half, decides about doubts. No
model is known by name.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.cache_utils import DynamicCache

from specdec.backends import LayerSpec
from specdec.backends.state_pool import RecurrentSpec
from specdec.checkpoints.fitting import weight_doubts
from specdec.errors import AttachError
from specdec.targets.masks import Reach, classify_mask
from specdec.targets.mixers import Mixer, find_mixers, mixers_routed, renumber_mixers
from specdec.targets.overrides import answering, attention_configs, attention_implementation
from specdec.targets.placement import placement_reasons
from specdec.targets.recorder import ConvShape, record_mixers
from specdec.targets.ropes import rope_limit, varying_ropes
from specdec.targets.shape import position_limit, vocab_size_of

PROBE_LENGTH = 12
# Layer types whose meaning is known here. Others are no reason against a model, but explain one.
KNOWN_LAYER_TYPES = frozenset({"full_attention", "sliding_attention", "chunked_attention", "linear_attention", "conv"})
# Known tensor arguments of attention calls; any other TENSOR argument means arithmetic that we do not know.
HARMLESS_TENSORS = frozenset({"position_ids", "s_aux", "position_embeddings", "cache_position"})


@dataclass
class _Call:
    module: nn.Module
    spec: LayerSpec
    sinks: torch.Tensor | None
    mask_id: int | None
    dtype: torch.dtype
    problems: list[str]


@dataclass
class _Recording:
    calls: list[_Call] = field(default_factory=list)
    masks: list[str | Reach] = field(default_factory=list)
    counts_positions: bool = False


@dataclass(frozen=True)
class ModelSpec:
    """Facts for the attach layer: attention modules in call order, their specs and sinks, and widths.

    stack: the module that is all but the head, from ids to last hidden states; stack_output: the class of its output.
    doubts: what may explain logits that turn out to be others than the model's own. counts_positions: layers ask the
    cache how many tokens it holds, and count positions from there, in place of reading them. mixers: the recurrent
    modules; recurrent: specs of their calls, by layer id. num_layers: of all kinds.
    """

    modules: tuple[nn.Module, ...]
    layers: tuple[LayerSpec, ...]
    sinks: tuple[torch.Tensor | None, ...]
    hidden_size: int
    vocab_size: int
    max_positions: int
    stack: nn.Module
    stack_output: Callable[..., Any]
    doubts: tuple[str, ...] = ()
    counts_positions: bool = False
    mixers: tuple[Mixer, ...] = ()
    recurrent: tuple[RecurrentSpec, ...] = ()
    num_layers: int = 0


_RECORDING: ContextVar[_Recording] = ContextVar("specdec_probe")


def _recording() -> _Recording:
    """Return the recording of the probe in progress; RuntimeError for a call that is not part of it."""
    recording = _RECORDING.get(None)
    if recording is None:
        raise RuntimeError(
            "the model ran in another thread while attach() was probing it: attach first, then use the model"
        )
    return recording


class _PassThroughCache(DynamicCache):
    """Takes K/V updates without storing them, so that keys are exactly this forward's."""

    def update(self, key_states: Any, value_states: Any, *args: Any, **kwargs: Any) -> Any:
        return key_states, value_states

    def get_seq_length(self, *args: Any, **kwargs: Any) -> int:
        if args or kwargs:  # a layer asks; a stack asks without a number, and is given positions in our forwards
            _recording().counts_positions = True
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


def _record_attention(
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
    _recording().calls.append(_Call(module, spec, kw.get("s_aux"), mask_id, k.dtype, problems))
    out = q.new_zeros(q.shape[0], q.shape[2], q.shape[1], v.shape[3])
    return out, None


def _record_mask(mask_function: Callable[..., Any], device: Any = "cpu", **kw: Any) -> torch.Tensor:
    recording = _recording()
    recording.masks.append(classify_mask(mask_function, torch.device(device)))
    return torch.tensor(len(recording.masks) - 1)


AttentionInterface.register("specdec_probe", _record_attention)
AttentionMaskInterface.register("specdec_probe", _record_mask)


def probe(model: PreTrainedModel) -> ModelSpec:
    """Run one short forward and return what was seen; AttachError lists every reason against the model."""
    name = type(model).__name__
    misplaced = placement_reasons(model)
    if misplaced:  # a forward might not run, or bring weights in from elsewhere
        raise AttachError(name, misplaced)
    device = model.get_input_embeddings().weight.device
    ids = torch.arange(PROBE_LENGTH, device=device).unsqueeze(0)
    mixers = find_mixers(model)
    try:
        first = _first_forward(model, ids, may_cache=not mixers)
    except Exception as error:
        reasons = [*_static_reasons(model), f"the probe forward failed: {error}", *_foreign_layers(model)]
        raise AttachError(name, reasons) from error
    recording, logits = first.recording, first.logits
    reasons = _static_reasons(model) + _call_reasons(recording, model, bool(mixers))
    if bool(logits.isnan().any()):  # nothing could be compared with them
        reasons.append(
            "; ".join(["its logits are NaN", *weight_doubts(model)]) + ": take another export of its weights"
        )
    if not reasons:
        stack = _find_stack(model, first, ids)
        if stack is None:
            reasons = ["its head cannot be run apart from its layers, on hidden states of the embedding's type"]
    doubts = [*_foreign_layers(model), *([] if mixers else _unrouted_layers(recording, model))]
    if not reasons:
        assert stack is not None
        recurrent, reasons = _recurrent_specs(model, stack, mixers, ids)
    if reasons:
        raise AttachError(name, list(dict.fromkeys([*reasons, *doubts])))
    assert stack is not None
    config = model.config.get_text_config()
    return ModelSpec(
        modules=tuple(c.module for c in recording.calls),
        layers=tuple(_with_reach(c, recording) for c in recording.calls),
        sinks=tuple(c.sinks for c in recording.calls),
        hidden_size=config.hidden_size,
        vocab_size=vocab_size_of(model),
        max_positions=position_limit(config)[0] or 1 << 30,
        stack=stack,
        stack_output=first.outputs[stack],
        doubts=tuple(doubts),
        counts_positions=recording.counts_positions,
        mixers=mixers,
        recurrent=recurrent,
        num_layers=config.num_hidden_layers if mixers else len(recording.calls),
    )


@contextmanager
def _probing(model: PreTrainedModel, recording: _Recording) -> Iterator[None]:
    """Send attention calls and masks of `model` to `recording` within the context."""
    token = _RECORDING.set(recording)
    try:
        with attention_implementation(attention_configs(model), "specdec_probe"), torch.inference_mode():
            yield
    finally:
        _RECORDING.reset(token)


@dataclass
class _Forward:
    """A recorded forward: the calls, the output classes of modules with last hidden states, and logits [1, T, V]."""

    recording: _Recording
    outputs: dict[nn.Module, Callable[..., Any]]
    logits: torch.Tensor
    has_cache: bool


def _first_forward(model: PreTrainedModel, ids: torch.Tensor, may_cache: bool) -> _Forward:
    """Run `model` with a cache, which some need, or else without, since a cache may not know its layers' types, and
    recurrent layers take another way with one."""
    for has_cache in (True, False) if may_cache else (False,):
        recording, outputs = _Recording(), dict[nn.Module, Callable[..., Any]]()
        try:
            with _probing(model, recording), _recorded_outputs(list(model.modules())[1:], outputs):
                logits = model(input_ids=ids, **_cache_arguments(model, has_cache)).logits
        except Exception:
            if not has_cache:
                raise
        else:
            break
    return _Forward(recording, outputs, logits, has_cache)


def _cache_arguments(model: PreTrainedModel, has_cache: bool) -> dict[str, Any]:
    if not has_cache:
        return {"use_cache": False}
    return {"past_key_values": _PassThroughCache(config=model.config.get_text_config()), "use_cache": True}


@contextmanager
def _recorded_outputs(modules: Sequence[nn.Module], outputs: dict[nn.Module, Callable[..., Any]]) -> Iterator[None]:
    """Record the output class of each of `modules` in `outputs` within the context, the innermost first; those without
    last hidden states do not count."""

    def record(module: nn.Module, args: Any, output: Any) -> None:
        if isinstance(getattr(output, "last_hidden_state", None), torch.Tensor):
            outputs[module] = type(output)

    handles = [m.register_forward_hook(record) for m in modules]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _find_stack(model: PreTrainedModel, first: _Forward, ids: torch.Tensor) -> nn.Module | None:
    """Find the innermost module from whose last hidden states the rest of `model` makes the same logits, or None.

    They are kept in the embedding's type, so a head must round them itself where layers leave more.
    """
    logits, dtype = first.logits, model.get_input_embeddings().weight.dtype
    for stack, output in first.outputs.items():
        try:
            with _probing(model, _Recording()):
                hidden = stack(input_ids=ids, **_cache_arguments(model, first.has_cache)).last_hidden_state.to(dtype)
                with answering(stack, output(last_hidden_state=hidden)):
                    again = model(input_ids=torch.zeros_like(ids), use_cache=False).logits
        except Exception:  # not such a module: try the next
            continue
        atol = 1e-3 * float(logits.abs().max())
        if torch.allclose(again.float(), logits.float(), rtol=1e-3, atol=atol, equal_nan=True):
            return stack
    return None


def _recurrent_specs(
    model: PreTrainedModel, stack: nn.Module, mixers: Sequence[Mixer], ids: torch.Tensor
) -> tuple[tuple[RecurrentSpec, ...], list[str]]:
    """Return the specs of the recurrent calls of a forward, which number `mixers` in their order, and reasons."""
    if not mixers:
        return (), []
    with _probing(model, _Recording()), mixers_routed(mixers), record_mixers() as recorder:
        stack(input_ids=ids, use_cache=False)
    renumber_mixers(mixers, recorder.order)
    dtype = model.get_input_embeddings().weight.dtype
    shapes = [call.shape for call in recorder.calls]
    others = sorted({str(s.dtype) for s in shapes if isinstance(s, ConvShape) and s.dtype is not dtype})
    reasons = [f"its embedding is {dtype}, but convolutions run in {', '.join(others)}"] if others else []
    return tuple(shape.spec for shape in shapes), reasons


def _static_reasons(model: PreTrainedModel) -> list[str]:
    """Return reasons that need no forward."""
    config = model.config.get_text_config()
    reasons = []
    rope = rope_limit(config)
    if rope is not None and not varying_ropes(model):
        reasons.append(f"rope type {rope[1]!r}: rotary frequencies depend on the longest sequence of the batch")
    if model.training:
        reasons.append("the model is in training mode; call model.eval() first")
    if model.get_output_embeddings() is None:
        reasons.append("the model has no output head; expected a causal LM")
    return reasons


def _call_reasons(recording: _Recording, model: PreTrainedModel, is_recurrent: bool) -> list[str]:
    """Return reasons found in what was recorded."""
    calls = recording.calls
    if not calls and not is_recurrent:
        return ["its attention does not go through AttentionInterface, so it cannot be routed"]
    reasons = [p for c in calls for p in c.problems]
    dtype = model.get_input_embeddings().weight.dtype
    others = sorted({str(c.dtype) for c in calls if c.dtype is not dtype})
    if others:
        reasons.append(
            f"its embedding is {dtype}, but attention runs in {', '.join(others)}: pools and heads need one type; load "
            "the model with from_pretrained(..., dtype=...) or convert the embedding"
        )
    if len({id(c.module) for c in calls}) != len(calls):
        reasons.append("one attention module is called several times a forward")
    used = {c.mask_id for c in calls if c.mask_id is not None}
    reasons += [f"a layer uses {recording.masks[i]}" for i in used if isinstance(recording.masks[i], str)]
    return reasons


def _foreign_layers(model: PreTrainedModel) -> list[str]:
    """Return a doubt about layers whose type, by the config, is not known."""
    foreign = sorted(set(getattr(model.config.get_text_config(), "layer_types", None) or []) - KNOWN_LAYER_TYPES)
    return [f"layer types {foreign}: recurrent and sparse layers are not supported"] if foreign else []


def _unrouted_layers(recording: _Recording, model: PreTrainedModel) -> list[str]:
    """Return a doubt about layers that made no attention call, or several."""
    num_calls, num_layers = len(recording.calls), model.config.get_text_config().num_hidden_layers
    if num_calls in (0, num_layers):
        return []
    return [f"{num_calls} attention calls for {num_layers} layers (layers without routed attention)"]


def _with_reach(call: _Call, recording: _Recording) -> LayerSpec:
    """Return the layer's spec with what its mask lets it see; without a mask, the window of the keyword argument."""
    if call.mask_id is None:
        return call.spec
    reach = recording.masks[call.mask_id]
    assert isinstance(reach, Reach)
    return replace(call.spec, window=reach.window, chunk=reach.chunk)
