"""The structure that a request demands of its answer: checks of its fields, and the grammar made from them."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from specdec.core.grammar.grammar import Grammar
from specdec.core.ranges import shown
from specdec.core.text.inputs import check_text
from specdec.tools.serve.formats import Thinking, ToolFormat
from specdec.tools.serve.messages import check_count, check_object, refuse_unless

MOST_TOOLS = 128
_ALIASES = MappingProxyType({"grammar": "ebnf"})
_IN_LARK = MappingProxyType({"/": r"\/", "\n": r"\n"})  # what ends a pattern there


def response_format(name: str, value: Any) -> Grammar | None:
    """Return the grammar of OpenAI's `response_format`; None for plain text."""
    fields = value if isinstance(value, Mapping) else {"type": value}
    kind = fields.get("type")
    if kind not in ("text", "json_object", "json_schema"):
        raise ValueError(f"{name}.type={shown(kind)}: expected text, json_object or json_schema")
    if kind != "json_schema":
        _check_known(name, fields, ("type",))
        return Grammar(json_object=True) if kind == "json_object" else None
    given = fields.get("json_schema")
    if not isinstance(given, Mapping) or given.get("schema") is None:
        raise ValueError(f"{name}.json_schema={shown(given)}: expected an object with 'name' and 'schema'")
    _check_known(name, fields, ("type", "json_schema"))
    _check_known(f"{name}.json_schema", given, ("name", "description", "schema", "strict"))
    return _made(f"{name}.json_schema", {"json": given["schema"]})


def structured_outputs(name: str, value: Any) -> Grammar:
    """Return the grammar of vLLM's `structured_outputs`: one field of `Grammar`; `grammar` is GBNF."""
    given = check_object(name, value)
    twice = [key for key, same in _ALIASES.items() if key in given and same in given]
    if twice:
        raise ValueError(f"{name}: {twice[0]} and {_ALIASES[twice[0]]} are the same: leave one of them out")
    return _made(name, {_ALIASES.get(key, key): item for key, item in given.items()})


def tools(name: str, value: Any) -> list[dict[str, Any]]:
    """Return checked tools, as chat templates take them."""
    if not isinstance(value, list):
        raise ValueError(f"{name}={shown(value)}: expected a list of tools")
    check_count(name, value, 0, MOST_TOOLS, "tools")
    return [_tool(f"{name}[{i}]", tool) for i, tool in enumerate(value)]


def tool_choice(name: str, value: Any) -> str:
    """Return "none", "auto", "required", or "=" and the name of the tool that must be called."""
    if value in ("none", "auto", "required"):
        return value
    function = value.get("function") if isinstance(value, Mapping) and value.get("type") == "function" else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise ValueError(f"{name}={shown(value)}: expected none, auto, required, or a function with its name")
    return f"={function['name']}"


def _tool(at: str, tool: Any) -> dict[str, Any]:
    if not isinstance(tool, Mapping) or tool.get("type") != "function" or not isinstance(tool.get("function"), Mapping):
        raise ValueError(f"{at}={shown(tool)}: expected an object of type 'function' with a function")
    function = tool["function"]
    _check_known(at, tool, ("type", "function"))
    _check_known(f"{at}.function", function, ("name", "description", "parameters", "strict"))
    name = check_text(f"{at}.function.name", function.get("name"))
    if not re.fullmatch(r"[\w.-]{1,64}", name, re.ASCII):
        raise ValueError(
            f"{at}.function.name={shown(name)}: expected 1 to 64 letters, digits, '_', '.' or '-', in ASCII"
        )
    parameters = function.get("parameters")
    if parameters is None:
        parameters = {"type": "object", "properties": {}, "additionalProperties": False}  # no arguments, as OpenAI
    kinds = parameters.get("type", "object") if isinstance(parameters, Mapping) else ""
    if "object" not in (kinds if isinstance(kinds, list) else [kinds]):
        raise ValueError(f"{at}.function.parameters={shown(parameters)}: expected a JSON schema of an object")
    described = {key: item for key, item in function.items() if key in ("name", "description")}
    return {"type": "function", "function": {**described, "parameters": parameters}}


