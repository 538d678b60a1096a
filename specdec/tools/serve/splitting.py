"""Splits the streamed text of an answer into reasoning, content and tool calls."""

import json
import re
from collections.abc import Iterator, Sequence
from enum import Enum, auto
from typing import NamedTuple

import regex

from specdec.tools.serve.formats import Thinking, ToolFormat


class Part(NamedTuple):
    """kind: "content", "reasoning_content", "call" (the name of a tool) or "arguments"; call: its number."""

    kind: str
    text: str
    call: int = -1


class _Mode(Enum):
    TEXT = auto()
    THOUGHT = auto()
    ARGUMENTS = auto()
    TAIL = auto()
    NEXT = auto()


class Splitter:
    """Splits one answer, fed in pieces with its special tokens.

    tools, thinking: formats to look for; is_thinking: the prompt ends inside reasoning. ends: texts of EOS tokens,
    which are dropped. is_single: calls after the first are dropped. Text that may be the beginning of a mark is held
    back.
    """

    def __init__(
        self,
        tools: ToolFormat | None,
        thinking: Thinking | None,
        is_thinking: bool = False,
        ends: Sequence[str] = (),
        is_single: bool = False,
    ):
        self._tools, self._ends = tools, [end for end in ends if end]
        self._is_single = is_single
        self._marks = {
            _Mode.ARGUMENTS: regex.compile(tools.header) if tools else None,
            _Mode.THOUGHT: regex.compile(thinking.begin) if thinking else None,
            _Mode.TEXT: regex.compile(thinking.noise) if thinking and thinking.noise else None,
        }
        self._end = regex.compile(thinking.end) if thinking else None
        self._tail = regex.compile(tools.tail) if tools else None
        self._next = regex.compile(tools.next_header) if tools and tools.next_header else None
        self._mode = _Mode.THOUGHT if is_thinking else _Mode.TEXT
        self._rest = ""
        self._has_content = self._strips = False  # whitespace after a mark is dropped
        self._scan = JSONScan()
        self._num_calls = 0

    def feed(self, text: str, is_last: bool) -> list[Part]:
        """Return the parts that became final; with the last piece, all of the rest."""
        self._rest += text
        if is_last:
            end = next((end for end in self._ends if self._rest.endswith(end)), "")
            self._rest = self._rest.removesuffix(end)
        return [part for part in self._split(is_last) if part.text and not (self._is_single and part.call > 0)]

    @property
    def has_calls(self) -> bool:
        """Return whether there are calls and the last one is complete: a stop string may cut its arguments."""
        is_left_out = self._is_single and self._num_calls > 1
        return self._num_calls > 0 and (is_left_out or self._mode is not _Mode.ARGUMENTS)

    def _split(self, is_last: bool) -> Iterator[Part]:
        steps = {_Mode.TEXT: self._text, _Mode.THOUGHT: self._thought, _Mode.ARGUMENTS: self._arguments}
        steps[_Mode.NEXT] = self._next_call
        while self._rest:
            before = (self._mode, len(self._rest))
            yield from steps.get(self._mode, self._skip_tail)(is_last)
            if before == (self._mode, len(self._rest)):
                return

    def _text(self, is_last: bool) -> Iterator[Part]:
        found = [(m, mode) for mode, mark in self._marks.items() if mark and (m := self._search(mode, mark, is_last))]
        match, mode = min(found, key=lambda one: (one[0].start(), one[0].partial), default=(None, _Mode.TEXT))
        start = len(self._rest) if match is None else match.start()
        text, self._rest = self._rest[:start], self._rest[start:]
        self._has_content |= bool(text.strip())
        yield self._part("content", text)
        if match is None or match.partial:
            return
        self._rest = self._rest[match.end() - start :]
        self._mode, self._strips = mode, True
        if mode is _Mode.ARGUMENTS:
            yield self._call(match["name"])

    def _call(self, name: str) -> Part:
        self._scan, self._mode = JSONScan(), _Mode.ARGUMENTS
        self._num_calls += 1
        return Part("call", name, self._num_calls - 1)

    def _next_call(self, is_last: bool) -> Iterator[Part]:
        assert self._next is not None
        match = self._next.match(self._rest, partial=not is_last)
        if match is None:
            self._mode = _Mode.TEXT
        elif not match.partial:
            self._rest = self._rest[match.end() :]
            yield self._call(match["name"])

    def _search(self, mode: _Mode, mark: "regex.Pattern[str]", is_last: bool) -> "regex.Match[str] | None":
        if mode is _Mode.ARGUMENTS and self._tools and self._tools.is_first:
            return None if self._has_content else mark.match(self._rest, partial=not is_last)
        return mark.search(self._rest, partial=not is_last)

    def _thought(self, is_last: bool) -> Iterator[Part]:
        assert self._end is not None
        match = self._end.search(self._rest, partial=not is_last)
        start = len(self._rest) if match is None else match.start()
        yield self._part("reasoning_content", self._rest[:start])
        is_over = match is not None and not match.partial
        self._rest = self._rest[match.end() if match is not None and is_over else start :]
        if is_over:
            self._mode, self._strips = _Mode.TEXT, True

    def _part(self, kind: str, text: str) -> Part:
        text = text.lstrip() if self._strips else text
        self._strips &= not text
        return Part(kind, text)

    def _arguments(self, is_last: bool) -> Iterator[Part]:
        assert self._tools is not None
        if not self._tools.has_json:
            end = self._rest.find("<end_function_call>")
            if end < 0 and not is_last:
                return
            raw, self._rest = (self._rest, "") if end < 0 else (self._rest[:end], self._rest[end:])
            self._mode = _Mode.TAIL
            yield Part("arguments", gemma_arguments(raw), self._num_calls - 1)
            return
        if not self._scan.is_begun:
            self._rest = self._rest.lstrip()
        count = self._scan.take(self._rest)
        text, self._rest = self._rest[:count], self._rest[count:]
        if self._scan.is_over:
            self._mode = _Mode.TAIL
        yield Part("arguments", text, self._num_calls - 1)

    def _skip_tail(self, is_last: bool) -> Iterator[Part]:
        assert self._tail is not None
        may_go_on = self._tail.fullmatch(self._rest, partial=True)
        if may_go_on and is_last:  # the answer was cut within it, or ends with it
            self._rest = ""
        elif not may_go_on:
            match = self._tail.match(self._rest)
            self._rest = self._rest[match.end() :] if match else self._rest
            self._mode = _Mode.NEXT if self._next else _Mode.TEXT
        yield from ()


