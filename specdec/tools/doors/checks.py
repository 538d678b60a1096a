"""Checks the arguments of `model.generate` besides its settings: ValueError names those an engine does not support."""

from collections.abc import Iterator
from typing import Any

import torch
from transformers.cache_utils import CacheLayerMixin

from specdec.core.engine.generation import Settings
from specdec.core.engine.request import Request

# Arguments of a model's forward that transformers adds to every call, or that have no effect here.
CACHES = ("cache", "past_key_values", "cache_params")  # names of caches: the last two before transformers 5.24
FORWARD_ARGUMENTS = frozenset({"attention_mask", "position_ids", *CACHES, "use_cache", "logits_to_keep"})
COUNTS_PADDING = {"repetition_penalty": 1.0, "no_repeat_ngram_size": 0}


def check_forward_arguments(model_kwargs: dict[str, Any], images: Any) -> dict[str, Any]:
    """Return the inputs of prompts with images other than ids; ValueError for arguments that the engine cannot pass
    on."""
    given = {name: value for name, value in model_kwargs.items() if value is not None and name not in FORWARD_ARGUMENTS}
    for name in given:
        if name not in images.names:
            raise ValueError(f"{name} is an argument of the model that the engine does not pass on")
    for name in CACHES:
        if _holds_tokens(model_kwargs.get(name)):
            raise ValueError(f"{name} holds tokens: the engine has a cache of its own; give the whole prompt")
    mask, positions = model_kwargs.get("attention_mask"), model_kwargs.get("position_ids")
    if mask is not None and mask.dim() != 2:
        raise ValueError(f"attention_mask has {mask.dim()} dimensions: expected [batch, tokens]")
    if positions is not None and positions.dim() == 3 and images.moves_positions:
        return given  # see `check_rotary`
    if positions is not None and mask is not None:
        counted = mask.long().cumsum(-1) - 1
        if positions.shape != counted.shape or not torch.equal(positions[mask.bool()], counted[mask.bool()]):
            raise ValueError("position_ids: the engine counts from 0 along the mask; leave them out")
    return given


def check_rotary(requests: list[Request], mask: torch.Tensor, positions: torch.Tensor | None) -> None:
    """Raise ValueError for several positions per token, [n, B, T], that differ from those of text without an image."""
    if positions is None or positions.dim() != 3:
        return
    for row, request in enumerate(requests):
        given = positions[-3:, row, mask[row].bool()]
        own = torch.arange(given.shape[1], device=given.device).expand_as(given)
        if request.embedded is not None and request.embedded.positions is not None:
            own = request.embedded.positions[-3:]
        if not torch.equal(given, own):
            raise ValueError("position_ids: the engine has the model compute them; leave them out")


def _holds_tokens(cache: Any) -> bool:
    """Return whether a cache of transformers holds any tokens; recurrent layers count no tokens, but have a state."""
    if cache is None:
        return False
    layers = getattr(cache, "layers", ())
    if not layers or any(isinstance(layer, CacheLayerMixin) for layer in layers):
        return bool(cache.get_seq_length() > 0)
    return bool(cache.has_previous_state())


def check_processors(
    model: Any, input_ids: torch.Tensor, processors: Any, config: Any, model_kwargs: dict[str, Any]
) -> None:
    """Refuse processors that are not in the config: they run in Python, token by token."""
    expected = model._get_logits_processor(
        generation_config=config,
        input_ids_seq_length=input_ids.shape[1],
        encoder_input_ids=input_ids,
        device=input_ids.device,
        model_kwargs=model_kwargs,
    )
    own = [_describe(p) for p in expected]
    for processor in processors:
        if _describe(processor) not in own:
            raise ValueError(
                f"logits_processor {type(processor).__name__}: it runs in Python, a token at a time; express it with "
                "settings such as repetition_penalty, bad_words_ids, sequence_bias, or attach(...) and SamplingParams"
            )


def _describe(processor: Any) -> tuple[str, str]:
    """Return type and values of a processor, for comparison."""
    return type(processor).__qualname__, repr(sorted(_plain(vars(processor))))


def _plain(values: dict[str, Any]) -> Iterator[tuple[str, str]]:
    for name, value in values.items():
        yield name, repr(value.tolist() if isinstance(value, torch.Tensor) else value)


def refuse_counted_padding(settings: Settings) -> None:
    """Raise ValueError for settings that count tokens before a padded prompt, since the engine does not see padding."""
    for name, off in COUNTS_PADDING.items():
        if settings.get(name) not in (None, off):
            raise ValueError(
                f"{name}={settings.get(name)} with padded prompts: transformers counts padding as text, the engine "
                "does not; give prompts one by one or of equal length"
            )
