"""The first half of admission: one forward of the live model with a recording attention function.

It records every attention call (module, shapes, scaling, window, softcap, sinks) and every mask HF would have built,
classified by evaluating HF's own mask closure far out. What cannot be run, or would differ only far into a text, is a
reason against the model; what merely looks foreign is a doubt. `equality`, the second half, decides about doubts. No
model is known by name.
"""

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from specdec.backends import LayerSpec
from specdec.backends.state_pool import RecurrentSpec
from specdec.checkpoints.fitting import weight_doubts
from specdec.errors import AttachError
from specdec.targets.exclusive import answering
from specdec.targets.mixers import Mixer, find_mixers, mixers_routed, renumber_mixers
from specdec.targets.own_attention import OwnAttention, find_own_attention
from specdec.targets.placement import placement_reasons
from specdec.targets.reasons import (
    call_reasons,
    failure_reasons,
    foreign_layers,
    static_reasons,
    unrouted_layers,
    with_reach,
)
from specdec.targets.recorder import ConvShape, record_mixers
from specdec.targets.recording import PassThroughCache, Recording, probing
from specdec.targets.shape import position_limit, vocab_size_of
from specdec.targets.taps import found_layers

PROBE_LENGTH = 12


@dataclass(frozen=True)
class ModelSpec:
    """Facts for the attach layer: attention modules in call order, their specs and sinks, and widths.

    stack: the module that is all but the head, from ids to last hidden states; stack_output: the class of its output.
    doubts: what may explain logits that turn out to be others than the model's own. counts_positions: layers ask the
    cache how many tokens it holds, and count positions from there, in place of reading them; takes_positions: the stack
    does not. own_attention: modules that attend in a method of their own. mixers: the recurrent modules; recurrent:
    specs of their calls, by layer id. num_layers: of all kinds. blocks: the layers in their order, each a module that
    runs once; none where that is not so.
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
    takes_positions: bool = True
    own_attention: tuple[OwnAttention, ...] = ()
    mixers: tuple[Mixer, ...] = ()
    recurrent: tuple[RecurrentSpec, ...] = ()
    num_layers: int = 0
    blocks: tuple[nn.Module, ...] = ()


def probe(model: PreTrainedModel) -> ModelSpec:
    """Run one short forward and return what was seen; AttachError lists every reason against the model."""
    name = type(model).__name__
    misplaced = placement_reasons(model)
    if misplaced:  # a forward might not run, or bring weights in from elsewhere
        raise AttachError(name, misplaced)
    device = model.get_input_embeddings().weight.device
    ids = torch.arange(PROBE_LENGTH, device=device).unsqueeze(0)
    config = model.config.get_text_config()
    mixers = find_mixers(model)
    own = find_own_attention(model, position_limit(config)[0])
    seen: list[Recording] = []
    try:
        first = _first_forward(model, own, ids, seen, may_cache=not mixers)
    except Exception as error:
        reasons = [*static_reasons(model), *failure_reasons(error, seen[-1], model), *foreign_layers(model)]
        raise AttachError(name, reasons) from error
    recording, logits = first.recording, first.logits
    reasons = static_reasons(model) + call_reasons(recording, model, bool(mixers))
    if bool(logits.isnan().any()):  # nothing could be compared with them
        reasons.append(
            "; ".join(["its logits are NaN", *weight_doubts(model)]) + ": take another export of its weights"
        )
    if not reasons:
        found = _find_stack(model, own, first, ids)
        if found is None:
            reasons = ["its head cannot be run apart from its layers, on hidden states of the embedding's type"]
    doubts = [*foreign_layers(model), *([] if mixers else unrouted_layers(recording, model))]
    if not reasons:
        assert found is not None
        recurrent, reasons = _recurrent_specs(model, found[0], own, mixers, ids)
    if reasons:
        raise AttachError(name, list(dict.fromkeys([*reasons, *doubts])))
    assert found is not None
    stack, blocks = found
    modules = tuple(c.module for c in recording.calls)
    is_repeated = len(set(modules)) < len(modules)
    takes_positions = not recording.asks_length or "position_ids" in inspect.signature(stack.forward).parameters
    return ModelSpec(
        modules=modules,
        layers=_layers(recording),
        sinks=tuple(c.sinks for c in recording.calls),
        hidden_size=config.hidden_size,
        vocab_size=vocab_size_of(model),
        max_positions=position_limit(config)[0] or 1 << 30,
        stack=stack,
        stack_output=first.outputs[stack],
        doubts=tuple(doubts),
        counts_positions=recording.counts_positions or not takes_positions,
        takes_positions=takes_positions,
        own_attention=own,
        mixers=mixers,
        recurrent=recurrent,
        num_layers=config.num_hidden_layers if mixers or is_repeated else len(recording.calls),
        blocks=blocks,
    )


def _layers(recording: Recording) -> tuple[LayerSpec, ...]:
    """Return the specs of the calls, in their order, with turns of modules that attend several times in a row."""
    layers: list[LayerSpec] = []
    for i, call in enumerate(recording.calls):
        is_again = i > 0 and recording.calls[i - 1].module is call.module
        layers.append(replace(with_reach(call, recording), turn=layers[-1].turn + 1 if is_again else 0))
    return tuple(layers)


@dataclass
class _Forward:
    """A recorded forward: the calls, the output classes of modules with last hidden states, and logits [1, T, V]."""

    recording: Recording
    outputs: dict[nn.Module, Callable[..., Any]]
    logits: torch.Tensor
    has_cache: bool


def _first_forward(
    model: PreTrainedModel, own: Sequence[OwnAttention], ids: torch.Tensor, seen: list[Recording], may_cache: bool
) -> _Forward:
    """Run `model` with a cache, which some need, or else without, since a cache may not know its layers' types, and
    recurrent layers take another way with one. seen: gets a recording of each try."""
    for has_cache in (True, False) if may_cache else (False,):
        recording, outputs = Recording(), dict[nn.Module, Callable[..., Any]]()
        seen.append(recording)
        try:
            with probing(model, recording, own), _recorded_outputs(list(model.modules())[1:], outputs):
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
    return {"past_key_values": PassThroughCache(config=model.config.get_text_config()), "use_cache": True}


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


def _find_stack(
    model: PreTrainedModel, own: Sequence[OwnAttention], first: _Forward, ids: torch.Tensor
) -> tuple[nn.Module, tuple[nn.Module, ...]] | None:
    """Find the innermost module from whose last hidden states the rest of `model` makes the same logits, or None.

    Beside it, return its layers; see `ModelSpec`.

    They are kept in the embedding's type, so a head must round them itself where layers leave more.
    """
    logits, dtype = first.logits, model.get_input_embeddings().weight.dtype
    config = model.config.get_text_config()
    for stack, output in first.outputs.items():
        try:
            with probing(model, Recording(), own):
                with found_layers(stack, config.num_hidden_layers, config.hidden_size) as layers:
                    out = stack(input_ids=ids, **_cache_arguments(model, first.has_cache))
                hidden = out.last_hidden_state.to(dtype)
                with answering(stack, output(last_hidden_state=hidden)):
                    again = model(input_ids=torch.zeros_like(ids), use_cache=False).logits
        except Exception:  # not such a module: try the next
            continue
        atol = 1e-3 * float(logits.abs().max())
        if torch.allclose(again.float(), logits.float(), rtol=1e-3, atol=atol, equal_nan=True):
            return stack, tuple(layers)
    return None


def _recurrent_specs(
    model: PreTrainedModel, stack: nn.Module, own: Sequence[OwnAttention], mixers: Sequence[Mixer], ids: torch.Tensor
) -> tuple[tuple[RecurrentSpec, ...], list[str]]:
    """Return the specs of the recurrent calls of a forward, which number `mixers` in their order, and reasons."""
    if not mixers:
        return (), []
    with probing(model, Recording(), own), mixers_routed(mixers), record_mixers() as recorder:
        stack(input_ids=ids, use_cache=False)
    renumber_mixers(mixers, recorder.order)
    dtype = model.get_input_embeddings().weight.dtype
    shapes = [call.shape for call in recorder.calls]
    others = sorted({str(s.dtype) for s in shapes if isinstance(s, ConvShape) and s.dtype is not dtype})
    reasons = [f"its embedding is {dtype}, but convolutions run in {', '.join(others)}"] if others else []
    return tuple(shape.spec for shape in shapes), reasons
