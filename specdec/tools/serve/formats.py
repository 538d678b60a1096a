"""Formats in which models write tool calls and reasoning, as data. The chat template decides which one applies."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

IN_XML = ("<function=", "<arg_key>")  # Qwen3-Coder, Qwen3.5, GLM-4.5: arguments are elements
_MORE = r'(?:\s*,\s*"\w+"\s*:\s*"[^"]*")*'  # members behind the arguments, such as an id
_NAME = r'"name"\s*:\s*"(?P<name>[^"]+)"\s*,\s*'


@dataclass(frozen=True)
class ToolFormat:
    """Format of tool calls: `first`, a call, `between`, .., `last`; a call is `opening`, its arguments, `closing`.

    mark: what a chat template that asks for it contains. header, tail: regular expressions of what comes before and
    after arguments; a header names the tool. next_header: another one, right behind a call. is_first: only at the
    beginning of an answer. between: None if there is one call at most. trigger: what calls begin with and other text
    does not contain (or, if is_first, begin with); empty: text before calls cannot be told from them by a grammar.
    has_json: arguments are JSON; else they are FunctionGemma's, which no grammar here describes.
    """

    mark: str
    header: str
    tail: str
    opening: str
    closing: str
    between: str | None = None
    first: str = ""
    last: str = ""
    is_first: bool = False
    trigger: str = ""
    has_json: bool = True
    next_header: str = ""


@dataclass(frozen=True)
class Thinking:
    """Format of reasoning: regular expressions of its begin and end marks, and the marks themselves.

    noise: a regular expression of what is dropped from an answer besides.
    """

    mark: str
    begin: str
    end: str
    begin_text: str
    end_text: str
    noise: str = ""


TOOL_FORMATS: Mapping[str, ToolFormat] = MappingProxyType(
    {
        "harmony": ToolFormat(  # GPT-OSS
            mark="<|channel|>",
            header=r"(?:<\|start\|>assistant)?"
            r"(?:<\|channel\|>(?:commentary|analysis)\s+to=functions\.(?P<name>[\w.-]+)"
            r"|\s*to=functions\.(?P<name>[\w.-]+)\s*<\|channel\|>(?:commentary|analysis))"
            r"\s*(?:<\|constrain\|>)?\w*<\|message\|>",
            tail=r"\s*(?:<\|call\|>)?",
            opening="<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>",
            closing="",
        ),
        "mistral-args": ToolFormat(  # since Mistral Small 3.2
            mark="[ARGS]",
            header=r"\[TOOL_CALLS\](?P<name>[\w.-]+)\[ARGS\]",
            tail="",
            opening="[TOOL_CALLS]{name}[ARGS]",
            closing="",
            between="",
            trigger="[TOOL_CALLS]",
        ),
        "mistral": ToolFormat(
            mark="[TOOL_CALLS]",
            header=rf"\s*\[TOOL_CALLS\]\s*\[?\s*\{{\s*{_NAME}" + r'"arguments"\s*:\s*'
            r"|\[TOOL_CALLS\](?P<name>[\w-]+)\[ARGS\]",
            tail=_MORE + r"\s*\}?\s*\]?",
            next_header=rf"\s*,\s*\{{\s*{_NAME}" + r'"arguments"\s*:\s*',
            trigger="[TOOL_CALLS]",
            first="[TOOL_CALLS] [",
            opening='{{"name": {quoted}, "arguments": ',
            closing="}",
            between=", ",
            last="]",
        ),
        "gemma": ToolFormat(  # FunctionGemma
            mark="<start_function_call>",
            header=r"\s*<start_function_call>call:(?P<name>[\w.-]+)(?=\{)",
            tail=r"\s*(?:<end_function_call>)?",
            opening="",
            closing="",
            has_json=False,
        ),
        "hermes": ToolFormat(  # Qwen, Hermes, SmolLM3
            mark="<tool_call>",
            header=rf"\s*<tool_call>\s*\{{\s*{_NAME}" + r'"arguments"\s*:\s*',
            tail=_MORE + r"\s*\}\s*(?:</tool_call>)?\s*",
            opening='<tool_call>\n{{"name": {quoted}, "arguments": ',
            closing="}\n</tool_call>",
            between="\n",
            trigger="<tool_call>",
        ),
        "llama3": ToolFormat(  # after Hermes, whose template may write parameters of tools
            mark='"parameters":',
            header=r"\s*(?:<\|python_tag\|>\s*)?\{\s*(?:\"type\"\s*:\s*\"function\"\s*,\s*)?"
            + _NAME
            + r'"parameters"\s*:\s*',
            tail=r"\s*\}\s*;?\s*",
            opening='{{"name": {quoted}, "parameters": ',
            closing="}",
            is_first=True,
            trigger='{"name": "',
        ),
    }
)
THINKING: Mapping[str, Thinking] = MappingProxyType(
    {
        "harmony": Thinking(
            mark="<|channel|>",
            begin=r"(?:<\|start\|>assistant)?<\|channel\|>analysis<\|message\|>",
            end=r"<\|end\|>",
            begin_text="<|channel|>analysis<|message|>",
            end_text="<|end|><|start|>assistant",
            noise=r"(?:<\|start\|>assistant)?<\|channel\|>(?:final|commentary)\s*(?:<\|constrain\|>json)?<\|message\|>"
            r"|<\|(?:end|return)\|>|<\|start\|>assistant",
        ),
        "think": Thinking("</think>", r"\s*<think>\s*", r"\s*</think>\s*", "<think>", "</think>"),
    }
)


def tool_format_of(template: str) -> str | None:
    """Return the name of the format that a chat template asks for; None if it takes no tools, or calls in XML."""
    if any(mark in template for mark in IN_XML):
        return None
    found = (name for name, form in TOOL_FORMATS.items() if form.mark in template)
    return next(found, None) if "tools" in template else None


def thinking_of(template: str) -> str | None:
    """Return the name of how a chat template writes thoughts; None if it knows none."""
    return next((name for name, form in THINKING.items() if form.mark in template), None)