class JSONScan:
    """Finds the end of one JSON value inside an object or a list, fed in pieces."""

    def __init__(self) -> None:
        self.is_over = self.is_begun = False
        self._depth = 0
        self._is_string = self._is_escaped = False

    def take(self, text: str) -> int:
        """Return how many characters of `text` belong to the value."""
        self.is_begun |= bool(text)
        for i, character in enumerate(text):
            if self._is_escaped:
                self._is_escaped = False
            elif self._is_string:
                self._is_escaped, self._is_string = character == "\\", character != '"'
                if not self._is_string and not self._depth:
                    self.is_over = True
                    return i + 1
            elif character == '"':
                self._is_string = True
            elif character in "{[":
                self._depth += 1
            elif character in ",}]" and not self._depth:  # of the enclosing object or list
                self.is_over = True
                return i
            elif character in "}]":
                self._depth -= 1
                if self._depth <= 0:
                    self.is_over = True
                    return i + 1
        return len(text)


def gemma_arguments(text: str) -> str:
    """Convert FunctionGemma's arguments, {key:<escape>text<escape>,other:5}, to JSON; malformed ones are kept."""
    quoted = re.split("<escape>", text)
    plain = [re.sub(r"([{,]\s*)([\w-]+)\s*:", r'\1"\2":', piece) for piece in quoted[::2]]
    strings = [json.dumps(piece) for piece in quoted[1::2]]
    made = "".join(piece for pair in zip(plain, [*strings, ""], strict=False) for piece in pair)
    try:
        return json.dumps(json.loads(made))
    except ValueError:
        return text
