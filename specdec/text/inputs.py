"""Converts prompts of every accepted form to token ids."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch


def prompts_to_ids(prompts: Any, tokenizer: Any, attention_mask: Any = None) -> list[list[int]]:
    """Return token ids of one prompt or a batch.

    prompts: a string; chat messages (a list of {"role", "content"}, rendered with the chat template and its generation
    prompt); a list of ints; a tensor or NumPy array of integers, [T] or [bs, T], with an optional attention mask of the
    same shape; a mapping with input_ids (what a tokenizer returns); or a list of any of the first three, or of arrays
    [T]. ValueError for the rest.
    """
    prompts = _from_numpy(prompts)
    if isinstance(prompts, Mapping) and "input_ids" in prompts:
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
            f"prompts={prompts!r}: expected a string, chat messages, token ids, a tensor, or a non-empty list of them"
        )
    return [_one(p, i, tokenizer) for i, p in enumerate(prompts)]


def _one(prompt: Any, index: int, tokenizer: Any) -> list[int]:
    _refuse_bytes(f"prompt {index}", prompt)
    if isinstance(prompt, torch.Tensor):
        rows = _tensor_to_ids(prompt, None)
        if len(rows) != 1:
            raise ValueError(f"prompt {index} is a tensor of {len(rows)} rows: expected one; give the tensor by itself")
        ids = rows[0]
    elif _is_ints(prompt) or prompt == []:
        ids = _as_ints(prompt)
    elif isinstance(prompt, str) or _is_chat(prompt):
        if tokenizer is None:
            raise ValueError(f"prompt {index} is text, but the engine has no tokenizer; attach(..., tokenizer=...)")
        ids = tokenizer(prompt)["input_ids"] if isinstance(prompt, str) else ids_of_chat(prompt, tokenizer)
    else:
        raise ValueError(f"prompt {index} is {type(prompt).__name__}: expected a string, chat messages or token ids")
    return ids


def ids_of_chat(messages: Any, tokenizer: Any) -> list[int]:
    """Return token ids of a chat, with the generation prompt."""
    return encode(tokenizer, render_chat(messages, tokenizer))


def render_chat(messages: Any, tokenizer: Any) -> str:
    """Return the chat template's text of `messages`, up to where the answer begins."""
    return tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)


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
    mask = None if mask is None else torch.as_tensor(mask, device=ids.device)
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


def _masked_rows(rows: Sequence[list[int]], mask: Any) -> list[list[int]]:
    """Keep the ids whose mask is set, in rows that may be ragged (what a tokenizer returns without padding)."""
    keeps = mask.tolist() if isinstance(mask, torch.Tensor) else [list(keep) for keep in mask]
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
    return (
        isinstance(value, Sequence)
        and len(value) > 0
        and all(isinstance(m, Mapping) and "role" in m and "content" in m for m in value)
    )
