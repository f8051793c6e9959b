"""Tool calls of Gemma 4: names of arguments are bare, and strings are between tokens of their own.

<|tool_call>call:get_weather{city:<|"|>Paris<|"|>,days:3}<tool_call|>
"""

from __future__ import annotations

import json
from collections.abc import Generator, Mapping, Sequence
from typing import Any

from quire.gateway.features.tools.call_parser import CallParser
from quire.gateway.features.tools.growing_text import MalformedCall, parse_json
from quire.gateway.features.tools.literal_arguments import LiteralArguments, Syntax, Value
from quire.gateway.features.tools.tool_format import MarkedFormat
from quire.gateway.features.tools.tool_grammar import SpecialTokens, lark_text, quoted, several, text_and_end
from quire.gateway.output.tools import Tool

START, END, QUOTE = "<|tool_call>", "<tool_call|>", '<|"|>'
_MAX_DEPTH = 64


class GemmaParser(CallParser):
    triggers = (START,)

    def read_call(self, trigger: str) -> Generator[None, None, None]:
        yield from self.source.spaces()
        yield from self.source.literal("call:")
        name = yield from self.source.word("{")
        self.begin_call(name.strip())
        yield from self._read_value()
        yield from self.source.spaces()
        yield from self.source.closing(END)

    def _read_value(self, depth: int = 0) -> Generator[None, None, None]:
        source = self.source
        first = yield from source.peek()
        if depth > _MAX_DEPTH:
            raise MalformedCall("the value nests too deep")
        if first in ("{", "["):
            yield from self._read_items("}" if first == "{" else "]", depth)
        elif first == "<":
            yield from source.literal(QUOTE)
            self.arguments('"')
            yield from source.stream_until((QUOTE,), self._string, str)
            self.arguments('"')
        else:
            word = (yield from source.word(",]}")).strip()
            word = "null" if word == "None" else word  # as the chat template writes it
            parse_json(word)
            self.arguments(word)

    def _read_items(self, end: str, depth: int) -> Generator[None, None, None]:
        """Read an object or a list from its bracket to `end`."""
        source = self.source
        separator = source.take(1)
        yield from source.spaces()
        if (yield from source.peek()) == end:
            self.arguments(separator + source.take(1))
            return
        while True:
            yield from source.spaces()
            key = f"{json.dumps((yield from source.until(':')), ensure_ascii=False)}: " if end == "}" else ""
            self.arguments(separator + key)
            separator = ", "
            yield from self._read_value(depth + 1)
            yield from source.spaces()
            if (yield from source.one_of(",", end)) == end:
                self.arguments(end)
                return

    def _string(self, text: str) -> None:
        self.arguments(json.dumps(text, ensure_ascii=False)[1:-1])


class Gemma4(MarkedFormat):
    name = "gemma4"
    parser_type = GemmaParser
    markers = frozenset({START, END, QUOTE})

    def written(self, name: str, arguments: Mapping[str, Any]) -> str:
        return f"{START}call:{name}{_written(arguments)}{END}"

    def rules(self, tools: Sequence[Tool], is_parallel: bool, special_tokens: SpecialTokens) -> list[str]:
        arguments = LiteralArguments(_syntax(special_tokens))
        calls = [f"{quoted(f'call:{tool.name}{{')} {arguments.of(tool)}" for tool in tools]
        return [
            f"calls: {several('call', lark_text(START, special_tokens), is_parallel)}",
            f'call: ({" | ".join(calls)}) "}}" {lark_text(END, special_tokens)}',
            *arguments.rules,
        ]


def _written(value: Any) -> str:
    if isinstance(value, str):
        return f"{QUOTE}{value}{QUOTE}"
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{key}:{_written(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(_written, value)) + "]"
    return json.dumps(value)


def _syntax(special_tokens: SpecialTokens) -> Syntax:
    def written(value: Value) -> str:
        return lark_text(_written(value), special_tokens)

    any_name = "/[A-Za-z_][A-Za-z0-9_.-]*/"
    return Syntax(
        assign=":",
        comma=",",
        is_sorted=True,
        types={
            "string": "literal_string",
            "integer": "LITERAL_INTEGER",
            "number": "LITERAL_NUMBER",
            "boolean": '("true" | "false")',
            "null": '("null" | "None")',
            "array": "literal_list",
            "object": "literal_dict",
        },
        written=written,
        any_name=any_name,
        rules=(
            "literal_value: literal_string | LITERAL_NUMBER | LITERAL_WORD | literal_list | literal_dict",
            f"literal_string: {lark_text(QUOTE, special_tokens)} string_rest",
            *text_and_end("string_rest", QUOTE, special_tokens),
            "LITERAL_WORD: /true|false|null/",
            'literal_list: "[" (literal_value ("," literal_value)*)? "]"',
            f'literal_dict: "{{" ({any_name} ":" literal_value ("," {any_name} ":" literal_value)*)? "}}"',
        ),
    )
