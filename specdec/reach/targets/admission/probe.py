"""The first half of admission: one forward of the live model with a recording attention function.

It records every attention call (module, shapes, scaling, window, softcap, sinks) and every mask that HF would have
built, classified by evaluating HF's own mask closure far out. Calls that cannot be run, or would differ only far into a
text, are reasons against the model; merely unknown ones are doubts, about which `equality`, the second half, decides.
No model is known by name.
"""

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, TypeVar

import torch
from torch import nn
from transformers import PreTrainedModel

from specdec.backends import LayerSpec
from specdec.backends.recurrent import recurrent_scope
from specdec.backends.recurrent.state_pool import ConvSpec, RecurrentSpec
from specdec.core.errors import AttachError
from specdec.reach.checkpoints.fitting import weight_doubts
from specdec.reach.targets.adapters import ADAPTERS, Adapter, Attention, Mixers
from specdec.reach.targets.admission.placement import placement_reasons
from specdec.reach.targets.admission.quantised import pack
from specdec.reach.targets.admission.reasons import (
    call_reasons,
    encoder_reasons,
    failure_reasons,
    foreign_layers,
    ignored_softcaps,
    static_reasons,
    unrouted_layers,
    with_reach,
)
from specdec.reach.targets.admission.recording import CACHE, PassThroughCache, Recorder, Recording, probing
from specdec.reach.targets.exclusive import answering
from specdec.reach.targets.shape import position_limit, vocab_size_of
from specdec.reach.targets.taps import found_layers

PROBE_LENGTH = 12


A = TypeVar("A")


@dataclass(frozen=True)
class ModelSpec:
    """Facts for the attach layer: attention modules in call order, their specs and sinks, and widths.

    stack: the module from ids to last hidden states, everything but the head; stack_output: the class of its output.
    adapters: route its parts, one of each kind. doubts: possible causes of logits that differ from the model's own.
    counts_positions: layers ask the cache how many tokens it holds, and count positions from there instead of reading
    them; takes_positions: the stack has an argument for positions. recurrent: specs of recurrent calls, by layer id.
    blocks: the layers in their order, each a module that runs once; empty if that is not so. num_ids: tokens that can
    be read and scored: an output head may have more rows than the embedding.
    """

    modules: tuple[nn.Module, ...]
    layers: tuple[LayerSpec, ...]
    sinks: tuple[torch.Tensor | None, ...]
    hidden_size: int
    vocab_size: int
    num_ids: int
    max_positions: int
    stack: nn.Module
    stack_output: Callable[..., Any]
    adapters: tuple[Adapter, ...]
    doubts: tuple[str, ...] = ()
    counts_positions: bool = False
    takes_positions: bool = True
    recurrent: tuple[RecurrentSpec, ...] = ()
    blocks: tuple[nn.Module, ...] = ()

    def adapter(self, kind: type[A]) -> A:
        return _of_kind(self.adapters, kind)

    @cached_property
    def attending(self) -> frozenset[nn.Module]:
        """The modules that attend or are recurrent."""
        return frozenset([*self.modules, *(mixer.module for mixer in self.adapter(Mixers).mixers)])


def _of_kind(adapters: Sequence[Adapter], kind: type[A]) -> A:
    return next(adapter for adapter in adapters if isinstance(adapter, kind))


