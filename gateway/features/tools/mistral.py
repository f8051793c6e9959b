"""Tool calls after `[TOOL_CALLS]`, of Mistral's models, in two forms: a JSON list, and since tokenizer version 11 a
name with JSON for each call.

    [TOOL_CALLS][{"name": "get_weather", "arguments": {"city": "Paris"}}]
    [TOOL_CALLS]get_weather[ARGS]{"city": "Paris"}
"""

from __future__ import annotations

import json
from collections.abc import Generator, Mapping, Sequence
from typing import Any

from quire.gateway.features.tools.json_lists import CALLS, ListFormat, ListParser
from quire.gateway.features.tools.tool_format import MarkedFormat
from quire.gateway.features.tools.tool_grammar import SpecialTokens, lark_arguments, lark_text, quoted, several
from quire.gateway.output.tools import Tool

ARGS, CALL_ID = "[ARGS]", "[CALL_ID]"
_MARKERS = frozenset({CALLS, ARGS, CALL_ID})


class MistralParser(ListParser):
    """Reads both forms. An id that the model gives to a call is dropped."""

    triggers = (CALLS,)

    def read_call(self, trigger: str) -> Generator[None, None, None]:
        source = self.source
        yield from source.spaces()
        if (yield from source.peek()) == "[":
            yield from super().read_call(trigger)
            return
        name = yield from source.word("[{")
        if (yield from source.peek()) == "[" and (yield from source.one_of(ARGS, CALL_ID)) == CALL_ID:
            yield from source.until(ARGS)
        yield from source.spaces()
        yield from self.read_named_arguments(name.strip())


class MistralList(ListFormat):
    name = "mistral"
    parser_type = MistralParser
    markers = _MARKERS
    tail = r'/(, "id": "[a-zA-Z0-9]{9}")?\}/'


class MistralNames(MarkedFormat):
    name = "mistral_args"
    parser_type = MistralParser
    markers = _MARKERS

    def written(self, name: str, arguments: Mapping[str, Any]) -> str:
        return f"{CALLS}{name}{ARGS}{json.dumps(arguments, ensure_ascii=False)}"

    def rules(self, tools: Sequence[Tool], is_parallel: bool, special_tokens: SpecialTokens) -> list[str]:
        args = lark_text(ARGS, special_tokens)
        if CALL_ID in special_tokens:
            args = f"({lark_text(CALL_ID, special_tokens)} /[a-zA-Z0-9]{{9}}/)? {args}"
        calls = " | ".join(f"{quoted(tool.name)} args {lark_arguments(tool)}" for tool in tools)
        following = several("call", lark_text(CALLS, special_tokens), is_parallel)
        return [f"calls: {following}", f"args: {args}", f"call: {calls}"]
