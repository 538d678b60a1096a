"""Reads the prompts of a call, with or without images: token ids, and the inputs of the model's image encoder.

Only the model reads pixels, and only its processor loads images.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

from specdec.core.batch import on_device
from specdec.core.engine.core import Core
from specdec.core.engine.request import Request
from specdec.core.ranges import shown
from specdec.core.text.inputs import IMAGE_PARTS, USED, is_chat, one_prompt, prompts_to_ids, text_of


class Prompts(NamedTuple):
    """Token ids of every prompt, and image inputs, each with the indices of its prompts (its rows, once or more)."""

    ids: list[list[int]]
    images: list[tuple[list[int], Mapping[str, Any]]]


def read_prompts(
    names: Collection[str], tokenizer: Any, processor: Any, prompts: Any, attention_mask: Any, given: Mapping[str, Any]
) -> Prompts:
    """Read what `prompts_to_ids` does, and prompts with images: a mapping with input_ids and inputs of the model (what
    a processor returns), a chat with image parts, or a list of these and of others.

    names: inputs that the model takes beside ids; given: those of the call. processor: of chats, or None.
    """
    given = {name: value for name, value in given.items() if value is not None}
    if given:
        if isinstance(prompts, str | Mapping) or is_chat(prompts):
            raise ValueError(f"{', '.join(sorted(given))}: only valid with input_ids, a tensor [B, T], not with text")
        prompts = {"input_ids": prompts, **given}
    several = prompts if isinstance(prompts, list | tuple) and not is_chat(prompts) else [prompts]
    if not any(_is_mapping(p) or (processor is not None and is_chat(p)) for p in several):
        return Prompts(prompts_to_ids(prompts, tokenizer, attention_mask), [])
    if attention_mask is not None:
        if not _is_mapping(prompts):
            raise ValueError(
                "attention_mask: only valid with input_ids (a tensor or lists of ints), not with chats and images"
            )
        several = [{**prompts, "attention_mask": attention_mask}]
    found, read = Prompts([], []), dict[int, Prompts]()
    for i, prompt in enumerate(several):
        if id(prompt) not in read:  # what comes again is read once
            read[id(prompt)] = _read(names, tokenizer, processor, prompt, f"prompt {i}")
            found.images.extend(read[id(prompt)].images)
        own = read[id(prompt)]
        for places, _ in own.images:
            places.extend(range(len(found.ids), len(found.ids) + len(own.ids)))
        found.ids.extend(own.ids)
    return found


def _read(names: Collection[str], tokenizer: Any, processor: Any, prompt: Any, name: str) -> Prompts:
    """Read one prompt, or the rows of a mapping."""
    if processor is not None and is_chat(prompt):
        prompt = inputs_of_chat(prompt, processor, f"{name}: ")
    if not _is_mapping(prompt):
        return Prompts([one_prompt(prompt, name, tokenizer)], [])
    others = {key: value for key, value in prompt.items() if key not in USED and value is not None}
    unknown = sorted(others.keys() - set(names))
    if names and unknown:
        raise ValueError(f"{', '.join(unknown)}: the model takes no such inputs beside input_ids; leave them out")
    if unknown:
        others = {}  # refused with the ids
    ids = prompts_to_ids({key: value for key, value in prompt.items() if key not in others}, tokenizer)
    # Inputs of a number a token are types of tokens: zeros are text.
    shape = getattr(prompt["input_ids"], "shape", None)
    has_images = any(getattr(v, "shape", ()) != shape or bool(v.any()) for v in others.values())
    return Prompts(ids, [([], prompt)] if has_images else [])


def inputs_of_chat(messages: Any, processor: Any, name: str = "", **options: Any) -> Mapping[str, Any]:
    """Apply the chat template of `processor` with the generation prompt: input_ids [1, T] and inputs of its images.

    Parts of messages: {"type": "text", "text"}, {"type": "image", "image"} (a PIL image) or another form of an image
    that the processor loads. name: begins error messages. options: of the template. ValueError if the processor fails.
    """
    given = [as_parts(f"{name}messages[{i}]", message) for i, message in enumerate(messages)]
    has_images = any(part["type"] != "text" for message in given for part in message["content"])
    try:
        inputs = processor.apply_chat_template(
            given, add_generation_prompt=True, tokenize=True, return_dict=True, return_tensors="pt", **options
        )
    except Exception as error:  # templates and image decoders raise exceptions of any type
        raise ValueError(f"{name}messages: the processor refuses them: {str(error) or type(error).__name__}") from error
    return inputs if has_images else {key: inputs[key] for key in USED}


def as_parts(name: str, message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message with its content as a list of parts, as chat templates of processors take it."""
    if not isinstance(message.get("role"), str):
        raise ValueError(f"{name}.role={shown(message.get('role'))}: expected a string, such as 'user'")
    content = message.get("content")
    if content is None and message.get("tool_calls"):
        content = []
    parts = content if isinstance(content, list | tuple) else [{"type": "text", "text": content}]
    for i, part in enumerate(parts):
        if not isinstance(part, Mapping) or part.get("type") not in IMAGE_PARTS:
            text_of(f"{name}.content", [*[{"type": "text", "text": ""}] * i, part])
    return {**message, "content": [dict(part) for part in parts]}


def embed_prompts(core: Core, requests: Sequence[Request], inputs: Mapping[str, Any]) -> None:
    """Set the embeddings of `requests` from image `inputs`, whose rows they are, once or more. ValueError for images
    that this engine cannot serve."""
    if core.target.group:
        raise ValueError("images: not supported with a sharded model; attach it whole, or call model.generate")
    if core.config.strict:
        raise ValueError("images: their prefills run eagerly, which strict=True refuses; leave strict out")
    with core.turns, on_device(core.device):
        rows = core.target.images.embed(inputs, core.slot_tables.keeps_prefixes)
    for i, request in enumerate(requests):
        own = rows[i % len(rows)]
        if own is not None and own.limits is not None and not core.context.backend.capabilities.limits:
            raise ValueError(
                f"images: their tokens attend to each other, which backend={core.context.backend.name!r} cannot do; "
                "attach with backend='triton'"
            )
        most = core.config.max_prefill_tokens
        if own is not None and own.most_seen_ahead > most:
            raise ValueError(
                f"images: {own.most_seen_ahead} tokens attend to each other and exceed max_prefill_tokens={most}; "
                "attach with a larger one"
            )
        request.embedded = own


def _is_mapping(prompt: Any) -> bool:
    return isinstance(prompt, Mapping) and "input_ids" in prompt
