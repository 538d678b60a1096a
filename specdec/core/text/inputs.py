"""Converts prompts of every accepted form to token ids."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from specdec.core.ranges import shown

USED = frozenset({"input_ids", "attention_mask"})


def prompts_to_ids(prompts: Any, tokenizer: Any, attention_mask: Any = None) -> list[list[int]]:
    """Return token ids of one prompt or a batch.

    prompts: a string; chat messages (a list of {"role", "content"}, rendered with the chat template and its generation
    prompt; content: text, or a list of parts {"type": "text", "text"}); a list of ints; a tensor or NumPy array of
    integers, [T] or [bs, T], with an optional attention mask of the same shape; a mapping with input_ids and no other
    key than attention_mask (what a tokenizer returns); or a list of any of the first three, or of arrays [T].
    ValueError for the rest, such as images.
    """
    prompts = _from_numpy(prompts)
    if isinstance(prompts, Mapping) and "input_ids" in prompts:
        _refuse_unused(prompts)
        mask = attention_mask if attention_mask is not None else prompts.get("attention_mask")
        return prompts_to_ids(prompts["input_ids"], tokenizer, mask)
    if isinstance(prompts, torch.Tensor):
        return _tensor_to_ids(prompts, attention_mask)
    if attention_mask is not None and _is_ints(prompts):
        return _masked_rows([prompts], [attention_mask])
    if attention_mask is not None and _is_rows_of_ints(prompts):
        return _masked_rows(prompts, attention_mask)
    if attention_mask is not None:
        raise ValueError("attention_mask goes with input_ids (a tensor or lists of ints), not with text")
    if _is_ints(prompts):
        return [_as_ints(prompts)]
    if isinstance(prompts, str) or _is_chat(prompts):
        prompts = [prompts]
    _refuse_bytes("prompts", prompts)
    if not isinstance(prompts, Sequence) or not prompts:
        raise ValueError(
            f"prompts={shown(prompts)}: expected a string, chat messages, token ids, a tensor, or a non-empty list of "
            "them"
        )
    return [_one(p, f"prompt {i}", tokenizer) for i, p in enumerate(prompts)]


def _one(prompt: Any, name: str, tokenizer: Any) -> list[int]:
    _refuse_bytes(name, prompt)
    if isinstance(prompt, torch.Tensor):
        rows = _tensor_to_ids(prompt, None)
        if len(rows) != 1:
            raise ValueError(f"{name} is a tensor of {len(rows)} rows: expected one; give the tensor by itself")
        return rows[0]
    if _is_ints(prompt) or prompt == []:
        return _as_ints(prompt)
    if isinstance(prompt, str) or _is_chat(prompt):
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
    return encode(tokenizer, render_chat(plain, tokenizer))


def render_chat(messages: Any, tokenizer: Any, **options: Any) -> str:
    """Return the chat template's text of `messages`, up to where the answer begins. options: those of the template."""
    try:
        return tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False, **options)
    except Exception as error:  # a template raises what it likes
        raise ValueError(f"messages: the chat template refuses them: {error}") from error


def text_of(name: str, content: Any) -> str:
    """Return the content of a message, its text parts joined; ValueError for images and whatever else is no text."""
    if not isinstance(content, list | tuple):
        return check_text(name, content)
    return "".join(_text_of_part(f"{name}[{i}]", part) for i, part in enumerate(content))


def _text_of_part(name: str, part: Any) -> str:
    kind = part.get("type") if isinstance(part, Mapping) else part
    if kind != "text":
        raise ValueError(f"{name}.type={shown(kind)}: only parts of type 'text' are read")
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
            f"{', '.join(unused)}: the engine reads text alone, by input_ids and attention_mask; leave the rest out, "
            "or call model.generate for it"
        )