def probe(model: PreTrainedModel, keeps_latents: bool = True) -> ModelSpec:
    """Run one short forward and return the facts seen; AttachError lists every reason against the model.

    keeps_latents: run attention over latents as such; else its layers expand them to keys and values of each head.
    """
    name = type(model).__name__
    early = encoder_reasons(model) or placement_reasons(model)
    if early:  # a forward might fail, or load weights from elsewhere
        raise AttachError(name, early)
    pack(model)
    embedded = model.get_input_embeddings().weight
    device = embedded.device
    ids = torch.arange(PROBE_LENGTH, device=device).unsqueeze(0)
    config = model.config.get_text_config()
    adapters = tuple(kind(model) for kind in ADAPTERS)
    attention, mixers = _of_kind(adapters, Attention), _of_kind(adapters, Mixers)
    if not keeps_latents:
        attention.expansions = {}  # modules expand latents to keys and values of each head themselves
    is_recurrent = bool(mixers.mixers)
    seen: list[Recording] = []
    try:
        first = _first_forward(model, attention, ids, seen, may_cache=not is_recurrent)
    except Exception as error:
        reasons = [*static_reasons(model), *failure_reasons(error, seen[-1], model), *foreign_layers(model)]
        raise AttachError(name, reasons) from error
    recording = first.recording
    reasons = static_reasons(model) + call_reasons(recording, model, is_recurrent)
    if bool(first.logits.isnan().any()):  # nothing could be compared with them
        reasons.append("; ".join(["its logits are NaN", *weight_doubts(model)]) + ": use another export of its weights")
    found, recurrent = None, tuple[RecurrentSpec, ...]()
    if not reasons:
        found = _find_stack(model, attention, first, ids)
        if found is None:
            reasons = ["its head cannot be run apart from its layers, on hidden states of the embedding's type"]
        elif is_recurrent:
            recurrent, reasons = _recurrent_specs(model, found[0], attention, mixers, ids)
    doubts = [*foreign_layers(model), *([] if is_recurrent else unrouted_layers(recording, model))]
    doubts += ignored_softcaps(recording, model)
    if found is None or reasons:
        raise AttachError(name, list(dict.fromkeys([*reasons, *doubts])))
    stack, blocks = found
    modules = tuple(c.module for c in recording.calls)
    takes_positions = not recording.asks_length or "position_ids" in inspect.signature(stack.forward).parameters
    return ModelSpec(
        modules=modules,
        layers=_layers(recording),
        sinks=tuple(c.sinks for c in recording.calls),
        hidden_size=config.hidden_size,
        vocab_size=vocab_size_of(model),
        num_ids=min(vocab_size_of(model), embedded.shape[0]),
        max_positions=position_limit(config)[0] or 1 << 30,
        stack=stack,
        stack_output=first.outputs[stack],
        adapters=adapters,
        doubts=tuple(doubts),
        counts_positions=recording.counts_positions or not takes_positions,
        takes_positions=takes_positions,
        recurrent=recurrent,
        blocks=blocks,
    )


def _layers(recording: Recording) -> tuple[LayerSpec, ...]:
    """Return the specs of the calls, in order, with turns of modules that attend several times in a row."""
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
    model: PreTrainedModel, attention: Attention, ids: torch.Tensor, seen: list[Recording], may_cache: bool
) -> _Forward:
    """Run `model` with a cache, which some models need; if that fails, without, since a cache may not know its layers'
    types. Without `may_cache`, only without: recurrent layers compute differently with a cache. seen: gets a recording
    of each attempt."""
    for has_cache in (True, False) if may_cache else (False,):
        recording, outputs = Recording(), dict[nn.Module, Callable[..., Any]]()
        seen.append(recording)
        try:
            with probing(attention, recording), _recorded_outputs(list(model.modules())[1:], outputs):
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
    return {CACHE: PassThroughCache(config=model.config.get_text_config()), "use_cache": True}


@contextmanager
def _recorded_outputs(modules: Sequence[nn.Module], outputs: dict[nn.Module, Callable[..., Any]]) -> Iterator[None]:
    """Record the output class of each of `modules` in `outputs` within the context, the innermost first; modules
    without last hidden states are left out."""

    def record(module: nn.Module, args: Any, output: Any) -> None:
        if isinstance(getattr(output, "last_hidden_state", None), torch.Tensor):
            outputs[module] = type(output)

    with ExitStack() as hooks:
        for module in modules:
            hooks.enter_context(module.register_forward_hook(record))
        yield


def _find_stack(
    model: PreTrainedModel, attention: Attention, first: _Forward, ids: torch.Tensor
) -> tuple[nn.Module, tuple[nn.Module, ...]] | None:
    """Find the innermost module from whose last hidden states the rest of `model` computes the same logits, and its
    layers (see `ModelSpec`); None if there is none.

    They are kept in the embedding's type, so a head must round them itself where layers leave more.
    """
    logits, dtype = first.logits, model.get_input_embeddings().weight.dtype
    config = model.config.get_text_config()
    for stack, output in first.outputs.items():
        try:
            with probing(attention, Recording()):
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
    model: PreTrainedModel, stack: nn.Module, attention: Attention, mixers: Mixers, ids: torch.Tensor
) -> tuple[tuple[RecurrentSpec, ...], list[str]]:
    """Return the specs of the recurrent calls of a forward, which number `mixers` in their order, and reasons."""
    recorder = Recorder()
    with probing(attention, Recording()), mixers.routed(), recurrent_scope(recorder):
        stack(input_ids=ids, use_cache=False)
    mixers.renumber([call.layer_id for call in recorder.calls])
    dtype = model.get_input_embeddings().weight.dtype
    others = sorted({str(c.dtype) for c in recorder.calls if isinstance(c.spec, ConvSpec) and c.dtype is not dtype})
    reasons = [f"its embedding is {dtype}, but convolutions run in {', '.join(others)}"] if others else []
    return tuple(call.spec for call in recorder.calls), reasons
