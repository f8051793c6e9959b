"""The grammars of tool calls of one model, cached: to make the grammar of 20 tools takes milliseconds."""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

from quire.gateway.output.formats import FORMATS
from quire.gateway.output.output_spec import OutputSpec
from quire.gateway.output.tool_grammar import SpecialTokens, grammar_after_reasoning, with_content
from quire.gateway.output.tools import Tool, ToolChoice, ToolMode
from quire.shared.text.grammar import lark_json, write
from quire.shared.text.grammar_error import GrammarError

# Number of cached grammars, and of the characters of their tools.
KEPT = 64
KEPT_CHARACTERS = 4 * 1024 * 1024


class ToolGrammars:
    """Makes the grammars of answers with tools. special_tokens: those of the model's tokenizer."""

    def __init__(self, special_tokens: SpecialTokens) -> None:
        self._special_tokens = special_tokens
        self._known: OrderedDict[tuple[str, ...], str] = OrderedDict()
        self._characters = 0

    def text(self, spec: OutputSpec, tools: Sequence[Tool], choice: ToolChoice, content: str = "") -> str:
        """Returns the text of the grammar of an answer that may call `tools`. Raises GrammarError.

        content: the JSON schema of an answer that calls no tool, as text; empty for any text. An answer that must call
        a tool has no content.
        """
        written = json.dumps(tools, ensure_ascii=False)
        key = (spec.tool_format, repr(spec.reasoning), repr(choice), content, written)
        if key in self._known:
            self._known.move_to_end(key)
            return self._known[key]
        if content and choice.mode == ToolMode.AUTO:
            lark = self._with_content(spec, tools, choice, json.loads(content))
        else:
            lark = FORMATS[spec.tool_format].grammar(tools, choice, self._special_tokens, spec.reasoning)
        made = write("lark", lark)
        self._known[key] = made
        self._characters += len(written) + len(content)
        while len(self._known) > KEPT or self._characters > KEPT_CHARACTERS:
            forgotten, _ = self._known.popitem(last=False)
            self._characters -= len(forgotten[-1]) + len(forgotten[-2])
        return made

    def _with_content(self, spec: OutputSpec, tools: Sequence[Tool], choice: ToolChoice, schema: dict[str, Any]) -> str:
        """Return the grammar of an answer that is calls, or else JSON that follows a schema. Raises GrammarError."""
        form, special_tokens, reasoning = FORMATS[spec.tool_format], self._special_tokens, spec.reasoning
        if form.json_keys is None:
            required = choice._replace(mode=ToolMode.REQUIRED)
            return with_content(form.grammar(tools, required, special_tokens, reasoning), schema)
        # Calls and content are JSON objects, so one schema tells them apart.
        objects = [_call_schema(tool, *form.json_keys) for tool in tools]
        if "$ref" in json.dumps([objects, schema]):
            raise GrammarError(f"the format {form.name} has no references next to a schema of the answer")
        return grammar_after_reasoning(lark_json({"anyOf": [*objects, schema]}), special_tokens, reasoning)


def _call_schema(tool: Tool, name_key: str, arguments_key: str) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {name_key: {"const": tool.name}, arguments_key: dict(tool.parameters)},
        "required": [name_key, arguments_key],
        "additionalProperties": False,
    }
