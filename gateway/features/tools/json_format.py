"""Tool calls for models whose chat template knows no tools: JSON that the system message describes.

{"tool": "get_weather", "arguments": {"city": "Paris"}}
"""

from __future__ import annotations

import json
import re
from collections.abc import Generator, Mapping, Sequence
from typing import Any

from quire.gateway.features.tools.call_parser import CallParser
from quire.gateway.features.tools.tool_format import CallsFormat
from quire.gateway.features.tools.tool_grammar import Beginning, Calls, SpecialTokens, json_names_and_arguments, quoted
from quire.gateway.output.tools import Tool

_OPEN = r'\s*\{\s*"tool"\s*:\s*'
_CANONICAL = '{"tool": '
_MANNER = """To call a function, answer with nothing but one JSON object: {"tool": "<name>", "arguments": {<arguments>}}
Write one object per line to call several functions."""


class JsonParser(CallParser):
    begins_with_call = True
    opening = re.compile(_OPEN)

    def read_call(self, trigger: str) -> Generator[None, None, None]:
        while True:
            yield from self.source.spaces()
            yield from self.read_json_call("tool", ("arguments",))
            self.end_call()
            yield from self.source.spaces()
            if (yield from self.source.peek()) != "{":
                return


class Json(CallsFormat):
    name = "json"
    parser_type = JsonParser
    is_described = True
    json_keys = ("tool", "arguments")

    def written(self, name: str, arguments: Mapping[str, Any]) -> str:
        return json.dumps({"tool": name, "arguments": arguments}, ensure_ascii=False)

    def calls(self, tools: Sequence[Tool], is_parallel: bool, special_tokens: SpecialTokens) -> Calls:
        following = f"({quoted(chr(10) + _CANONICAL)} call)*" if is_parallel else ""
        rules = [
            f"calls: call {following} NEWLINES",
            'call: named "}"',
            f"named: {json_names_and_arguments(tools, 'arguments')}",
        ]
        beginning = Beginning(pattern=_OPEN, rest="calls")
        return Calls(f"{quoted(_CANONICAL)} calls", [beginning], rules)

    def manner(self) -> str:
        return _MANNER
