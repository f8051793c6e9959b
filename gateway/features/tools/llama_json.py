"""Tool calls as bare JSON, of Llama 3.1 and 3.2: the answer is a call, or several with `; ` between them.

    {"name": "get_weather", "parameters": {"city": "Paris"}}

`<|python_tag|>` may come before the call, and then other text before that.
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

PYTHON_TAG = "<|python_tag|>"
# The models repeat the key "type" of the tools in the prompt.
_OPEN = r'\s*\{\s*("type"\s*:\s*"function"\s*,\s*)?"name"\s*:\s*'


_CANONICAL = '{"name": '


class LlamaJsonParser(CallParser):
    triggers = (PYTHON_TAG,)
    begins_with_call = True
    opening = re.compile(_OPEN)

    def read_call(self, trigger: str) -> Generator[None, None, None]:
        while True:
            yield from self.source.spaces()
            yield from self.read_json_call("name", ("parameters", "arguments"))
            self.end_call()
            yield from self.source.spaces()
            if (yield from self.source.peek()) != ";":
                return
            yield from self.source.literal(";")


class LlamaJson(CallsFormat):
    name = "llama3_json"
    parser_type = LlamaJsonParser
    json_keys = ("name", "parameters")
    markers = frozenset({PYTHON_TAG})

    def written(self, name: str, arguments: Mapping[str, Any]) -> str:
        return json.dumps({"name": name, "parameters": arguments}, ensure_ascii=False)

    def calls(self, tools: Sequence[Tool], is_parallel: bool, special_tokens: SpecialTokens) -> Calls:
        following = f'("; " {quoted(_CANONICAL)} call)*' if is_parallel else ""
        rules = [
            f"OPEN: /{_OPEN}/",
            'call: named "}"',
            f"named: {json_names_and_arguments(tools, 'parameters')}",
            f"calls: call {following} NEWLINES",
        ]
        beginnings = [Beginning(pattern=_OPEN, rest="calls"), Beginning(text=PYTHON_TAG, rest="OPEN calls")]
        return Calls(f"{quoted(_CANONICAL)} calls", beginnings, rules)
