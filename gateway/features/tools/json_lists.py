"""Tool calls as a JSON list after a mark: the older form of Mistral, Granite 3, and Cohere's Command R7B and A.

    [TOOL_CALLS][{"name": "get_weather", "arguments": {"city": "Paris"}}]
    <|tool_call|>[{"name": "get_weather", "arguments": {"city": "Paris"}}]
    <|START_ACTION|>[
        {"tool_call_id": "0", "tool_name": "get_weather", "parameters": {"city": "Paris"}}
    ]<|END_ACTION|>

Cohere's models write `<|START_RESPONSE|>` and `<|END_RESPONSE|>` around their content.
"""

from __future__ import annotations

import json
from collections.abc import Generator, Mapping, Sequence
from typing import Any, ClassVar

from quire.gateway.features.tools.call_parser import CallParser
from quire.gateway.features.tools.tool_format import MarkedFormat
from quire.gateway.features.tools.tool_grammar import SpecialTokens, json_names_and_arguments, lark_text, quoted
from quire.gateway.output.tools import Tool

CALLS = "[TOOL_CALLS]"
GRANITE, GRANITE_TEXT = "<|tool_call|>", "<tool_call>"
ACTION, ACTION_END = "<|START_ACTION|>", "<|END_ACTION|>"
RESPONSE, RESPONSE_END = "<|START_RESPONSE|>", "<|END_RESPONSE|>"


class ListParser(CallParser):
    """Reads a list of calls. An id that the model gives to a call is dropped."""

    end: ClassVar[str] = ""
    keys: ClassVar[tuple[str, str]] = ("name", "arguments")

    def read_call(self, trigger: str) -> Generator[None, None, None]:
        source, (name_key, arguments_key) = self.source, self.keys
        yield from source.spaces()
        yield from source.literal("[")
        while True:
            yield from source.spaces()
            yield from self.read_json_call(name_key, (arguments_key,))
            self.end_call()
            yield from source.spaces()
            if (yield from source.closing(",", "]")) != ",":
                break
        if self.end:
            yield from source.spaces()
            yield from source.closing(self.end)


class GraniteParser(ListParser):
    triggers = (GRANITE, GRANITE_TEXT)


class CohereParser(ListParser):
    triggers = (ACTION, RESPONSE, RESPONSE_END)
    end = ACTION_END
    keys = ("tool_name", "parameters")

    def read_call(self, trigger: str) -> Generator[None, None, None]:
        if trigger == ACTION:
            yield from super().read_call(trigger)


class ListFormat(MarkedFormat):
    """brackets: the expressions for the beginning of the list, between two calls, and for its end. head, tail: those
    for a call before its name, and after its arguments.
    """

    parser_type: ClassVar[type[ListParser]]
    # Tokenizers of SentencePiece write a space after a special token.
    brackets: ClassVar[tuple[str, str, str]] = (r"/ ?\[/", '", "', '"]"')
    head: ClassVar[str] = quoted('{"name": ')
    tail: ClassVar[str] = '"}"'

    def written(self, name: str, arguments: Mapping[str, Any]) -> str:
        return (
            f"{self.parser_type.triggers[0]}[{json.dumps({'name': name, 'arguments': arguments}, ensure_ascii=False)}]"
        )

    def rules(self, tools: Sequence[Tool], is_parallel: bool, special_tokens: SpecialTokens) -> list[str]:
        opening, comma, closing = self.brackets
        end = lark_text(self.parser_type.end, special_tokens)
        return [
            f"calls: {opening} call {f'({comma} call)*' if is_parallel else ''} {closing} {end}",
            f"call: {self.head} named {self.tail}",
            f"named: {json_names_and_arguments(tools, self.parser_type.keys[1])}",
        ]


class Granite(ListFormat):
    name = "granite"
    parser_type = GraniteParser
    other_starts: ClassVar[Mapping[str, str]] = {GRANITE_TEXT: "calls"}
    markers = frozenset({GRANITE, GRANITE_TEXT})


class Cohere(ListFormat):
    name = "cohere"
    parser_type = CohereParser
    markers = frozenset({ACTION, ACTION_END, RESPONSE, RESPONSE_END})
    content_marks = (RESPONSE, RESPONSE_END)
    brackets = (quoted("[\n    "), quoted(",\n    "), quoted("\n]"))
    head = r'/\{"tool_call_id": "[0-9]{1,4}", "tool_name": /'

    def written(self, name: str, arguments: Mapping[str, Any]) -> str:
        call = {"tool_call_id": "0", "tool_name": name, "parameters": arguments}
        return f"{ACTION}[\n    {json.dumps(call, ensure_ascii=False)}\n]{ACTION_END}"
