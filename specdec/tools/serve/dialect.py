"""Reads how the served model writes reasoning and tool calls; makes the grammar and the splitters of a request."""

import warnings
from collections.abc import Sequence
from typing import Any

from specdec.core.grammar.grammar import Grammar
from specdec.tools.serve.client import EngineClient, Text
from specdec.tools.serve.formats import THINKING, TOOL_FORMATS, thinking_of, tool_format_of
from specdec.tools.serve.schema import Body
from specdec.tools.serve.splitting import Splitter
from specdec.tools.serve.structure import Structure


class Dialect:
    """Reads the chat template of `engine`'s tokenizer. tool_format, thinking: names in `formats`, None for none."""

    def __init__(self, engine: EngineClient):
        self.engine = engine
        template = getattr(engine.processor or engine.tokenizer, "chat_template", None) or ""
        own = "".join(template.values()) if isinstance(template, dict) else str(template)
        self.tool_format, self.thinking = tool_format_of(own), thinking_of(own)
        added = getattr(engine.tokenizer, "added_tokens_decoder", {})
        self._special = {str(token): index for index, token in added.items() if token.special}

    def options(self, body: Body, prompts: Sequence[list[int]]) -> dict[str, Any]:
        """Return options of `Engine.generate` besides those of the body itself.

        ValueError names the field that this model, or this server, cannot honour.
        """
        structure = self._structure(body)
        if structure.may_call and self.tool_format is None:
            raise ValueError("tools: this model's chat template has no known tool format: leave tools out")
        free = {"skip_special_tokens": not self._splits(body)}
        try:
            grammar = structure.grammar(self._is_thinking(prompts[0]), self._special, self._stops(body))
        except ValueError as error:  # too large
            if structure.may_be_free:
                return _unconstrained(free, error)
            raise
        if grammar is None or (structure.may_be_free and body.get("ignore_eos")):  # which no grammar goes with
            return free
        name = next(n for n in ("response_format", "structured_outputs", "tool_choice", "tools") if body.get(n))
        if self.engine.config.grammar is None:
            if structure.may_be_free:
                return free
            raise ValueError(
                f"{name}: this server does not constrain text: start it with --grammar auto, or leave it out"
            )
        try:
            compiled = self.engine.compile_grammar(grammar)
        except ValueError as error:
            if structure.may_be_free:
                return _unconstrained(free, error)
            self._check_tools(structure)
            raise ValueError(f"{name}: {error}") from None
        return {"grammar": compiled, **free}

    def _check_tools(self, structure: Structure) -> None:
        """Raise ValueError that names the first tool whose schema alone cannot be compiled."""
        for at, schema in structure.schemas:
            try:
                self.engine.compile_grammar(Grammar(json=schema))
            except ValueError as error:
                raise ValueError(f"{at}{str(error).removeprefix('json')}") from None

    def splitters(self, body: Body, texts: Sequence[Text]) -> list[Splitter]:
        """Return a splitter for each of the answers `texts`; none where an answer is content alone."""
        if not self._splits(body):
            return []
        structure = self._structure(body)
        tokens = sorted({*texts[0].eos_ids, *self._stops(body)})
        ends = [self.engine.tokenizer.decode([token]) for token in tokens]
        tools = structure.tool_format if structure.may_call else None
        formats = tools, structure.thinking
        return [Splitter(*formats, self._is_thinking(t.prompt_ids), ends, structure.is_single) for t in texts]

    def _stops(self, body: Body) -> list[int]:
        """Return the special tokens among `stop_token_ids` of `body`."""
        given = body.get("stop_token_ids", [])
        given = given if isinstance(given, list) else [given]
        return [token for token in self._special.values() if token in given]

    def _splits(self, body: Body) -> bool:
        structure = self._structure(body)
        return structure.may_call or structure.thinking is not None

    def _structure(self, body: Body) -> Structure:
        answer, tools = body.get("response_format") or body.get("structured_outputs"), body.get("tools", [])
        form = None if self.tool_format is None else TOOL_FORMATS[self.tool_format]
        thinking = THINKING[self.thinking] if self.thinking is not None and body.is_chat else None
        choice = body.get("tool_choice", "auto")
        is_single = choice.startswith("=") or not body.get("parallel_tool_calls", True)
        return Structure(answer, tools, choice, form, thinking, is_single)

    def _is_thinking(self, prompt: Sequence[int]) -> bool:
        """Return whether a prompt ends inside reasoning."""
        if self.thinking is None:
            return False
        text = self.engine.tokenizer.decode(prompt[-16:], skip_special_tokens=False)
        return text.rstrip().endswith(THINKING[self.thinking].begin_text)


def _unconstrained(options: dict[str, Any], error: ValueError) -> dict[str, Any]:
    warnings.warn(f"tool calls are not constrained: {error}", stacklevel=3)
    return options
