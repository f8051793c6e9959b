"""Tool calls as JSON in tags: `<tool_call>`, of Hermes, Qwen2.5, Qwen3 and many others.

<tool_call>
{"name": "get_weather", "arguments": {"city": "Paris"}}
</tool_call>
"""

from __future__ import annotations

import json
from collections.abc import Generator, Mapping, Sequence
from typing import Any

from quire.gateway.features.tools.call_parser import CallParser
from quire.gateway.features.tools.tool_format import MarkedFormat
from quire.gateway.features.tools.tool_grammar import SpecialTokens, json_names_and_arguments, lark_text, several
from quire.gateway.output.tools import Tool

START, END = "<tool_call>", "</tool_call>"


class HermesParser(CallParser):
    triggers = (START,)

    def read_call(self, trigger: str) -> Generator[None, None, None]:
        yield from self.source.spaces()
        yield from self.read_json_call("name", ("arguments",))
        yield from self.source.spaces()
        yield from self.source.closing(END)  # some models end the answer without the tag


class Hermes(MarkedFormat):
    name = "hermes"
    parser_type = HermesParser
    markers = frozenset({START, END})

    def written(self, name: str, arguments: Mapping[str, Any]) -> str:
        return f"{START}\n{json.dumps({'name': name, 'arguments': arguments}, ensure_ascii=False)}\n{END}"

    def rules(self, tools: Sequence[Tool], is_parallel: bool, special_tokens: SpecialTokens) -> list[str]:
        return [
            f"calls: {several('call', lark_text(START, special_tokens), is_parallel)}",
            "call: " + lark_text('\n{"name": ', special_tokens) + " named " + lark_text("}\n" + END, special_tokens),
            f"named: {json_names_and_arguments(tools, 'arguments')}",
        ]
