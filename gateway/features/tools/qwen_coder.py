"""Tool calls in XML, of Qwen3-Coder and Qwen3.5: a string is written as it is, any other value as JSON.

<tool_call>
<function=get_weather>
<parameter=city>
Paris
</parameter>
</function>
</tool_call>
"""

from __future__ import annotations

import json
from collections.abc import Generator, Mapping, Sequence
from typing import Any

from quire.gateway.features.tools.argument_types import properties_of, types_of
from quire.gateway.features.tools.call_parser import CallParser
from quire.gateway.features.tools.growing_text import MalformedCall, parse_json
from quire.gateway.features.tools.reasoning import Reasoning
from quire.gateway.features.tools.tool_format import ToolFormat
from quire.gateway.features.tools.tool_grammar import Beginning, SpecialTokens, answer_grammar, lark_text, several
from quire.gateway.features.tools.xml_arguments import PARAMETER_END, PARAMETER_START, XmlArguments
from quire.gateway.output.tools import Tool, ToolChoice

START, END = "<tool_call>", "</tool_call>"
FUNCTION_START, FUNCTION_END = "<function=", "</function>"
# Python's words, which models write instead of JSON.
_WORDS = {"None": "null", "True": "true", "False": "false"}


class QwenCoderParser(CallParser):
    # The models sometimes leave the outer tag out.
    triggers = (START, FUNCTION_START)

    def read_call(self, trigger: str) -> Generator[None, None, None]:
        source = self.source
        if trigger == START:
            yield from source.spaces()
            yield from source.literal(FUNCTION_START)
        name = yield from source.until(">")
        self.begin_call(name)
        schema = self.tools[name].parameters
        separator = "{"
        while True:
            yield from source.spaces()
            if (yield from source.one_of(PARAMETER_START, FUNCTION_END)) == FUNCTION_END:
                break
            key = yield from source.until(">")
            self.arguments(f"{separator}{json.dumps(key, ensure_ascii=False)}: ")
            separator = ", "
            yield from self._read_value(types_of(properties_of(schema).get(key), schema))
        self.arguments("{}" if separator == "{" else "}")
        yield from source.spaces()
        if trigger == START:
            yield from source.closing(END)

    def _read_value(self, types: frozenset[str]) -> Generator[None, None, None]:
        """Read a value and its end tag. A value that names no type is a string."""
        if (yield from self.source.peek()) == "\n":
            self.source.take(1)
        if types <= {"string"}:
            self.arguments('"')
            yield from self.source.stream_until((PARAMETER_END,), self._string, _without_newline)
            self.arguments('"')
            return
        pieces: list[str] = []
        yield from self.source.stream_until((PARAMETER_END,), pieces.append, _without_newline)
        self.arguments(_as_json("".join(pieces), types))

    def _string(self, text: str) -> None:
        if text:
            self.arguments(json.dumps(text, ensure_ascii=False)[1:-1])


def _without_newline(text: str) -> str:
    return text.removesuffix("\n")


def _as_json(text: str, types: frozenset[str]) -> str:
    """Return the JSON of a value that may have several types, or one that is not a string."""
    value = _WORDS.get(text.strip(), text.strip())
    if "string" in types and not ("null" in types and value == "null"):
        return json.dumps(text, ensure_ascii=False)
    try:
        parse_json(value)
    except MalformedCall:
        return json.dumps(text, ensure_ascii=False)
    return value


class QwenCoder(ToolFormat):
    name = "qwen3_coder"
    parser_type = QwenCoderParser
    markers = frozenset({START, END})

    def written(self, name: str, arguments: Mapping[str, Any]) -> str:
        lines = [START, f"{FUNCTION_START}{name}>"]
        for key, value in arguments.items():
            text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
            lines += [f"{PARAMETER_START}{key}>", text, PARAMETER_END]
        return "\n".join([*lines, FUNCTION_END, END])

    def grammar(
        self,
        tools: Sequence[Tool],
        choice: ToolChoice,
        special_tokens: SpecialTokens,
        reasoning: Reasoning | None = None,
    ) -> str:
        start, end = (lark_text(tag, special_tokens) for tag in (START, END))
        arguments = XmlArguments()
        functions = [
            f"{lark_text(f'{tool.name}>' + chr(10), special_tokens)} {arguments.of(tool)} {lark_text(FUNCTION_END, {})}"
            for tool in choice.callable_tools(tools)
        ]
        open_function = lark_text("\n" + FUNCTION_START, {})
        rules = [*arguments.rules, "function: " + " | ".join(functions), f'call: {open_function} function "\\n" {end}']
        rest = several("call", start, choice.parallel)
        beginnings = [Beginning(text=START, rest=rest), Beginning(text=FUNCTION_START, rest="function NEWLINES")]
        return answer_grammar(choice, special_tokens, reasoning, f"{start} {rest}", beginnings, rules)
