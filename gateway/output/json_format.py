"""Tool calls for models whose chat template knows no tools: JSON that the system message describes.

{"tool": "get_weather", "arguments": {"city": "Paris"}}
"""

from __future__ import annotations

import json
from collections.abc import Generator, Sequence

from quire.gateway.output.call_parser import CallParser
from quire.gateway.output.reasoning import Reasoning
from quire.gateway.output.tool_format import ToolFormat
from quire.gateway.output.tool_grammar import (
    Beginning,
    SpecialTokens,
    answer_grammar,
    json_names_and_arguments,
    quoted,
)
from quire.gateway.output.tools import Tool, ToolChoice

_OPEN = r'\s*\{\s*"tool"\s*:\s*'
_CANONICAL = '{"tool": '
_PROMPT = """You can call functions. Each line describes one:
{tools}
To call a function, answer with nothing but one JSON object: {{"tool": "<name>", "arguments": {{<arguments>}}}}
Write one object per line to call several functions. Otherwise answer as usual."""


class JsonParser(CallParser):
    begins_with_call = True

    def read_call(self, trigger: str) -> Generator[None, None, None]:
        while True:
            yield from self.source.spaces()
            yield from self.read_json_call("tool", ("arguments",))
            self.end_call()
            yield from self.source.spaces()
            if (yield from self.source.peek()) != "{":
                return


class Json(ToolFormat):
    name = "json"
    json_keys = ("tool", "arguments")

    def parser(self, tools: Sequence[Tool], is_forced: bool = False) -> JsonParser:
        return JsonParser(tools, is_forced)

    def grammar(
        self,
        tools: Sequence[Tool],
        choice: ToolChoice,
        special_tokens: SpecialTokens,
        reasoning: Reasoning | None = None,
    ) -> str:
        following = f"({quoted(chr(10) + _CANONICAL)} call)*" if choice.parallel else ""
        rules = [
            f"calls: call {following} NEWLINES",
            'call: named "}"',
            f"named: {json_names_and_arguments(choice.callable_tools(tools), 'arguments')}",
        ]
        beginning = Beginning(pattern=_OPEN, rest="calls")
        return answer_grammar(choice, special_tokens, reasoning, f"{quoted(_CANONICAL)} calls", [beginning], rules)

    def prompt(self, tools: Sequence[Tool]) -> str:
        lines = [
            json.dumps(
                {"name": tool.name, "description": tool.description, "parameters": dict(tool.parameters)},
                ensure_ascii=False,
            )
            for tool in tools
        ]
        return _PROMPT.format(tools="\n".join(lines))
