"""Converts prompts of every accepted form to token ids."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import torch

from specdec.core.ranges import shown

USED = frozenset({"input_ids", "attention_mask"})
IMAGE_PARTS = ("image", "image_url")  # types of a message's parts
WHOLE = frozenset({torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64})


def prompts_to_ids(prompts: Any, tokenizer: Any, attention_mask: Any = None, name: str = "prompt") -> list[list[int]]:
    """Return token ids of one prompt or a batch; name: of one, in errors.

    prompts: a string; chat messages (a list of {"role", "content"}, rendered with the chat template and its generation
    prompt; content: text, or a list of parts {"type": "text", "text"}); a list of ints; a tensor or NumPy array of
    integers, [T] or [bs, T], with an optional attention mask of the same shape; a mapping with input_ids and no other
    key than attention_mask (what a tokenizer returns); or a list of any of the first three, or of arrays [T].
    ValueError for the rest; `engine.prompts` reads those with images.
    """
    if isinstance(prompts, Mapping) and "input_ids" in prompts:
        _refuse_unused(prompts)
        attention_mask = attention_mask if attention_mask is not None else prompts.get("attention_mask")
        prompts = prompts["input_ids"]
    prompts = _listed(prompts)
    if isinstance(prompts, str) or _is_ints(prompts) or is_chat(prompts):
        prompts, attention_mask = [prompts], None if attention_mask is None else [attention_mask]
    _refuse_bytes(f"{name}s", prompts)
    if not isinstance(prompts, Sequence) or not prompts:
        raise ValueError(
            f"{name}s={shown(prompts)}: expected a string, chat messages, token ids, a tensor, or a non-empty list of "
            "them"
        )
    if attention_mask is not None and any(isinstance(p, str) or is_chat(p) for p in prompts):
        raise ValueError("attention_mask: only valid with input_ids (a tensor or lists of ints), not with text")
    rows = [one_prompt(p, f"{name} {i}", tokenizer) for i, p in enumerate(prompts)]
    return rows if attention_mask is None else _masked(rows, attention_mask)


def one_prompt(prompt: Any, name: str, tokenizer: Any) -> list[int]:
    """Return token ids of one prompt, which errors call `name`."""
    _refuse_bytes(name, prompt)
    if isinstance(prompt, torch.Tensor | np.ndarray):
        rows = _listed(prompt)
        if prompt.ndim == 2 and len(rows) != 1:
            raise ValueError(f"{name} is a tensor of {len(rows)} rows: expected one; give the tensor by itself")
        return rows[0] if prompt.ndim == 2 else rows
    if (kinds := _kinds_of_ints(prompt)) or prompt == []:
        return list(prompt if kinds <= {int} else map(int, prompt))
    if isinstance(prompt, str) or is_chat(prompt):
        if tokenizer is None:
            raise ValueError(f"{name} is text, but the engine has no tokenizer; attach(..., tokenizer=...)")
        if isinstance(prompt, str):
            return tokenizer(check_text(name, prompt))["input_ids"]
        return ids_of_chat(prompt, tokenizer, f"{name}: ")
    if isinstance(prompt, Sequence):
        at, wrong = next((i, token) for i, token in enumerate(prompt) if not _is_ints([token]))
        raise ValueError(f"{name}: item {at} is {shown(wrong)}: expected token ids (integers)")
    raise ValueError(f"{name} is {shown(prompt)}: expected a string, chat messages or a list of token ids")


def ids_of_chat(messages: Any, tokenizer: Any, name: str = "") -> list[int]:
    """Return token ids of a chat, with the generation prompt. name: what a message of an error begins with."""
    plain = [_plain(f"{name}messages[{i}]", message) for i, message in enumerate(messages)]
    text = render_chat(plain, tokenizer)
    asked = next((m["content"].strip() for m in reversed(plain) if m["role"] == "user" and m.get("content")), "")
    if asked not in text:
        with suppress(ValueError):  # templates of image-text models may write parts only, and nothing of strings
            parts = [{**m, "content": [{"type": "text", "text": m.get("content") or ""}]} for m in plain]
            in_parts, of_none = (render_chat(m, tokenizer) for m in (parts, [{**m, "content": ""} for m in plain]))
            text = in_parts if asked in in_parts and text == of_none else text
    return encode(tokenizer, text)


def render_chat(messages: Any, tokenizer: Any, **options: Any) -> str:
    """Return the chat template's text of `messages`, up to where the answer begins. options: those of the template."""
    try:
        return tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False, **options)
    except Exception as error:  # a template raises what it likes
        raise ValueError(f"messages: the chat template refuses them: {str(error) or type(error).__name__}") from error


