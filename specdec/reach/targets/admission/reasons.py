"""Reasons against attaching a model, from a recorded forward, and doubts, which may explain one."""

from dataclasses import replace

import torch
from torch import nn
from transformers import PreTrainedModel

from specdec.backends import LayerSpec
from specdec.reach.targets.adapters.ropes import varying_ropes
from specdec.reach.targets.admission.masks import Reach
from specdec.reach.targets.admission.recording import RecordedCall, Recording
from specdec.reach.targets.shape import rope_limit

# Known layer types. Others are not a reason against a model, but may explain one.
KNOWN_LAYER_TYPES = frozenset({"full_attention", "sliding_attention", "chunked_attention", "linear_attention", "conv"})


def encoder_reasons(model: PreTrainedModel) -> list[str]:
    """Return a reason against models that encode a text, or sound."""
    if not getattr(model.config, "is_encoder_decoder", False):
        return []
    return [
        "it is an encoder-decoder: its decoder also attends to what the encoder made of the input (cross attention), "
        "for which the engine has no K/V; expected a decoder-only causal LM"
    ]


def static_reasons(model: PreTrainedModel) -> list[str]:
    """Return reasons that need no forward."""
    config = model.config.get_text_config()
    reasons = []
    rope = rope_limit(config)
    if rope is not None and not varying_ropes(model):
        reasons.append(f"rope type {rope[1]!r}: rotary frequencies depend on the longest sequence of the batch")
    if model.training:
        reasons.append("the model is in training mode; call model.eval() first")
    dropping = [name for name, m in model.named_modules() if isinstance(m, nn.Dropout) and m.training and m.p]
    if dropping and not model.training:
        reasons.append(f"{dropping[0]} is in training mode ({len(dropping)} dropouts); call model.eval() first")
    tensors = (*model.named_parameters(), *model.named_buffers())
    if found := [name for name, tensor in tensors if tensor.is_inference()]:
        reasons.append(
            f"{', '.join(found[:3])} were made within torch.inference_mode() ({len(found)} tensors), so "
            "changes to them cannot be detected: load the model, and move it, outside of it, or within torch.no_grad()"
        )
    if model.get_output_embeddings() is None:
        reasons.append("the model has no output head; expected a causal LM")
    return reasons


def failure_reasons(error: Exception, recording: Recording, model: PreTrainedModel) -> list[str]:
    """Return the reasons why the probe's forward failed with `error`, after what was recorded."""
    firsts: dict[torch.dtype, str] = {}
    for name, parameter in model.named_parameters():
        firsts.setdefault(parameter.dtype, name)
    if "dtype" in str(error) and len(firsts) > 1:
        found = ", ".join(f"{dtype} ({name})" for dtype, name in firsts.items())
        return [
            f"its parameters have several dtypes, which its forward cannot compute with: {found}; expected one: "
            f"model.to({model.get_input_embeddings().weight.dtype}), or load it with dtype=... ({error})"
        ]
    if not (model.config.return_dict and model.config.get_text_config().return_dict):
        return ["its config has return_dict=False, so its modules return tuples: set model.config.return_dict = True"]
    if recording.masks and not recording.calls:  # recorded masks are stand-ins, and cannot be computed with
        return [f"its layers compute with masks themselves, so their attention cannot be routed ({error})"]
    return [f"the probe forward failed: {error}"]


def call_reasons(recording: Recording, model: PreTrainedModel, is_recurrent: bool) -> list[str]:
    """Return the reasons found in a recording."""
    calls = recording.calls
    if not calls and not is_recurrent:
        return [
            "its attention does not go through AttentionInterface, nor through a known kind of method, so it "
            "cannot be routed"
        ]
    dtype = model.get_input_embeddings().weight.dtype
    if recording.autocast not in (None, dtype):
        return [
            f"its forward runs in torch.autocast(dtype={recording.autocast}), as Accelerate's mixed precision does, "
            f"and its weights are {dtype}: an engine runs the model in the dtype of its weights. Convert the model "
            f"before attach(): model.to({recording.autocast}), or prepare it without mixed precision"
        ]
    reasons = [p for c in calls for p in c.problems]
    others = sorted({str(c.dtype) for c in calls if c.dtype is not dtype})
    if others:
        reasons.append(
            f"its embedding is {dtype}, but attention runs in {', '.join(others)}: pools and heads need one type; load "
            "the model with from_pretrained(..., dtype=...) or convert the embedding"
        )
    used = {c.mask_id for c in calls if c.mask_id is not None}
    reasons += [f"a layer uses {recording.masks[i]}" for i in used if isinstance(recording.masks[i], str)]
    return reasons


def foreign_layers(model: PreTrainedModel) -> list[str]:
    """Return a doubt about layers whose type in the config is not known."""
    foreign = sorted(set(getattr(model.config.get_text_config(), "layer_types", None) or []) - KNOWN_LAYER_TYPES)
    return [f"layer types {foreign}: unknown kinds of layers"] if foreign else []


def unrouted_layers(recording: Recording, model: PreTrainedModel) -> list[str]:
    """Return a doubt about layers that made no attention call, or several."""
    num_calls, num_layers = len(recording.calls), model.config.get_text_config().num_hidden_layers
    if num_calls in (0, num_layers):
        return []
    return [f"{num_calls} attention calls for {num_layers} layers (layers without routed attention)"]


def ignored_softcaps(recording: Recording, model: PreTrainedModel) -> list[str]:
    """Return a doubt about softcaps that we apply and the model's own attention does not."""
    own = model.config.get_text_config()._attn_implementation
    if own != "sdpa" or all(call.spec.softcap is None for call in recording.calls):
        return []
    return ["its own attention, sdpa, leaves out the softcap: load the model with attn_implementation='eager'"]


def with_reach(call: RecordedCall, recording: Recording) -> LayerSpec:
    """Return the layer's spec with the reach of its mask; without a mask, the window of the keyword argument."""
    if call.mask_id is None:
        return call.spec
    reach = recording.masks[call.mask_id]
    assert isinstance(reach, Reach)
    windows = [w for w in (reach.window, call.own_window) if w is not None]
    return replace(call.spec, window=min(windows, default=None), chunk=reach.chunk)
