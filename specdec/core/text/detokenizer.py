"""Turns tokens back into text, all at once or piece by piece, with stop strings."""

from collections.abc import Sequence
from copy import copy
from typing import Any

REPLACEMENT = "\ufffd"  # what an incomplete UTF-8 sequence decodes to
WINDOW = 24  # tokens decoded at once while text comes piece by piece
PENDING = 4  # characters at the end that may still change: what an incomplete sequence decodes to


class Detokenizer:
    """Turns one request's tokens into text, and watches for stop strings.

    All at once (`decode`), or as they come (`feed`, `finish`). Streamed text is held back while it may still change
    (incomplete UTF-8) or may be the start of a stop string. The text ends before a stop string; the tokens that made it
    stay in the token list. prompt: ids before the text, if a stop string may begin in them, as in `transformers`.
    skips_special: special tokens are no text. after: ids that the text goes on from: some tokenizers (Llama 2, Mistral)
    drop the space that a text begins with, which it has where it goes on.
    """

    def __init__(
        self,
        tokenizer: Any,
        stop_strings: Sequence[str] = (),
        prompt: Sequence[int] = (),
        skips_special: bool = True,
        after: Sequence[int] = (),
    ):
        self.tokenizer = tokenizer
        self._skips_special = skips_special
        self.stop_strings = tuple(stop_strings)
        self.stopped = False
        self.num_fed = 0
        self._window: list[int] = []  # the last tokens, decoded together, so that spaces come out right
        self._given = 0  # characters of the window's text that have been taken
        self._settled = 0  # tokens of the window up to the end of the last feed that left no incomplete character
        self._held = ""
        longest = max(map(len, stop_strings), default=0)
        self._prompt = list(prompt[-4 * longest :]) if longest else []  # a character has up to four tokens
        self.reads_prompt = bool(self._prompt)
        self._num_before = 0  # characters of the prompt that `_held` begins with
        before = self.decode(after[-PENDING:]) if len(after) else ""
        if before and not before.endswith(REPLACEMENT):
            self._window, self._given = list(after[-PENDING:]), len(before)

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of all `tokens`; empty without a tokenizer."""
        return "" if self.tokenizer is None else self.tokenizer.decode(tokens, skip_special_tokens=self._skips_special)

    def feed(self, tokens: Sequence[int]) -> str:
        """Return the text that is now final. `num_fed` counts `tokens`, up to the one that completed a stop string."""
        if len(tokens) > 1 and self.stop_strings:
            ahead = copy(self)
            ahead._window = self._window.copy()
            text = ahead._feed(tokens)
            if ahead.stopped:  # one by one, to find the token that completed the stop string: the last at the latest
                return "".join(self._feed([t]) for t in tokens if not self.stopped)
            vars(self).update(vars(ahead))
            return text
        return self._feed(tokens)

    def finish(self) -> str:
        """Return the text still held back when the request ends, which may hold a stop string, too."""
        if self.tokenizer is None or self.stopped:
            return ""
        rest = self.decode(self._window)[self._given :]
        text, self._held = self._held + rest, ""
        self._given += len(rest)
        return self._without_prompt(self._cut(text))

    def _feed(self, tokens: Sequence[int]) -> str:
        if self.tokenizer is None:
            self.num_fed += len(tokens)
            return ""
        if self.num_fed == 0 and self.stop_strings:
            self._hold_prompt(tokens)
        self.num_fed += len(tokens)
        self._window.extend(tokens)
        whole = self.decode(self._window)
        certain, num_left = whole.rstrip(REPLACEMENT), 0
        if len(whole) - len(certain) > WINDOW:  # no character is so long
            certain, num_left = self._split(whole)
        text = self._held + certain[self._given :]
        self._given = max(self._given, len(certain))
        if num_left:
            self._window, self._settled = self._window[-num_left:], 0
            self._given = 0 if num_left < PENDING else len(self.decode(self._window)) - PENDING
        elif len(certain) == len(whole):
            self._settle()
        return self._release(text)

    def _split(self, whole: str) -> tuple[str, int]:
        """Return the text of the window that is certain, and how many tokens are left for the next one.

        Where tokens are bytes ("byte fallback"), an incomplete character takes the text of the whole run of them along.
        """
        shorter = {n: self.decode(self._window[:-n]) for n in range(1, PENDING)}
        complete = (n for n, text in shorter.items() if not text.endswith(REPLACEMENT))
        if num_left := next(complete, 0):
            return shorter[num_left], num_left
        return whole[:-PENDING], WINDOW // 2

    def _hold_prompt(self, tokens: Sequence[int]) -> None:
        """Hold the prompt's end, if a stop string may begin there, and the space between it and the first `tokens`.

        Special tokens are text there: a stop string does not go on across them.
        """
        before, text = self.tokenizer.decode(self._prompt, skip_special_tokens=False), self.decode(tokens)
        both = self.tokenizer.decode([*self._prompt, *tokens], skip_special_tokens=False)
        if both.startswith(before) and both.endswith(text):
            before = both[: len(both) - len(text)]
        self._num_before = max(_overlap(before, stop) for stop in self.stop_strings)
        self._held = before[len(before) - self._num_before :]

    def _without_prompt(self, text: str) -> str:
        """Return `text`, which has been held, without what it holds of the prompt."""
        num_before, self._num_before = self._num_before, max(self._num_before - len(text), 0)
        return text[num_before:]

    def _settle(self) -> None:
        """Restart a long window with the tokens of the last feed, now that every token so far is text."""
        if len(self._window) > WINDOW and self._settled:
            self._window = self._window[self._settled :]
            self._given = len(self.decode(self._window))
        self._settled = len(self._window)

    def _release(self, text: str) -> str:
        """Cut `text` at a stop string, or hold back the longest end that may become one."""
        text = self._cut(text)
        if self.stopped:
            return self._without_prompt(text)
        hold = max((_overlap(text, s) for s in self.stop_strings), default=0)
        self._held = text[len(text) - hold :]
        return self._without_prompt(text[: len(text) - hold])

    def _cut(self, text: str) -> str:
        """Return `text` up to the first stop string, if there is one."""
        hits = [i for i in (text.find(s) for s in self.stop_strings) if i >= 0]
        if not hits:
            return text
        self.stopped, self._held = True, ""
        return text[: min(hits)]


def _overlap(text: str, stop: str) -> int:
    """Return the length of the longest end of `text` that is a proper beginning of `stop`."""
    return next((n for n in range(min(len(stop) - 1, len(text)), 0, -1) if stop.startswith(text[-n:])), 0)
