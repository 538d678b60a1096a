"""Between text and tokens: prompts of every accepted form to ids, and tokens back to text piece by piece."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

REPLACEMENT = "\ufffd"  # what an incomplete UTF-8 sequence decodes to
WINDOW = 24  # tokens decoded at once while text comes piece by piece


class Detokenizer:
    """Turns one request's tokens into text, and watches for stop strings.

    All at once (`decode`), or as they come (`feed`, `finish`). Text that comes is held back while it may still change
    (incomplete UTF-8) or may be the start of a stop string. It ends before a stop string; the tokens that made it stay
    in the token list.
    """

    def __init__(self, tokenizer: Any, stop_strings: Sequence[str] = ()):
        self.tokenizer = tokenizer
        self.stop_strings = tuple(stop_strings)
        self.stopped = False
        self.num_fed = 0
        self._window: list[int] = []  # the last tokens, decoded together, so that spaces come out right
        self._given = 0  # characters of the window's text that have been taken
        self._settled = 0  # tokens of the window up to the end of the last feed that left no incomplete character
        self._held = ""

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of all `tokens`; empty without a tokenizer."""
        return "" if self.tokenizer is None else self.tokenizer.decode(tokens, skip_special_tokens=True)

    def feed(self, tokens: Sequence[int]) -> str:
        """The text that `tokens` make certain. `num_fed` counts them, up to the one that completed a stop string."""
        if len(tokens) > 1 and self.stop_strings:
            before = (self._window.copy(), self._given, self._settled, self._held)
            text = self._feed(tokens)
            if not self.stopped:
                return text
            # Once more, one by one: which token was it? The stop string is there at the last one at the latest.
            self._window, self._given, self._settled, self._held = before
            self.stopped = False
            self.num_fed -= len(tokens)
            return "".join(self._feed([t]) for t in tokens if not self.stopped)
        return self._feed(tokens)

    def finish(self) -> str:
        """The text still held back when the request ends, which may hold a stop string, too."""
        if self.tokenizer is None or self.stopped:
            return ""
        rest = self.decode(self._window)[self._given :]
        text, self._held = self._held + rest, ""
        self._given += len(rest)
        return self._cut(text)

    def _feed(self, tokens: Sequence[int]) -> str:
        self.num_fed += len(tokens)
        if self.tokenizer is None:
            return ""
        self._window.extend(tokens)
        whole = self.decode(self._window)
        certain = whole.rstrip(REPLACEMENT)
        text = self._held + certain[self._given :]
        self._given = max(self._given, len(certain))
        if len(certain) == len(whole):
            self._settle()
        return self._release(text)

    def _settle(self) -> None:
        """Every token so far is text: a long window may begin anew, with the tokens of the last feed in it."""
        if len(self._window) > WINDOW and self._settled:
            self._window = self._window[self._settled :]
            self._given = len(self.decode(self._window))
        self._settled = len(self._window)

    def _release(self, text: str) -> str:
        """Cut `text` at a stop string, or hold back the longest end that may become one."""
        text = self._cut(text)
        if self.stopped:
            return text
        hold = max((_overlap(text, s) for s in self.stop_strings), default=0)
        self._held = text[len(text) - hold :]
        return text[: len(text) - hold]

    def _cut(self, text: str) -> str:
        """`text` up to the first stop string, if there is one."""
        hits = [i for i in (text.find(s) for s in self.stop_strings) if i >= 0]
        if not hits:
            return text
        self.stopped, self._held = True, ""
        return text[: min(hits)]


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that is a proper beginning of `stop`."""
    return next((n for n in range(min(len(stop) - 1, len(text)), 0, -1) if stop.startswith(text[-n:])), 0)


def prompts_to_ids(prompts: Any, tokenizer: Any, attention_mask: Any = None) -> list[list[int]]:
    """Token ids of one prompt or a batch.

    prompts: a string; chat messages (a list of {"role", "content"}, rendered with the chat template and its
    generation prompt); a list of ints; a tensor [T] or [bs, T] with an optional attention mask of the same shape; a
    mapping with input_ids (what a tokenizer returns); or a list of any of the first three. ValueError for the rest.
    """
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
    if isinstance(prompts, str) or _is_ints(prompts) or _is_chat(prompts):
        prompts = [prompts]
    if not isinstance(prompts, Sequence) or not prompts:
        raise ValueError(
            f"prompts={prompts!r}: expected a string, chat messages, token ids, a tensor, or a non-empty list of them"
        )
    return [_one(p, i, tokenizer) for i, p in enumerate(prompts)]


def _one(prompt: Any, index: int, tokenizer: Any) -> list[int]:
    if isinstance(prompt, torch.Tensor):
        rows = _tensor_to_ids(prompt, None)
        if len(rows) != 1:
            raise ValueError(f"prompt {index} is a tensor of {len(rows)} rows: expected one; give the tensor by itself")
        ids = rows[0]
    elif _is_ints(prompt) or prompt == []:
        ids = list(prompt)
    elif isinstance(prompt, str) or _is_chat(prompt):
        if tokenizer is None:
            raise ValueError(f"prompt {index} is text, but the engine has no tokenizer; attach(..., tokenizer=...)")
        ids = _tokenize(prompt, tokenizer)
    else:
        raise ValueError(f"prompt {index} is {type(prompt).__name__}: expected a string, chat messages or token ids")
    return ids


def _tokenize(prompt: Any, tokenizer: Any) -> list[int]:
    if isinstance(prompt, str):
        return tokenizer(prompt)["input_ids"]
    text = tokenizer.apply_chat_template(prompt, add_generation_prompt=True, tokenize=False)
    return tokenizer(text, add_special_tokens=False)["input_ids"]


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
    """Rows of ids, perhaps ragged (what a tokenizer returns without padding), where their mask is set."""
    keeps = mask.tolist() if isinstance(mask, torch.Tensor) else [list(keep) for keep in mask]
    lengths, wanted = [len(keep) for keep in keeps], [len(row) for row in rows]
    if lengths != wanted:
        raise ValueError(f"attention_mask has rows of {lengths} values, input_ids of {wanted}")
    return [[t for t, k in zip(row, keep, strict=True) if k] for row, keep in zip(rows, keeps, strict=True)]


def _is_ints(value: Any) -> bool:
    if not isinstance(value, Sequence) or isinstance(value, str) or len(value) == 0:
        return False
    return all(issubclass(kind, int) and kind is not bool for kind in set(map(type, value)))


def _is_rows_of_ints(value: Any) -> bool:
    return isinstance(value, Sequence) and len(value) > 0 and all(_is_ints(row) for row in value)


def _is_chat(value: Any) -> bool:
    return (
        isinstance(value, Sequence)
        and len(value) > 0
        and all(isinstance(m, Mapping) and "role" in m and "content" in m for m in value)
    )