def _check_known(at: str, given: Mapping[str, Any], known: Sequence[str]) -> None:
    """Raise ValueError for an unknown field with a value."""
    for key in (key for key in given if key not in known):
        refuse_unless(f"{at}.{shown(key)[1:-1]}", given[key], (None,))


def _made(at: str, fields: Mapping[str, Any]) -> Grammar:
    """Make a grammar; errors name the field `at`."""
    try:
        return Grammar.of(fields)
    except ValueError as error:
        raise ValueError(f"{at}: {error}") from None


@dataclass(frozen=True)
class Structure:
    """Parts of an answer besides free text, from the fields of a body and `formats`.

    is_single: one call at most, of a named tool or with `parallel_tool_calls: false`.
    """

    answer: Grammar | None
    tools: list[dict[str, Any]]
    choice: str
    tool_format: ToolFormat | None
    thinking: Thinking | None
    is_single: bool = False

    @property
    def may_call(self) -> bool:
        """True if the answer may call tools."""
        return bool(self.tools) and self.choice != "none"

    @property
    def must_call(self) -> bool:
        """True if the answer must call a tool."""
        return self.may_call and self.choice != "auto"

    @property
    def may_be_free(self) -> bool:
        """True if text is free until a call begins, and constrained from there on."""
        may_choose = self.answer is None and self.may_call and not self.must_call
        return may_choose and self.tool_format is not None and bool(self.tool_format.trigger)

    @property
    def callable_functions(self) -> dict[int, dict[str, Any]]:
        """The functions that the answer may call, by their index in `tools`."""
        functions = enumerate(tool["function"] for tool in self.tools if self.may_call)
        return {i: f for i, f in functions if self.choice in ("auto", "required", f"={f['name']}")}

    @property
    def schemas(self) -> list[tuple[str, Any]]:
        """The schemas of the functions that the answer may call, each with its path in the body."""
        return [(f"tools[{i}].function.parameters", f["parameters"]) for i, f in self.callable_functions.items()]

    def grammar(self, is_thinking: bool, special: Mapping[str, int], stops: Sequence[int] = ()) -> Grammar | None:
        """Return the grammar of the whole text; None if it is free.

        is_thinking: the prompt ends inside reasoning. special: ids of special tokens, by their text. stops: ids
        of those that end a text as EOS does.
        """
        if self.answer is None and not self.must_call and not self.may_be_free:
            return None
        if self.answer is not None and self.thinking is None and not self.may_call:
            return self.answer
        rules = _Rules(special)
        ways = []
        if self.may_call:
            ways.append(self._free_or_calls(rules) if self.may_be_free else self._calls(rules))
        if self.answer is not None and not self.must_call:
            ways.append(self._answer(rules))
        stop = f" ({' | '.join(f'<[{token}]>' for token in stops)})?" if stops else ""
        start = f"start: body{stop}\nbody: {' | '.join(ways)}"
        if self.thinking is not None:
            ends_in_token = self.thinking.end_text.startswith("<|")
            end = rules.literal(self.thinking.end_text)
            thought = f"FREE {end}\nFREE: /(.|\\n)*/" if ends_in_token else "END"
            if not ends_in_token:
                thought = f"until_end\nuntil_end[suffix={json.dumps(self.thinking.end_text)}]: /(.|\\n)*/"
            begin = "" if is_thinking else rules.literal(self.thinking.begin_text)
            space = "" if ends_in_token else " /[ \\n]*/"
            start = f"start: {'thought' if is_thinking else 'thought?'} body{stop}\nthought: {begin} inner{space}\n"
            start += f"inner: {thought}\nbody: {' | '.join(ways)}"
        text = "\n".join([start, *rules.lines])
        return _made("tools", {"lark": text}) if self.may_call else Grammar(lark=text)

    def _answer(self, rules: "_Rules") -> str:
        assert self.answer is not None
        kind, value = self.answer.kind, self.answer.value
        if kind == "choice":
            return rules.add(" | ".join(map(json.dumps, value)), "CHOICE")
        if kind == "regex":
            pattern = re.sub(r"(?s)\\.|/|\n", lambda m: _IN_LARK.get(m[0], m[0]), value)
            return rules.add(f"/{pattern}/", "REGEX")
        if kind not in ("json", "json_object"):
            raise ValueError(
                f"structured_outputs: {kind} with tools or a thinking model: expected json, regex or choice"
            )
        return rules.schema({"type": "object"} if kind == "json_object" else value, self.answer.any_whitespace)

    def _free_or_calls(self, rules: "_Rules") -> str:
        """Free text with calls after each trigger of the format; if calls only come first, free text or calls."""
        assert self.tool_format is not None
        trigger = self.tool_format.trigger
        if self.tool_format.is_first:
            others = rules.add(f"/(.|\\n)*/ & ~/{re.escape(trigger)}(.|\\n)*/", "TEXT")
            return f"{self._calls(rules)} | {others}"
        free = rules.add("/(.|\\n)*/", "TEXT")
        begun = rules.literal(trigger)
        if begun.startswith("<["):  # text contains no special tokens
            begun = rules.add(f"{free} {begun}")
        else:
            begun = rules.add("/(.|\\n)*/", f"until[suffix={json.dumps(trigger)}]")
        call = f"{begun} {self._calls(rules, trigger)}"
        return f"{call} | {free}" if self.is_single else f"({call})* {free}"

    def _calls(self, rules: "_Rules", begun: str = "") -> str:
        """Add the rule of calls, without the text `begun` that has been written."""
        form = self.tool_format
        assert form is not None
        if not form.has_json:
            raise ValueError("tool_choice: this model's calls are not JSON, so they cannot be constrained: pass 'auto'")
        functions = self.callable_functions.values()
        if not functions:
            raise ValueError(f"tool_choice: there is no tool {shown(self.choice[1:])}")
        ways = []
        for function in functions:
            names = {"name": function["name"], "quoted": json.dumps(function["name"])}
            opening = form.opening.format(**names)
            opening = opening if form.first else opening.removeprefix(begun)
            schema = rules.schema({**function["parameters"], "type": "object"})  # arguments are one in any case
            closing = rules.literal(form.closing)
            ways.append(f"{rules.literal(opening)} {schema} {closing}")
        call = rules.add(" | ".join(ways))
        if begun and not form.first:  # the next one begins with free text, too
            return call
        more = "" if form.between is None or self.is_single else f" ({rules.literal(form.between)} {call})*"
        return rules.add(f"{rules.literal(form.first.removeprefix(begun))} {call}{more} {rules.literal(form.last)}")


class _Rules:
    """Collects the rules of a Lark grammar. special: ids of special tokens by their text."""

    def __init__(self, special: Mapping[str, int]):
        self.lines: list[str] = []
        self._special = special

    def add(self, body: str, name: str = "") -> str:
        """Add a rule; return its name, by default a new one. name: attributes in brackets may follow it."""
        name = name or f"rule_{len(self.lines)}"
        self.lines.append(f"{name}: {body}")
        return name.partition("[")[0]

    def schema(self, schema: Any, any_whitespace: bool = False) -> str:
        """Add the rule of a JSON schema, on one line unless `any_whitespace`, as `Grammar.json` is."""
        one_line = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
        space = {"whitespace_flexible": True} if any_whitespace else one_line
        own = {**schema, "x-guidance": space} if isinstance(schema, Mapping) else schema
        return self.add(f"%json {json.dumps(own)}")

    def literal(self, text: str) -> str:
        """Quote `text` as Lark terminals, with special tokens as ids."""
        parts = re.split("|".join(f"({re.escape(s)})" for s in self._special), text) if self._special else [text]
        return " ".join(f"<[{self._special[p]}]>" if p in self._special else json.dumps(p) for p in parts if p)