def encode(tokenizer: Any, text: str) -> list[int]:
    """Return the ids of rendered text, which contains its own special tokens."""
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def _refuse_bytes(name: str, value: Any) -> None:
    if isinstance(value, bytes | bytearray | memoryview):
        raise ValueError(f"{name} is {type(value).__name__}: expected text or token ids; decode it, .decode('utf-8')")


def _from_numpy(prompts: Any) -> Any:
    """Return `prompts` without NumPy arrays: [T] become lists of ints, others tensors. ValueError if not integers."""
    if isinstance(prompts, np.ndarray):
        if prompts.dtype.kind not in "iu":
            raise ValueError(f"input_ids of shape {prompts.shape} and dtype {prompts.dtype}: expected [bs, T] integers")
        return prompts.tolist() if prompts.ndim == 1 else torch.from_numpy(prompts.astype(np.int64))
    if isinstance(prompts, list | tuple) and any(issubclass(kind, np.ndarray) for kind in set(map(type, prompts))):
        return [_from_numpy(prompt) if isinstance(prompt, np.ndarray) else prompt for prompt in prompts]
    return prompts


def _tensor_to_ids(ids: torch.Tensor, mask: Any) -> list[list[int]]:
    mask = None if mask is None else _tensor_of_mask(mask).to(ids.device)
    if ids.dim() == 1:
        ids = ids.unsqueeze(0)
        mask = mask.unsqueeze(0) if mask is not None and mask.dim() == 1 else mask
    if ids.dim() != 2 or ids.is_floating_point() or ids.dtype == torch.bool:
        raise ValueError(f"input_ids of shape {tuple(ids.shape)} and dtype {ids.dtype}: expected [bs, T] integers")
    if mask is None:
        return ids.tolist()
    if mask.shape != ids.shape:
        raise ValueError(f"attention_mask has shape {tuple(mask.shape)}, input_ids {tuple(ids.shape)}")
    return [row[keep.bool()].tolist() for row, keep in zip(ids, mask, strict=True)]


def _tensor_of_mask(mask: Any) -> torch.Tensor:
    try:
        return torch.as_tensor(mask)
    except (TypeError, ValueError, RuntimeError):
        raise ValueError(f"attention_mask={shown(mask)}: expected 0 and 1 in the shape of input_ids") from None


def _masked_rows(rows: Sequence[list[int]], mask: Any) -> list[list[int]]:
    """Keep the ids whose mask is set, in rows that may be ragged (what a tokenizer returns without padding)."""
    by_row = mask if isinstance(mask, Sequence | torch.Tensor | np.ndarray) else [mask]
    keeps = [_tensor_of_mask(keep).reshape(-1).tolist() for keep in by_row]
    lengths, wanted = [len(keep) for keep in keeps], [len(row) for row in rows]
    if lengths != wanted:
        raise ValueError(f"attention_mask has rows of {lengths} values, input_ids of {wanted}")
    return [[int(t) for t, k in zip(row, keep, strict=True) if k] for row, keep in zip(rows, keeps, strict=True)]


def _is_ints(value: Any) -> bool:
    if not isinstance(value, Sequence) or isinstance(value, str | bytes | bytearray | memoryview) or len(value) == 0:
        return False
    return all(issubclass(kind, int | np.integer) and kind is not bool for kind in set(map(type, value)))


def _as_ints(ids: Sequence[Any]) -> list[int]:
    """Return token ids as Python's own ints."""
    return list(map(int, ids)) if any(issubclass(kind, np.integer) for kind in set(map(type, ids))) else list(ids)


def _is_rows_of_ints(value: Any) -> bool:
    return isinstance(value, Sequence) and len(value) > 0 and all(_is_ints(row) for row in value)


def _is_chat(value: Any) -> bool:
    """Return whether `value` are messages; what is missing in one, `_plain` says."""
    if not isinstance(value, Sequence) or not value or not all(isinstance(message, Mapping) for message in value):
        return False
    return any("role" in message or "content" in message for message in value)