def text_of(name: str, content: Any) -> str:
    """Return the content of a message, its text parts joined; ValueError for images and whatever else is no text."""
    if not isinstance(content, list | tuple):
        return check_text(name, content)
    return "".join(_text_of_part(f"{name}[{i}]", part) for i, part in enumerate(content))


def _text_of_part(name: str, part: Any) -> str:
    kind = part.get("type") if isinstance(part, Mapping) else part
    if kind != "text":
        hint = "; images need attach(tokenizer=processor)" if kind in IMAGE_PARTS else ""
        raise ValueError(f"{name}.type={shown(kind)}: only parts of type 'text' are read{hint}")
    other = next((key for key in part if key not in ("type", "text") and part[key] is not None), None)
    if other is not None:
        raise ValueError(f"{name}.{shown(other)[1:-1]}={shown(part[other])}: only the text of a part is read")
    return check_text(f"{name}.text", part.get("text"))


def check_text(name: str, text: Any) -> str:
    """Return `text`; ValueError for what no tokenizer reads: other types, and half a surrogate pair."""
    if not isinstance(text, str):
        raise ValueError(f"{name}={shown(text)}: expected a string")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{name}={shown(text)}: {error.reason} at character {error.start}") from None
    return text


def _plain(name: str, message: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a message as chat templates take it, with one string as its content; none beside calls of tools."""
    if not isinstance(message.get("role"), str):
        raise ValueError(f"{name}.role={shown(message.get('role'))}: expected a string, such as 'user'")
    if message.get("content") is None and message.get("tool_calls"):
        return message
    return {**message, "content": text_of(f"{name}.content", message.get("content"))}


def _refuse_unused(inputs: Mapping[str, Any]) -> None:
    """Raise ValueError for inputs that the text would not depend on, such as images, where the model's would."""
    unused = sorted(name for name in inputs if name not in USED and inputs[name] is not None)
    if unused:
        raise ValueError(
            f"{', '.join(unused)}: the engine reads only text, as input_ids and attention_mask; leave the rest out, "
            "or call model.generate for it"
        )


def encode(tokenizer: Any, text: str) -> list[int]:
    """Return the ids of rendered text, which contains its own special tokens."""
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def _refuse_bytes(name: str, value: Any) -> None:
    if isinstance(value, bytes | bytearray | memoryview):
        raise ValueError(
            f"{name} is {type(value).__name__}: expected text or token ids; decode it with .decode('utf-8')"
        )


def _listed(ids: Any) -> Any:
    """Return a tensor or array of integers, [T] or [bs, T], as lists, and anything else as it is."""
    if not isinstance(ids, torch.Tensor | np.ndarray):
        return ids
    is_whole = ids.dtype.kind in "iu" if isinstance(ids, np.ndarray) else ids.dtype in WHOLE
    if not is_whole or ids.ndim not in (1, 2):
        raise ValueError(f"input_ids of shape {tuple(ids.shape)} and dtype {ids.dtype}: expected [bs, T] integers")
    return ids.tolist()


def _masked(rows: Sequence[list[int]], mask: Any) -> list[list[int]]:
    """Keep the ids whose mask is set, in rows that may be ragged (what a tokenizer returns without padding)."""
    by_row = mask if isinstance(mask, Sequence | torch.Tensor | np.ndarray) else [mask]
    try:
        keeps = [torch.as_tensor(keep).reshape(-1).tolist() for keep in by_row]
    except (TypeError, ValueError, RuntimeError):
        raise ValueError(f"attention_mask={shown(mask)}: expected 0 and 1 in the shape of input_ids") from None
    lengths, wanted = [len(keep) for keep in keeps], [len(row) for row in rows]
    if lengths != wanted:
        raise ValueError(f"attention_mask has rows of {lengths} values, input_ids of {wanted}")
    return [[t for t, k in zip(row, keep, strict=True) if k] for row, keep in zip(rows, keeps, strict=True)]


def _is_ints(value: Any) -> bool:
    return bool(_kinds_of_ints(value))


def _kinds_of_ints(value: Any) -> set[type]:
    """Return the types in a list of integers; none for anything else."""
    if not isinstance(value, Sequence) or isinstance(value, str | bytes | bytearray | memoryview):
        return set()
    kinds = set(map(type, value))
    return kinds if all(issubclass(kind, int | np.integer) and kind is not bool for kind in kinds) else set()


def is_chat(value: Any) -> bool:
    """Return whether `value` are messages; what is missing in one, `_plain` says."""
    if not isinstance(value, Sequence) or not value or not all(isinstance(message, Mapping) for message in value):
        return False
    return any("role" in message or "content" in message for message in value)
